"""Times of a whole model on runtimes other than eager, and the errors of their outputs relative to eager."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from penstock.errors import PlanError
from penstock.graph.graph import Graph
from penstock.graph.ops import State
from penstock.graph.stages import divide
from penstock.measure.costs import Timing, random_input
from penstock.runtime.registry import EAGER, RuntimeChoice, StageRuntime
from penstock.spec.plan import Precision
from penstock.spec.profile import RuntimeColumn
from penstock.tensors import HOST, copy_exactly, moved
from penstock.terminal.notes import note

_INPUTS = 4


# a microbatch of so many rows and that number, with tensors from a generator
MakeInputs = Callable[[int, int, torch.Generator], Sequence[Tensor]]


def measure_runtimes(
    graph: Graph, load: Callable[[State], Tensor], choices: Sequence[RuntimeChoice], timing: Timing,
    make_inputs: MakeInputs | None = None,
) -> tuple[RuntimeColumn, ...]:  # fmt: skip
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
