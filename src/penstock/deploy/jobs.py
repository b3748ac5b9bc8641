"""Jobs of the driver for workers: their documents, programs and weights, and the baseline, which is a job too.

A job is a document of one type for each kind, decoded strictly: names must be valid, counts within bounds, ranks in the
run. The baseline runs the whole model on a single device.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from penstock.deploy.bundle import LoadState, read_part
from penstock.deploy.state import Holdings, compare_holdings, receive_state, send_state
from penstock.engine.job import Count, Few, Short, StagesJob
from penstock.engine.wiring import go_direct
from penstock.errors import ProgramError, UsageError
from penstock.graph.program import StageProgram, read_interface, read_program, states_of, write_program
from penstock.group.world import Leave, World
from penstock.runtime.registry import EAGER, RuntimeChoice, StageRuntime
from penstock.runtime.torch_settings import applied, read_settings
from penstock.runtime.torch_settings import check_settings as check_torch_settings
from penstock.spec.fields import check_name
from penstock.tensors import HOST, copy_exactly, find_device, moved, synchronize
from penstock.transport.base import (
    JOB_BYTES,
    WORD_BYTES,
    Transport,
    receive_bytes,
    receive_tensor,
    send_bytes,
    send_tensor,
)
from penstock.wire import FEEDER


class RunBaseline(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="alone", forbid_unknown_fields=True):
    """A job that runs a whole model on one worker, on inputs that follow, and reports the seconds."""

    program: str
    sizes: dict[Short, Count]
    threads: Few
    num_inputs: Few
    num_microbatches: Count
    computes_on: Short = "cpu"
    torch_settings: dict[Short, bool | Short] = {}


class DoMore(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="more", forbid_unknown_fields=True):
    """An additional job of a worker, selected by `name` among those that the worker was started with."""

    name: Short
    settings: dict[str, Any]


Document = Leave | StagesJob | RunBaseline | DoMore


def write_document(document: Document) -> bytes:
    """Encode a document for `read_document`."""
    return msgspec.json.encode(document)


def read_document(data: bytes, num_ranks: int) -> Document:
    """Decode a job from the driver. Raises `ProgramError` if the job is not valid for this worker.

    >>> read_document(write_document(Leave(message="done")), num_ranks=2).message
    'done'
    """
    try:
        document: Document = msgspec.json.decode(data, type=Document)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ProgramError(
            f"a worker serves stages and runs programs; got another request ({error}); start every process with the "
            "same command"
        ) from None
    if isinstance(document, StagesJob | RunBaseline):
        check_torch_settings(document.torch_settings)
    if isinstance(document, StagesJob):
        _check_stages(document, num_ranks)
    return document


def _check_stages(document: StagesJob, num_ranks: int) -> None:
    if not document.ranks or max(document.ranks) >= num_ranks:
        raise ProgramError(
            f"a stage's rank must be below {num_ranks}, the number of processes; got "
            f"{max(document.ranks, default='no stage')}; start again"
        )
    for index, programs in document.programs.items():
        if not 0 <= index < len(document.ranks):
            raise ProgramError(
                f"a stage index of this job must be below {len(document.ranks)}; got {index}; start again"
            )
        if document.source != "bundle" and len(programs) != document.num_programs:
            raise ProgramError(
                f"stage {index} of a job must have {document.num_programs} programs; got {len(programs)}; start again"
            )
    if len(document.runtimes) not in (0, len(document.ranks)):
        raise ProgramError(
            f"expected {len(document.ranks)} runtimes, one per stage; got {len(document.runtimes)}; start again"
        )
    if len(document.device_names) != num_ranks:
        raise ProgramError(
            f"expected {num_ranks} names, one for each of {num_ranks} processes; got {len(document.device_names)}"
        )
    if document.source == "bundle":
        check_name("the device of a job", document.part, ProgramError)


def check_settings(settings: Mapping[str, Any], wanted: type[Any]) -> Any:
    """Convert the settings of a `DoMore` to a struct; raises `ProgramError`."""
    try:
        return msgspec.convert(settings, wanted)
    except msgspec.MsgspecError as error:
        raise ProgramError(
            f"a job's settings are not valid: {error}; start every process with the same command"
        ) from None


# makes a stage's runtime in a process that has the stage's module; only the stage's interface is sent
MakeRuntime = Callable[[int, StageProgram], StageRuntime]
Programs = Sequence[StageProgram]  # of one stage, in the order of their numbers
Runtimes = Sequence[StageRuntime]


@dataclass(frozen=True, slots=True)
class FromWeights:
    """Programs and weights of the driver, which reads one tensor at a time."""

    kind: ClassVar[Literal["weights"]] = "weights"

    load: LoadState

    def make(self, _index: int, programs: Programs, runtime: RuntimeChoice, device: torch.device) -> Runtimes:
        """Make a stage's runtimes in the driver."""
        # copied, as for other processes: the caller may go on changing the model
        return load_programs(programs, lambda state: copy_exactly(self.load(state), device), device, runtime)


@dataclass(frozen=True, slots=True)
class FromBundle:
    """A bundle whose parts the ranks read from separate folders: the plan's fingerprint, and each rank's device."""

    kind: ClassVar[Literal["bundle"]] = "bundle"

    folder: Path
    plan: str
    devices: Mapping[int, str]

    def make(self, _index: int, programs: Programs, runtime: RuntimeChoice, device: torch.device) -> Runtimes:
        """Make a stage's runtimes in the driver."""
        return load_part(self.folder / self.devices[FEEDER], self.plan, len(programs), device, runtime)


@dataclass(frozen=True, slots=True)
class FromModules:
    """Modules of the caller, available in every process."""

    kind: ClassVar[Literal["modules"]] = "modules"

    make_runtime: MakeRuntime

    def make(self, index: int, programs: Programs, _runtime: RuntimeChoice, _device: torch.device) -> Runtimes:
        """Make a stage's runtimes in the driver."""
        return [self.make_runtime(index, program) for program in programs]


Source = FromWeights | FromBundle | FromModules


def load_part(
    folder: Path, plan: str, num_programs: int, device: torch.device = HOST, runtime: RuntimeChoice = EAGER
) -> Runtimes:
    """Make a stage's runtimes from a device's part of a bundle."""
    programs, tensors = read_part(folder, plan)
    if len(programs) != num_programs:
        raise ProgramError(f"{folder} has {len(programs)} programs, but the job uses {num_programs}; bundle again")
    there = {name: moved(tensor, device) for name, tensor in tensors.items()}
    return [runtime.load(program, there, device) for program in programs]


def load_programs(
    programs: Sequence[StageProgram], load: LoadState, device: torch.device = HOST, runtime: RuntimeChoice = EAGER
) -> list[StageRuntime]:
    """Make runtimes in this process that share their common tensors."""
    tensors = {state.value.name: moved(load(state), device) for state in states_of(programs)}  # without caches
    return [runtime.load(program, tensors, device) for program in programs]


def send_stages(
    transport: Transport, job: StagesJob, programs: Sequence[Programs], source: Source, *, compare: bool = False
) -> None:
    """Send every other rank its stages, reading one weight at a time.

    With `compare`, send only tensors that the rank does not already hold.
    """
    others = sorted(job.holders - {transport.rank})
    for rank in others:
        indices = job.stages_of(rank)
        texts = {index: [write_program(program) for program in programs[index]] for index in indices}
        part = source if isinstance(source, FromBundle) else None
        document = msgspec.structs.replace(
            job,
            source=source.kind,
            programs=texts,
            num_programs=len(programs[0]),
            plan=part.plan if part else "",
            part=part.devices[rank] if part else "",
            compare=compare and isinstance(source, FromWeights),
        )
        send_bytes(transport, write_document(document), rank)
    if not isinstance(source, FromWeights):
        return
    for rank in others:
        states = [states_of(programs[index]) for index in job.stages_of(rank)]
        there: Collection[str] = ()
        if compare:
            there = compare_holdings(transport, rank, [state for own in states for state in own], source.load)
        for own in states:
            send_state(transport, [state for state in own if state.value.name not in there], source.load, rank)


def receive_job(transport: Transport) -> Document:
    """Wait for the next job's document; raises `ProgramError` as `read_document` does."""
    return read_document(receive_bytes(transport, FEEDER, limit=JOB_BYTES), transport.size)


def receive_stages(transport: Transport) -> StagesJob:
    """Wait for the document of a job that serves stages; raises `ProgramError` for any other job."""
    document = receive_job(transport)
    if not isinstance(document, StagesJob):
        raise ProgramError(
            "a Pipeline's process expects a job that serves stages; got another job; run the same script in all "
            "processes"
        )
    return document


def read_stages(
    world: World,
    job: StagesJob,
    make: MakeRuntime | None = None,
    bundle: Path | None = None,
    holdings: Holdings | None = None,
) -> tuple[dict[int, Runtimes], bool]:
    """Make the runtimes of a job's stages: from weights that follow, from modules, or from a bundle.

    Returns the stages' runtimes, and whether tensors between stages are sent from device to device. Tensors among
    `holdings` need not be sent; received tensors are added to them.

    Raises `UsageError` if the job needs modules or a bundle that this process lacks, and as `find_device` and
    `RuntimeChoice.place` do.
    """
    if set(job.programs) != set(job.stages_of(world.rank)):
        raise ProgramError(f"a job must have a program for each stage of a process; got stages {sorted(job.programs)}")
    device = find_device(job.options.device, world.position)
    runtimes: dict[int, Runtimes] = {}
    holdings = holdings or Holdings()
    read: dict[int, list[StageProgram]] = {}
    there: dict[str, Tensor] = {}
    if job.source == "weights":
        read = {index: [read_program(text) for text in texts] for index, texts in job.programs.items()}
        if job.compare:
            there = holdings.claim(world.transport, [s for programs in read.values() for s in states_of(programs)])
    for index, texts in job.programs.items():
        runtime = job.runtime_of(index)
        own = runtime.place(device, world.position)
        if job.source == "bundle":
            if bundle is None:
                raise UsageError(
                    "the stages are in a bundle, and this process has no bundle folder; give it the folder"
                )
            runtimes[index] = load_part(bundle / job.part, job.plan, job.num_programs, own, runtime)
        elif job.source == "weights":
            programs, states = read[index], states_of(read[index])
            missing = [state for state in states if state.value.name not in there]
            names = [state.value.name for state in states]
            tensors = {name: moved(there[name], own) for name in names if name in there}
            tensors |= receive_state(world.transport, missing, own)
            # an engine holds weights in blocks in its own order, and releases the bytes that it was made of
            holdings.keep([state for state in states if not (runtime.is_stored and state.packing)], tensors)
            runtimes[index] = [runtime.load(program, tensors, own) for program in programs]
        elif make is None:
            raise UsageError("the stages are modules, and this process has none; pass the same list to its Pipeline")
        else:
            runtimes[index] = [make(index, read_interface(text)) for text in texts]
    direct = device != HOST and job.source != "modules" and go_direct(world, job.holders, device)
    return runtimes, direct


def ask_baseline(
    transport: Transport,
    rank: int,
    program: StageProgram,
    load: LoadState,
    *,
    inputs: Sequence[Sequence[Tensor]],
    sizes: Mapping[str, int],
    num_microbatches: int,
    threads: int,
    computes_on: str = "cpu",
) -> None:
    """Request a run of the whole model on one rank; `collect_baseline` returns its result."""
    document = RunBaseline(
        program=write_program(program),
        sizes=dict(sizes),
        threads=threads,
        num_inputs=len(inputs),
        num_microbatches=num_microbatches,
        computes_on=computes_on,
        torch_settings=dict(read_settings()),
    )
    send_bytes(transport, write_document(document), rank)
    send_state(transport, states_of([program]), load, rank)
    for microbatch in inputs:
        for tensor in microbatch:
            send_tensor(transport, tensor, rank)


def serve_baseline(world: World, document: RunBaseline) -> None:
    """Run the whole model on this rank, with inputs and outputs in memory, once all ranks are ready."""
    transport, device = world.transport, find_device(document.computes_on, world.position)
    program = read_program(document.program)
    sizes = document.sizes
    runtime = EAGER.load(program, receive_state(transport, states_of([program]), device), device)
    inputs = []
    for _ in range(document.num_inputs):
        tensors = [torch.empty(value.evaluate(sizes), dtype=value.dtype) for value in program.inputs]
        for tensor in tensors:
            receive_tensor(transport, tensor, FEEDER)
        inputs.append(tensors)
    torch.set_num_threads(document.threads)
    with applied(document.torch_settings):
        outputs, seconds = run_baseline(runtime, sizes, inputs, document.num_microbatches, transport)
    send_bytes(transport, json.dumps({"seconds": seconds}).encode(), FEEDER)
    for result in outputs:
        for tensor in result:
            send_tensor(transport, tensor, FEEDER)


def run_baseline(
    runtime: StageRuntime,
    sizes: Mapping[str, int],
    inputs: Sequence[Sequence[Tensor]],
    num_microbatches: int,
    transport: Transport | None = None,
) -> tuple[list[list[Tensor]], float]:
    """Warm up on every input, wait for the start signal, then time n microbatches; outputs are on the host."""
    with torch.inference_mode():
        inputs = [[moved(tensor, runtime.device) for tensor in microbatch] for microbatch in inputs]
        outputs = [[tensor.to("cpu", copy=True) for tensor in runtime(sizes, microbatch)] for microbatch in inputs]
        if transport is not None:
            send_bytes(transport, b"ready", FEEDER)
            receive_bytes(transport, FEEDER, limit=WORD_BYTES)
        return outputs, time_baseline(runtime, sizes, inputs, num_microbatches)


def time_baseline(
    runtime: StageRuntime, sizes: Mapping[str, int], inputs: Sequence[Sequence[Tensor]], num_microbatches: int
) -> float:
    """Time n microbatches, cycling through the inputs, and return the seconds; inputs are on the runtime's device."""
    begin = time.perf_counter()
    for index in range(num_microbatches):
        runtime(sizes, inputs[index % len(inputs)])
    synchronize(runtime.device)
    return time.perf_counter() - begin


def release_baselines(transport: Transport, ranks: Sequence[int]) -> None:
    """Wait until all of these ranks are warm, then start them simultaneously."""
    for rank in ranks:
        receive_bytes(transport, rank, limit=WORD_BYTES)
    for rank in ranks:
        send_bytes(transport, b"go", rank)


def collect_baseline(
    transport: Transport, rank: int, program: StageProgram, sizes: Mapping[str, int], num_inputs: int
) -> tuple[list[list[Tensor]], float]:
    """Receive the result of `ask_baseline`: the outputs for each input, and the seconds."""
    seconds = float(json.loads(receive_bytes(transport, rank, limit=WORD_BYTES))["seconds"])
    outputs = []
    for _ in range(num_inputs):
        tensors = [torch.empty(value.evaluate(sizes), dtype=value.dtype) for value in program.outputs]
        for tensor in tensors:
            receive_tensor(transport, tensor, rank)
        outputs.append(tensors)
    return outputs, seconds
