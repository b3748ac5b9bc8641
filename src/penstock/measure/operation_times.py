"""Time the operations of a graph in place, one whole pass after the other."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.graph.graph import Graph
from penstock.graph.ops import State, Value
from penstock.graph.stages import divide
from penstock.runtime.registry import EAGER


def measure_work(
    graph: Graph,
    load: Callable[[State], Tensor],
    *,
    rows: int = 1,
    repeats: int = 7,
    threads: int | None = None,
) -> list[float]:
    """Return the median seconds of every operation over some passes, after one that is not counted.

    The inputs are random, which costs the same as any other. Needs the whole model in memory.

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


def random_input(value: Value, sizes: dict[str, int], generator: torch.Generator | None = None) -> Tensor:
    """Make a random tensor for an input: normal floats, and ones where integers or booleans are wanted."""
    shape = value.evaluate(sizes)
    if value.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(value.dtype)
    return torch.ones(shape, dtype=value.dtype)
