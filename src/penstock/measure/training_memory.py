"""Memory of training beyond weights, gradients and optimizer state: bytes of tensors, counted without their values."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.graph.cuts import Cut
from penstock.graph.graph import Graph
from penstock.graph.ops import State
from penstock.measure.backward import Loss, Trainable, storage_key


class LiveBytes(TorchDispatchMode):
    """A counter of the live bytes of tensors that operations create, forward and backward.

    Call it like a clock at the beginning and end of a block: the difference is the peak of live bytes in between,
    beyond those live at the beginning.

    Example:
        with LiveBytes() as meter:
            begin = meter()
            result = function()
        print(meter() - begin, meter.held)      # the peak, and the remaining bytes

    Memory internal to an operator's kernel is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = 0
        self._most = 0
        self._running = False
        self._known: set[int] = set()

    def __call__(self) -> float:
        """Begin a block and return 0, or end it and return the peak."""
        self._running = not self._running
        if self._running:
            self._began = self._most = self.held
            return 0.0
        return float(self._most - self._began)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its results."""
        result = func(*args, **(kwargs or {}))
        given = {storage_key(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage_key(storage) not in given | self._known:
                self._hold(storage)
        return result

    def _hold(self, storage: UntypedStorage) -> None:
        place, num_bytes = storage_key(storage), storage.nbytes()
        self._known.add(place)
        self.held += num_bytes
        self._most = max(self._most, self.held)
        weakref.finalize(storage, self._let_go, place, num_bytes)

    def _let_go(self, place: int, num_bytes: int) -> None:
        self._known.discard(place)
        self.held -= num_bytes


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True)
class TrainingBytes:
    """Bytes that a unit or the loss keeps until its backward, and the further peak of the backward.

    Both are per row, the peak also has a constant part.
    """

    kept_per_row: float
    working_per_row: float
    working: float


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    """Compute shapes only: tensors take no memory, and autograd saves the same ones as with values."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _empty(state: State) -> Tensor:
    return torch.empty(state.value.evaluate({}), dtype=state.value.dtype)


@_without_values()
def unit_bytes(graph: Graph, cuts: Sequence[Cut]) -> list[TrainingBytes]:
    """Count the memory of every unit in a step that accumulates into existing gradients, as after the first step."""
    units = Trainable(graph, _empty, cuts)
    kept = _lines(graph, lambda rows: units.kept_bytes(graph.sizes(rows)))

    def backwards(rows: int) -> list[float]:
        sizes = graph.sizes(rows)
        units.step(sizes, lambda: 0.0)
        with LiveBytes() as meter:
            return units.step(sizes, meter)[1]

    return [TrainingBytes(k, *line) for (k, _), line in zip(kept, _lines(graph, backwards), strict=True)]


@_without_values()
def loss_bytes(graph: Graph, loss: Loss) -> TrainingBytes:
    """Count the memory of the loss and of the model's outputs: both are kept until the backward."""
    whole = Trainable(graph, _empty, [])

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
    return graph.fixed_batch or 2  # with one row, some operations choose another algorithm


def _lines(graph: Graph, measured: Callable[[int], Sequence[float]]) -> list[tuple[float, float]]:
    """Fit bytes measured at several numbers of rows by bytes per row and constant bytes."""
    rows = _few_rows(graph)
    some = measured(rows)
    if graph.fixed_batch:
        return [(few / rows, 0.0) for few in some]
    slopes = [max(0.0, (many - few) / rows) for few, many in zip(some, measured(2 * rows), strict=True)]
    return [(slope, max(0.0, few - rows * slope)) for few, slope in zip(some, slopes, strict=True)]
