"""Profiles of a model and its data on this kind of device: measured with all runtimes, or counted from shapes."""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate, pairwise
from typing import cast

import msgspec
import torch
from torch import Tensor

from penstock.errors import DataError, PlanError, RunError
from penstock.graph.cuts import Cut, Cuts, divide, graph_fingerprint
from penstock.graph.graph import SECONDS_PER_CROSSING_BYTE, Graph, count_work
from penstock.graph.ops import State
from penstock.group.launcher import code_command, module_path
from penstock.measure.backward import (
    Loss,
    TrainingBytes,
    loss_bytes,
    measure_loss,
    measure_sum_s_per_byte,
    measure_training,
    measure_update_s_per_byte,
    unit_bytes,
)
from penstock.measure.costs import (
    MessageCosts,
    Timing,
    UnitSeconds,
    cached_by_units,
    held_by_units,
    line_through,
    measure_seconds,
    random_input,
    working_bytes,
)
from penstock.resources import anonymous_bytes
from penstock.runtime.onnx.blocks import PART_BYTES
from penstock.runtime.registry import EAGER, RuntimeChoice, StageRuntime
from penstock.spec.plan import Precision
from penstock.spec.profile import COUNTED, Boundary, Profile, RuntimeColumn, Unit
from penstock.tensors import HOST, copy_exactly, moved
from penstock.text import note
from penstock.zoo.data.image_set import ImageSet
from penstock.zoo.models.models import ZooModel

ROWS = (1, 2, 4, 8)
# under torchrun and on hosts, a worker is the command's own process, which is larger than a locally started worker
_MEASURE_BASE = """
import penstock.resources
penstock.resources.share_arena()
import torch
import penstock.cli.main
import penstock.cli.bench
import penstock.cli.infer
import penstock.deploy.worker
import penstock.transport.zeromq
torch.set_num_threads(1)
torch.nn.functional.linear(torch.randn(8, 64), torch.randn(64, 64))
print(penstock.resources.anonymous_bytes())
"""
_NUM_ROWS = 32
_INPUTS = 4
# a microbatch of so many rows and that number, with tensors from a generator
MakeInputs = Callable[[int, int, torch.Generator], Sequence[Tensor]]


def profile_graph(
    graph: Graph, load: Callable[[State], Tensor], *, rows: Sequence[int] = ROWS, threads: int = 1, repeats: int = 7,
    training: bool = False, loss: Loss | None = None, messages: MessageCosts | None = None,
    cuts: Sequence[Cut] | None = None, sizes: Mapping[str, int] | None = None, largest: Mapping[str, int] | None = None,
    single: Mapping[str, int] | None = None, integer: int = 1, device: torch.device = HOST,
) -> Profile:  # fmt: skip
    """Measure every range between possible or given cuts at several batch sizes.

    Example:
        profile = profile_graph(graph, load, rows=(1, 4), messages=measure_messages())

    Sizes other than rows are taken from `sizes`, or 1; the memory of values is counted at `largest`, and for a
    microbatch of a single row at `single`. Integer inputs have the value `integer`. Caches count as bytes kept per row.

    Needs the whole model in memory. Seconds are measured on `device` with `threads` threads. With `training`, the
    graph must be of a model in training mode; units then have backward seconds and kept bytes, the last unit including
    `loss`. Values that depend on the machine or the data are left at 0: base_bytes, script_bytes, calibration_s,
    loader_s_per_row.
    """
    cuts = list(Cuts(graph) if cuts is None else cuts)
    rows = (graph.fixed_batch,) if graph.fixed_batch else tuple(sorted(set(rows)))
    timing = Timing(rows, threads, repeats, sizes or {}, integer, device)
    boundaries = _boundaries_of(graph, cuts)
    counted = units_in_bytes(
        graph, cuts, rows[-1], largest=largest or sizes, single=single, training=training, loss=loss
    )
    units = _timed(counted, graph, load, cuts, timing, training=training)
    if loss is not None:
        units = (*units[:-1], _with_loss(units[-1], measure_loss(graph, load, loss, timing)))
    return Profile(
        model=graph.model, graph=graph_fingerprint(graph), device=device_kind(device), threads=threads, rows=rows,
        boundaries=boundaries, units=units, **asdict(messages or MessageCosts()),
        update_s_per_byte=measure_update_s_per_byte(timing) if training else 0.0,
        sum_s_per_byte=measure_sum_s_per_byte(timing) if training else 0.0,
    )  # fmt: skip


def _timed(
    counted: Sequence[Unit], graph: Graph, load: Callable[[State], Tensor], cuts: list[Cut], timing: Timing, *,
    training: bool,
) -> tuple[Unit, ...]:  # fmt: skip
    positions = [0, *(cut.position for cut in cuts), len(graph.ops)]
    backward: list[UnitSeconds] | None = None
    if training:
        both = measure_training(graph, load, cuts, timing)
        forward, backward = [seconds.forward for seconds in both], [seconds.backward for seconds in both]
    else:
        forward = measure_seconds(graph, load, positions, timing)
    return tuple(
        msgspec.structs.replace(
            unit,
            forward_s=tuple(seconds.median_s[index] for seconds in forward),
            forward_spread_s=tuple(seconds.spread_s[index] for seconds in forward),
            backward_s=tuple(seconds.median_s[index] for seconds in backward) if backward else None,
            backward_spread_s=tuple(seconds.spread_s[index] for seconds in backward) if backward else (),
        )
        for index, unit in enumerate(counted)
    )


def _with_loss(unit: Unit, seconds: Sequence[tuple[float, float]]) -> Unit:
    forward_s = tuple(own + more for own, (more, _) in zip(unit.forward_s, seconds, strict=True))
    backward_s = tuple(own + more for own, (_, more) in zip(unit.backward_s or (), seconds, strict=True))
    return msgspec.structs.replace(unit, forward_s=forward_s, backward_s=backward_s)


def device_kind(device: torch.device = HOST) -> str:
    """Return a short description of this machine's processor, or of its GPU."""
    if device != HOST:
        return str(torch.get_device_module(device).get_device_name(device))
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def script_bytes(base_bytes: float) -> float:
    """Return this process's memory beyond a worker's base; call it after capture, before weights are loaded.

    The driver also holds the model's library and graph, as does every process that trains.
    """
    return max(0.0, (anonymous_bytes() or 0.0) - base_bytes)


def worker_bytes() -> float:
    """Measure the anonymous memory of a worker process before it holds a stage, in bytes.

    Raises `RunError` on systems that do not report it.
    """
    env = {**os.environ, "PYTHONPATH": module_path()}
    done = subprocess.run(code_command(_MEASURE_BASE), env=env, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RunError(f"a worker's memory could not be measured: {(done.stderr.splitlines() or ['no reason'])[-1]}")
    if done.stdout.strip() == "None":
        raise RunError("this system does not report the memory of a process, so plans cannot respect it")
    return float(done.stdout)


def measure_rows(rows: Sequence[object]) -> float:
    """Return the median CPU seconds to load a row of a data set, over up to 32 rows spread over the set."""
    return statistics.median(_seconds(len(rows), rows.__getitem__))


def measure_loader(model: ZooModel, images: ImageSet) -> float:
    """Return the median CPU seconds to read and preprocess an image for a model.

    Uses up to 32 images, spread over the set; images that cannot be read do not count.

    Example:
        loader_s_per_row = measure_loader(load_model("timm:deit_small_patch16_224"), open_images("photos/"))

    Raises `ModelError` for a model that takes no images, and `DataError` if none can be read.
    """
    transform = model.pictures()
    seconds = _seconds(len(images), lambda index: transform(images.read(index)), skipped=DataError)
    if not seconds:
        raise DataError(f"none of the {len(images)} images can be read; give others")
    return statistics.median(seconds)


def _seconds(count: int, read: Callable[[int], object], *, skipped: type[Exception] | tuple[()] = ()) -> list[float]:
    """Time the reading of some rows, spread over all rows, without skipped rows."""
    seconds = []
    for index in range(0, count, max(1, count // _NUM_ROWS)):
        begin = time.thread_time()
        try:
            read(index)
        except skipped:
            continue
        seconds.append(time.thread_time() - begin)
    return seconds


def measure_runtimes(
    graph: Graph,
    load: Callable[[State], Tensor],
    choices: Sequence[RuntimeChoice],
    timing: Timing,
    make_inputs: MakeInputs | None = None,
) -> tuple[RuntimeColumn, ...]:
    """Measure a column for each runtime at every batch size, alternating with eager, on given or random inputs.

    Example:
        measure_runtimes(graph, load, [RuntimeChoice("openvino", "bfloat16")], Timing((1, 4)))

    Needs the whole model in memory. Runtimes that cannot run the model or are not installed are left out, with a note.
    """
    if not choices:
        return ()
    torch.set_num_threads(timing.threads)
    program = divide(graph, [])[0]

    weights = {state.value.name: load(state) for state in program.states if state.kind != "cache"}

    def loaded(choice: RuntimeChoice) -> StageRuntime:
        # each runtime writes its own caches
        caches = {state.value.name: load(state) for state in program.states if state.kind == "cache"}
        return choice.load(program, weights | caches)

    eager = loaded(EAGER)
    found = []
    for choice in choices:
        try:
            other = loaded(choice)
            rows = [
                _compare(graph, eager, other, count, timing, make_inputs or partial(_random_inputs, graph, timing))
                for count in timing.rows
            ]
        except PlanError as error:
            note(f"{choice} is left out: {error}")
            continue
        found.append(RuntimeColumn(
            runtime=choice.name, precision=cast(Precision, choice.precision), keep=choice.keep,
            forward_s=tuple(row[0] for row in rows), eager_s=tuple(row[1] for row in rows),
            error=max(row[2] for row in rows),
        ))  # fmt: skip
    return tuple(found)


def _random_inputs(
    graph: Graph, timing: Timing, rows: int, _number: int, generator: torch.Generator
) -> Sequence[Tensor]:
    sizes = graph.sizes(rows, **timing.sizes)
    return [random_input(value, sizes, generator, integer=timing.integer) for value in graph.tensor_inputs()]


def _compare(
    graph: Graph, eager: StageRuntime, other: StageRuntime, rows: int, timing: Timing, make_inputs: MakeInputs
) -> tuple[float, float, float]:
    sizes = graph.sizes(rows, **timing.sizes)
    errors = []
    generator = torch.Generator().manual_seed(0)
    for number in range(_INPUTS):
        inputs = make_inputs(rows, number, generator)
        wanted, outputs = _run(eager, sizes, inputs), _run(other, sizes, inputs)
        errors += [relative_error(x, y) for x, y in zip(wanted, outputs, strict=True) if x.is_floating_point()]
    # CPU time of the process, because a runtime's own threads compute for this thread; a GPU has none
    clock = time.process_time if timing.threads == 1 and other.device == HOST else time.perf_counter
    seconds: list[tuple[float, float]] = []
    for _ in range(timing.repeats_for(rows)):
        begin = clock()
        _run(other, sizes, inputs)
        middle = clock()
        _run(eager, sizes, inputs)
        seconds.append((middle - begin, clock() - middle))
    fast, slow = (statistics.median(column) for column in zip(*seconds, strict=True))
    return fast, slow, max(errors, default=0.0)


def _run(runtime: StageRuntime, sizes: Mapping[str, int], inputs: Sequence[Tensor]) -> list[Tensor]:
    with torch.inference_mode():
        outputs = runtime(sizes, [copy_exactly(tensor, runtime.device) for tensor in inputs])
        return [moved(tensor, HOST) for tensor in outputs]  # as messages of a stage on a GPU


def relative_error(wanted: Tensor, found: Tensor) -> float:
    """Return the norm of a difference, relative to the norm of the expected tensor.

    >>> relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    0.1
    """
    length = float(torch.linalg.vector_norm(wanted.double()))
    return float(torch.linalg.vector_norm((found - wanted).double())) / length if length else 0.0


def counted_profile(graph: Graph, rows: int, count: Callable[[Sequence[Cut]], Sequence[Unit]] | None = None) -> Profile:
    """Return a profile of a graph for microbatches of n rows, in seconds of a nominal core.

    Units have the bytes that `count` finds between cuts, by default only those of parameters. Seconds are roughly
    proportional to real times, which suffices because device speeds are observed relative to the same counts.

    Example:
        plan = make_plan(counted_profile(graph, rows=1), cluster)
    """
    rows = graph.fixed_batch or rows
    cuts = list(Cuts(graph))
    positions = _positions(graph, cuts)
    reached = [0.0, *accumulate(count_work(graph, graph.sizes(rows)))]
    held = held_by_units(graph, positions) if count is None else []
    counted = count(cuts) if count else [Unit(forward_s=(0.0,), parameters=each) for each in held]
    units = tuple(
        msgspec.structs.replace(unit, forward_s=(reached[stop] - reached[start],))
        for (start, stop), unit in zip(pairwise(positions), counted, strict=True)
    )
    return Profile(
        model=graph.model, graph=graph_fingerprint(graph), device=COUNTED, threads=1, rows=(rows,),
        boundaries=_boundaries_of(graph, cuts), units=units,
        send_s_per_byte=SECONDS_PER_CROSSING_BYTE, receive_s_per_byte=SECONDS_PER_CROSSING_BYTE,
    )  # fmt: skip


def units_in_bytes(
    graph: Graph, cuts: Sequence[Cut], rows: int, *, largest: Mapping[str, int] | None = None,
    single: Mapping[str, int] | None = None, training: bool = False, loss: Loss | None = None,
) -> tuple[Unit, ...]:  # fmt: skip
    """Return the units between cuts with their bytes, and without seconds; for the arguments, see `profile_graph`.

    Example:
        sum(unit.kept_bytes_per_row for unit in units_in_bytes(graph, list(Cuts(graph)), rows=4, training=True))
    """
    positions, boundaries = _positions(graph, cuts), _boundaries_of(graph, cuts)
    held, cached = held_by_units(graph, positions, packed=True), cached_by_units(graph, positions)
    one, two = (working_bytes(graph, positions, count, largest) for count in (1, 2))
    least = working_bytes(graph, positions, 1, single) if single is not None else [0.0] * len(one)
    if any(state.packing for state in graph.states):
        least = [max(some, making) for some, making in zip(least, _making_bytes(held), strict=True)]
    units = [
        Unit(
            forward_s=(0.0,),
            parameters=held[index],
            kept_bytes_per_row=cached[index],
            working_bytes_per_row=two[index] - one[index],
            working_bytes=max(least[index], 2 * one[index] - two[index]),
        )
        for index in range(len(positions) - 1)
    ]
    if training:
        needs = zip(units, unit_bytes(graph, cuts), boundaries[1:], strict=True)
        units = [_with_bytes(unit, need, rows, after) for unit, need, after in needs]
    if loss is not None:
        units[-1] = _with_bytes(units[-1], loss_bytes(graph, loss), rows)
    return tuple(units)


def _making_bytes(held: Sequence[tuple[tuple[str, int], ...]]) -> list[float]:
    """Return the bytes that an engine takes for a moment while it is made of a unit's weights in blocks.

    It is made in parts of 32 MiB, or of one weight.
    """
    sizes = [max(dict(unit).values(), default=0) for unit in held]
    part = min(sum(sum(dict(unit).values()) for unit in held), 2 * PART_BYTES)
    return [max(2.0 * size, 1.5 * part) for size in sizes]


def _positions(graph: Graph, cuts: Sequence[Cut]) -> list[int]:
    return [0, *(cut.position for cut in cuts), len(graph.ops)]


def _with_bytes(unit: Unit, needs: TrainingBytes, rows: int, after: Boundary | None = None) -> Unit:
    """Add the bytes kept until a backward, and use the backward's working memory if larger, for `rows` rows.

    The backward of a unit begins with the gradients of the values that cross after it.
    """
    per_row, constant = needs.working_per_row, needs.working
    if after is not None:
        per_row, constant = per_row + after.bytes_per_row, constant + after.constant_bytes
    if unit.working_bytes_per_row * rows + unit.working_bytes < per_row * rows + constant:
        unit = msgspec.structs.replace(unit, working_bytes_per_row=per_row, working_bytes=constant)
    return msgspec.structs.replace(unit, kept_bytes_per_row=unit.kept_bytes_per_row + needs.kept_per_row)


def _boundaries_of(graph: Graph, cuts: Sequence[Cut]) -> tuple[Boundary, ...]:
    """Return the boundaries of a graph, its ends and cuts, with the bytes that cross there."""
    results = [graph.values[output.name] for output in graph.outputs if hasattr(output, "name")]
    groups = [("input", graph.tensor_inputs()), *((cut.name, cut.crossing) for cut in cuts), ("output", results)]
    boundaries = []
    for name, values in groups:
        per_row, constant = line_through(values, graph)
        boundaries.append(Boundary(name=name, bytes_per_row=max(0.0, per_row), constant_bytes=max(0.0, constant)))
    return tuple(boundaries)
