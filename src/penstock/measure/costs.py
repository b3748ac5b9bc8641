"""Costs of operations and units: seconds within the whole model at several batch sizes, and bytes; and of messages."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from penstock.graph.cuts import divide
from penstock.graph.graph import Graph
from penstock.graph.ops import Ref, State, effect
from penstock.graph.program import states_of
from penstock.runtime.onnx.blocks import engine_bytes, weight_of
from penstock.runtime.registry import EAGER, StageRuntime
from penstock.tensors import HOST, synchronize
from penstock.values import Value


@dataclass(frozen=True, slots=True)
class MessageCosts:
    """CPU seconds of messages, without the model's own work; see `measure_messages`."""

    send_s_per_byte: float = 0.0
    receive_s_per_byte: float = 0.0
    stage_overhead_s: float = 0.0
    feed_s: float = 0.0
    result_s: float = 0.0
    own_input_s: float = 0.0
    own_output_s: float = 0.0


def measure_work(
    graph: Graph, load: Callable[[State], Tensor], *, rows: int = 1, repeats: int = 7, threads: int | None = None
) -> list[float]:
    """Return the median seconds of every operation over several passes, after a warm-up pass.

    The inputs are random; their values do not affect the costs. Needs the whole model in memory.

    Example:
        choose_cuts(graph, cuts, stages=4, work=measure_work(graph, load))
    """
    if threads:
        torch.set_num_threads(threads)
    program = divide(graph, [])[0]
    runtime = EAGER.load(program, {state.value.name: load(state) for state in program.states})
    sizes = graph.sizes(graph.fixed_batch or rows)
    inputs = [random_input(value, sizes) for value in graph.tensor_inputs()]
    with torch.inference_mode():
        runtime.watched(sizes, inputs, time.perf_counter)[1]
        passes = [runtime.watched(sizes, inputs, time.perf_counter)[1] for _ in range(repeats)]
    return [statistics.median(times) for times in zip(*passes, strict=True)]


def random_input(
    value: Value, sizes: dict[str, int], generator: torch.Generator | None = None, *, integer: int = 1
) -> Tensor:
    """Return a random tensor for an input: normal floats, or one constant value for integers and booleans."""
    shape = value.evaluate(sizes)
    if value.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(value.dtype)
    return torch.full(shape, integer, dtype=value.dtype)


_LOOKUP = "aten.embedding.default"
_CONVOLUTIONS = {f"aten.conv{d}d.default" for d in (1, 2, 3)} | {"aten.convolution.default"}
# passes are repeated while the range of their totals exceeds this fraction of the median
STEADY = 0.03
# limits on the repetitions: how many times, and how many seconds per batch size
MOST_ROUNDS = 4
MOST_S = 2.5


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """Median seconds of every unit for one batch size, and their interquartile range."""

    median_s: tuple[float, ...]
    spread_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """Settings for timing units.

    Batch sizes, threads, passes at the smallest size (larger sizes vary less), sizes other than rows, the value of
    integer inputs, and the device.
    """

    rows: Sequence[int]
    threads: int = 1
    repeats: int = 7
    sizes: Mapping[str, int] = field(default_factory=dict)
    integer: int = 1
    device: torch.device = HOST

    @property
    def clock(self) -> Callable[[], float]:
        """CPU time with one thread, so that other processes do not affect it; otherwise wall-clock time.

        On a GPU it waits until all operations have finished.
        """
        if self.device != HOST:
            return self._settled_clock
        return time.thread_time if self.threads == 1 else time.perf_counter

    def _settled_clock(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def repeats_for(self, rows: int) -> int:
        """Return the number of passes per round for a batch size."""
        return max(3, round(self.repeats / math.sqrt(rows / self.rows[0])))


def measure_seconds(
    graph: Graph, load: Callable[[State], Tensor], positions: Sequence[int], timing: Timing
) -> list[UnitSeconds]:
    """Time the operations between neighbouring positions, within the whole model, for each batch size.

    Operations are timed one by one within whole passes, so that the caches are as in a normal pass; the sum is then
    scaled to passes without timing in between.
    """
    torch.set_num_threads(timing.threads)
    program = divide(graph, [])[0]
    runtime = EAGER.load(program, {state.value.name: load(state) for state in states_of([program])}, timing.device)
    with torch.inference_mode():
        return [_measure(runtime, graph, positions, count, timing) for count in timing.rows]


def _measure(runtime: StageRuntime, graph: Graph, positions: Sequence[int], rows: int, timing: Timing) -> UnitSeconds:
    sizes, clock, repeats = graph.sizes(rows, **timing.sizes), timing.clock, timing.repeats_for(rows)
    values = graph.tensor_inputs()
    inputs = [random_input(value, sizes, integer=timing.integer).to(timing.device) for value in values]
    runtime(sizes, inputs)
    passes: list[list[float]] = []
    wholes: list[float] = []
    began = time.perf_counter()
    for _ in range(MOST_ROUNDS):
        for _ in range(repeats):
            seconds = runtime.watched(sizes, inputs, clock)[1]
            passes.append([sum(seconds[a:b]) for a, b in pairwise(positions)])
            begin = clock()
            runtime(sizes, inputs)
            wholes.append(clock() - begin)
        if spread(wholes) <= STEADY * statistics.median(wholes) or time.perf_counter() - began > MOST_S:
            break
    return medians_scaled(passes, wholes)


def medians_scaled(passes: Sequence[Sequence[float]], wholes: Sequence[float]) -> UnitSeconds:
    """Return every unit's median and spread over passes, scaled so that the medians add up to the whole's median."""
    medians = [statistics.median(times) for times in zip(*passes, strict=True)]
    scale = statistics.median(wholes) / (sum(medians) or 1.0)
    return UnitSeconds(
        tuple(median * scale for median in medians), tuple(spread(times) * scale for times in zip(*passes, strict=True))
    )


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    2.0
    """
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def cached_by_units(graph: Graph, positions: Sequence[int]) -> list[float]:
    """Return the bytes of a sequence's caches in each unit between neighbouring positions."""
    caches = {state.value.name: state.value for state in graph.states if state.kind == "cache"}
    found = []
    for start, stop in pairwise(positions):
        # all uses of a cache are in one unit
        names = {used for op in graph.ops[start:stop] for used in op.uses()} & caches.keys()
        found.append(sum(caches[name].num_bytes({}) / int(caches[name].evaluate({})[0]) for name in names))
    return found


def held_by_units(graph: Graph, positions: Sequence[int], *, packed: bool = False) -> list[tuple[tuple[str, int], ...]]:
    """Return names and bytes of the state used by the units between neighbouring positions, including tables but not
    caches.

    If `packed`, weights in the blocks of their file count as an engine holds them, and tables of lookups as these.
    """
    tables = {op.arguments[0].name for op in graph.ops if op.target == _LOOKUP and isinstance(op.arguments[0], Ref)}
    products = {weight_of(op) for op in graph.ops}
    sizes = {}
    for state in (state for state in graph.states if state.kind != "cache"):
        name, form = state.value.name, state.packing if packed else ""
        of_engine = engine_bytes(form, state.value.evaluate({})) if form and name in products else 0
        sizes[name] = of_engine + (state.num_bytes(packed=packed) if not of_engine or name in tables else 0)
    sources: dict[str, set[str]] = {}
    for op in graph.prelude:  # every stage computes the tables that it needs, from their state
        sources[op.name] = {name for used in op.uses() for name in sources.get(used, {used} & sizes.keys())}
    held = []
    for start, stop in pairwise(positions):
        names = (used for op in graph.ops[start:stop] for used in op.uses())
        found = dict.fromkeys(name for used in names for name in sources.get(used, {used} & sizes.keys()))
        held.append(tuple((name, sizes[name]) for name in found))
    return held


def working_bytes(
    graph: Graph, positions: Sequence[int], rows: int, further: Mapping[str, int] | None = None
) -> list[float]:
    """Return the peak bytes of values between neighbouring positions, for `rows` rows.

    A convolution over more than one place also reorders its weight each time.
    """
    lives: dict[str, list[int]] = {value.name: [0, 0] for value in graph.tensor_inputs()}
    owner = {name: name for name in lives}
    for index, op in enumerate(graph.ops):
        used = [owner[name] for name in op.uses() if name in owner]
        for name in used:
            lives[name][1] = index
        shared = [owner[name] for name in effect(op).shares if name in owner]
        owner[op.name] = shared[0] if shared else op.name  # a view keeps its base alive
        if not shared:
            lives[op.name] = [index, index]
    sizes = graph.sizes(rows, **(further or {}))
    change = [0.0] * (len(graph.ops) + 1)
    for name, (first, last) in lives.items():
        num_bytes = float(graph.values[name].num_bytes(sizes)) if name in graph.values else 0.0
        change[first] += num_bytes
        change[last + 1] -= num_bytes
    kernels = {x.value.name: x.num_bytes() for x in graph.states if math.prod(x.value.evaluate({})[2:]) > 1}
    for index, op in enumerate(graph.ops):
        if op.target in _CONVOLUTIONS:
            reordered = max((kernels.get(name, 0) for name in op.uses()), default=0)
            change[index] += reordered
            change[index + 1] -= reordered
    live = list(accumulate(change))
    return [max(live[start:stop]) for start, stop in pairwise(positions)]


def line_through(values: Iterable[Value], graph: Graph) -> tuple[float, float]:
    """Return bytes per row and constant bytes of some values; exact if sizes are linear in rows."""
    one, two = (sum(value.num_bytes(graph.sizes(rows)) for value in values) for rows in (1, 2))
    return float(two - one), float(2 * one - two)
