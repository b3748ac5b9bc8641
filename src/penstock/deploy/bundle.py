"""A plan with each stage's programs and only that stage's weights, in a folder ready to copy to its machine.

    bundle/
      plan.json
      interface.json          inputs and outputs, as a program without operations
      host0/
        part.json             plan and stage, and the SHA-256 of every file
        program-0.json        one program for each cut set
        weights.safetensors

A machine needs only its own folder: neither the model's source nor the other parts.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_structure

from penstock.deploy.policies import divide_plan
from penstock.errors import PlanError, ProgramError
from penstock.graph.graph import Graph
from penstock.graph.ops import Ref, State
from penstock.graph.program import StageProgram, read_interface, read_program, states_of, write_program
from penstock.plan.check import read_plan
from penstock.spec.fields import check_name, decode_json, fingerprint, read_bytes, write_json, write_text
from penstock.spec.plan import Plan, write_plan
from penstock.zoo.weights.weight_files import FileWeights, save_weights

_PART, _PLAN, _INTERFACE, _WEIGHTS = "part.json", "plan.json", "interface.json", "weights.safetensors"
_CHUNK = 1 << 20
LoadState = Callable[[State], Tensor]


class BundlePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of one device's folder: its place in a plan, named by the plan's fingerprint, and its files' hashes."""

    plan: str
    device: str
    pipeline: int
    stage: int
    programs: tuple[str, ...]
    files: dict[str, str]
    version: int = 1


def write_bundle(folder: Path, graph: Graph, plan: Plan, load: LoadState) -> list[Path]:
    """Write a plan's bundle and return the folder of every device; one tensor is in memory at a time.

    Example:
        write_bundle(Path("bundle"), graph, plan, partial(load_state, graph, weights=weights))

    Raises `PlanError` if the plan is for another model, `UsageError` if the folder cannot be written.
    """
    pipelines = divide_plan(graph, plan)
    _check_folders(plan)
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(folder / _PLAN, plan)
    first, last = pipelines[0][0][0], pipelines[0][-1][0]
    write_text(folder / _INTERFACE, write_program(replace(first, states=(), prelude=(), ops=(), outputs=last.outputs)))
    written = []
    for number, (pipeline, programs) in enumerate(zip(plan.pipelines, pipelines, strict=True)):
        for index, (stage, of_stage) in enumerate(zip(pipeline.stages, programs, strict=True)):
            device = stage.device
            part = BundlePart(
                plan=fingerprint(plan), device=device, pipeline=number, stage=index, programs=(), files={}
            )
            written.append(_write_part(folder / device, part, of_stage, load))
    return written


def _check_folders(plan: Plan) -> None:
    """Reject device names that collide with the bundle's own files."""
    for name in plan.devices:
        if name in {_PLAN, _INTERFACE}:
            raise PlanError(f"a device cannot have the name of the bundle's file {name}; rename the device and replan")


def _write_part(folder: Path, part: BundlePart, programs: Sequence[StageProgram], load: LoadState) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"program-{index}.json" for index in range(len(programs))]
    for name, program in zip(names, programs, strict=True):
        write_text(folder / name, write_program(program))
    save_weights(_StateWeights(states_of(programs), load), folder / _WEIGHTS)
    files = {name: hash_file(folder / name) for name in (*names, _WEIGHTS)}
    write_json(folder / _PART, msgspec.structs.replace(part, programs=tuple(names), files=files))
    return folder


def read_part(folder: Path, plan: str) -> tuple[list[StageProgram], dict[str, Tensor]]:
    """Read a device's part of the plan with this fingerprint: its programs and its weights.

    Raises `ProgramError` if the part is of another plan, or if a file was modified.
    """
    part = decode_json(read_bytes(folder / _PART, "a part", ProgramError), BundlePart, "a part", ProgramError)
    if part.plan != plan:
        raise ProgramError(
            f"{folder} is a part of the plan {part.plan}, but this run uses the plan {plan}; copy this plan's bundle"
        )
    for name, expected in part.files.items():
        check_name(f"a file listed in {folder / _PART}", name, ProgramError)
        if hash_file(folder / name) != expected:
            raise ProgramError(f"{folder / name} differs from the bundle's checksum; copy the bundle again")
    unlisted = set(part.programs) - part.files.keys()
    if unlisted or not part.programs or _WEIGHTS not in part.files:
        raise ProgramError(f"{folder / _PART} does not list all of its files; bundle again")
    programs = [read_program(read_bytes(folder / name, "a program", ProgramError)) for name in part.programs]
    weights = FileWeights(folder / _WEIGHTS)
    # copied into memory allocated by torch: tensors in a file have any alignment, and some kernels depend on the
    # alignment
    return programs, {state.value.name: weights.load(state.value.name).clone() for state in states_of(programs)}


def read_bundle(folder: Path) -> tuple[Plan, StageProgram]:
    """Read the driver's part: the plan, and the program with the model's inputs and outputs."""
    plan = read_plan(folder / _PLAN)
    return plan, read_interface(read_bytes(folder / _INTERFACE, "an interface", ProgramError))


def interfaces(interface: StageProgram, num_stages: int, num_programs: int) -> list[tuple[StageProgram, ...]]:
    """Return programs that have only the pipeline's inputs and outputs, which is all that its driver needs."""
    first, last = replace(interface, outputs=()), replace(interface, inputs=())
    between = replace(interface, inputs=(), outputs=())
    if num_stages == 1:
        return [(interface,) * num_programs]
    return [(program,) * num_programs for program in (first, *[between] * (num_stages - 2), last)]


def interface_graph(interface: StageProgram) -> Graph:
    """Return a graph without operations: its call takes the pipeline's inputs in order, and returns a list."""
    return Graph(
        model="the bundle's model", symbols=interface.symbols, inputs=interface.inputs, plain_inputs={},
        input_spec=tree_structure((tuple(interface.inputs), {})), states=(), prelude=(), ops=(), visits=(),
        values={value.name: value for value in (*interface.inputs, *interface.outputs)},
        outputs=tuple(Ref(value.name) for value in interface.outputs),
        output_spec=tree_structure(list(interface.outputs)), fixed_batch=None, constants={}, forbidden={},
    )  # fmt: skip


def hash_file(path: Path) -> str:
    """Return a file's SHA-256; raises `ProgramError` if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise ProgramError(f"{path} cannot be read ({error.strerror}); copy the bundle again") from None
    return digest.hexdigest()


class _StateWeights:
    """A stage's state under the names that its programs use, loaded when it is written."""

    def __init__(self, states: Sequence[State], load: LoadState) -> None:
        self._states: Mapping[str, State] = {state.value.name: state for state in states}
        self._load = load

    def names(self) -> Collection[str]:
        return self._states.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._states[name].value.evaluate({})

    def dtype(self, name: str) -> torch.dtype:
        return self._states[name].value.dtype

    def load(self, name: str) -> Tensor:
        return self._load(self._states[name])
