"""What training takes of memory beside weights, gradients and optimizer state: measured unit by unit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.graph.cuts import Cut
from penstock.graph.graph import Graph
from penstock.graph.ops import State
from penstock.measure.backward import Loss, Trainable
from penstock.measure.live_bytes import LiveBytes


@dataclass(frozen=True, slots=True)
class TrainingBytes:
    """What a unit, or the loss, keeps until its backward, and what its backward takes at most beside that.

    Both for one row, and what does not depend on rows.
    """

    kept_per_row: float
    working_per_row: float
    working: float


def unit_bytes(graph: Graph, load: Callable[[State], Tensor], cuts: Sequence[Cut]) -> list[TrainingBytes]:
    """Measure the memory of every unit: of a step that finds gradients to add its own to, as all but the first do."""
    units = Trainable(graph, load, cuts)
    kept = _lines(graph, lambda rows: units.kept_bytes(graph.sizes(rows)))

    def backwards(rows: int) -> list[float]:
        sizes = graph.sizes(rows)
        units.step(sizes, lambda: 0.0)
        with LiveBytes() as meter:
            return units.step(sizes, meter)[1]

    return [TrainingBytes(k, *line) for (k, _), line in zip(kept, _lines(graph, backwards), strict=True)]


def loss_bytes(graph: Graph, load: Callable[[State], Tensor], loss: Loss) -> TrainingBytes:
    """Measure the memory of the loss, and of the outputs that it is computed from: both are kept until the backward."""
    whole = Trainable(graph, load, [])

    def measured(rows: int) -> list[float]:
        given = [x.detach().requires_grad_(x.is_floating_point()) for x in whole.outputs(graph.sizes(rows))]
        with LiveBytes() as meter:
            begin = meter()
            total = loss(given, rows)
            forward, kept = meter() - begin, meter.held
            begin = meter()
            total.backward()
            return [kept + sum(x.nbytes for x in given), max(forward - kept, meter() - begin)]

    (kept, constant), working = _lines(graph, measured)
    return TrainingBytes(kept + constant / _few_rows(graph), *working)


def _few_rows(graph: Graph) -> int:
    return graph.fixed_batch or 2  # one row makes some operations choose another way


def _lines(graph: Graph, measured: Callable[[int], Sequence[float]]) -> list[tuple[float, float]]:
    """Return what grows with rows, per row, and what does not, of bytes measured for a number of rows."""
    rows = _few_rows(graph)
    some = measured(rows)
    if graph.fixed_batch:
        return [(few / rows, 0.0) for few in some]
    slopes = [max(0.0, (many - few) / rows) for few, many in zip(some, measured(2 * rows), strict=True)]
    return [(slope, max(0.0, few - rows * slope)) for few, slope in zip(some, slopes, strict=True)]
