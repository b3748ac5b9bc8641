"""Training costs of a graph's units: forward and backward seconds, and the bytes kept in between."""

import contextlib
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.graph.cuts import Cut, divide_for_training
from penstock.graph.graph import Graph
from penstock.graph.ops import State
from penstock.measure.costs import (
    MOST_ROUNDS,
    MOST_S,
    STEADY,
    Timing,
    UnitSeconds,
    medians_scaled,
    random_input,
    spread,
)
from penstock.runtime.registry import EAGER
from penstock.tensors import HOST

_UPDATED = 2**20  # weights per tensor
# maps the model's outputs and their number of rows to the sum to minimize
Loss = Callable[[Sequence[Tensor], int], Tensor]


@dataclass(frozen=True, slots=True)
class TrainingSeconds:
    """Forward and backward seconds of every unit, for one batch size."""

    forward: UnitSeconds
    backward: UnitSeconds


class Trainable:
    """A graph in training mode, in parts that run forward and backward in sequence in this process.

    Example:
        forward_s, backward_s = Trainable(graph, load, list(Cuts(graph))).step({"batch": 4}, time.perf_counter)

    All parameters are trained. Needs the whole model on the device, with gradients.
    """

    def __init__(
        self, graph: Graph, load: Callable[[State], Tensor], cuts: Sequence[Cut], device: torch.device = HOST
    ) -> None:
        trained = {s.source for s in graph.states if s.kind == "parameter"}
        self._tensors = {s.value.name: _leaf(load(s).to(device), s.source in trained) for s in graph.states}
        self._parts = divide_for_training(graph, cuts, trained)
        states = [{s.value.name: self._tensors[s.value.name] for s in part.program.states} for part in self._parts]
        self._runtimes = [EAGER.load_training(*both, device) for both in zip(self._parts, states, strict=True)]
        self._device = device
        self._inputs = {value.name: value for value in graph.tensor_inputs()}

    def step(self, sizes: Mapping[str, int], clock: Callable[[], float]) -> tuple[list[float], list[float]]:
        """Run one microbatch forward and backward; return the seconds of every part, forward and backward.

        `clock` may be any increasing counter; it is read at the beginning and end of each part.
        """
        forward_s = []
        passed = []
        for seconds, given, outputs in self._forward(sizes, clock):
            forward_s.append(seconds)
            passed.append((given, outputs))
        backward_s = []
        gradients: list[Tensor | None] = [torch.ones_like(output) for output in passed[-1][1]]
        for part, (given, outputs) in zip(reversed(self._parts), reversed(passed), strict=True):
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad and g is not None]
            begin = clock()
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
            backward_s.append(clock() - begin)
            gradients = [tensor.grad for tensor in given[: len(part.crossing)]]
        return forward_s, backward_s[::-1]

    def kept_bytes(self, sizes: Mapping[str, int]) -> list[int]:
        """Return the bytes that each part keeps from forward to backward, without parameters; tensors count once."""
        held = {storage_key(tensor.untyped_storage()) for tensor in self._tensors.values()}
        found: list[list[int]] = [[]]

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage_key(storage) not in held:
                held.add(storage_key(storage))
                found[-1].append(storage.nbytes())
            return tensor

        passed = []  # keeps storages alive, so that their keys are not reused
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            for _, given, outputs in self._forward(sizes, lambda: 0.0):
                passed.append((given, outputs))
                found.append([])
        return [sum(sizes_of_part) for sizes_of_part in found[:-1]]

    def outputs(self, sizes: Mapping[str, int]) -> list[Tensor]:
        """Return the model's outputs for random inputs."""
        *_, (_, _, outputs) = self._forward(sizes, lambda: 0.0)
        return outputs

    def _forward(
        self, sizes: Mapping[str, int], clock: Callable[[], float]
    ) -> Iterator[tuple[float, list[Tensor], list[Tensor]]]:
        own = {name: random_input(value, dict(sizes)).to(self._device) for name, value in self._inputs.items()}
        crossing: list[Tensor] = []
        for part, runtime in zip(self._parts, self._runtimes, strict=True):
            crossing = [
                tensor.detach().requires_grad_(position in part.backward_inputs)
                for position, tensor in enumerate(crossing)
            ]
            given = [*crossing, *(own[value.name] for value in part.own)]
            begin = clock()
            outputs = runtime(sizes, given)
            seconds = clock() - begin
            yield seconds, given, outputs
            crossing = outputs


def storage_key(storage: UntypedStorage) -> int:
    """Return a key of a storage, unique among those in use, also for tensors without values."""
    return int(StorageWeakRef(storage).cdata)


def _leaf(tensor: Tensor, trained: bool) -> Tensor:
    return tensor.detach().clone().requires_grad_(trained and tensor.is_floating_point())


def measure_training(
    graph: Graph, load: Callable[[State], Tensor], cuts: Sequence[Cut], timing: Timing
) -> list[TrainingSeconds]:
    """Time forward and backward of every unit between possible cuts, for each batch size.

    Units are timed one by one, with gradients stopped at each cut as at the end of a stage; both directions are then
    scaled to passes of the whole model.
    """
    torch.set_num_threads(timing.threads)
    units, whole = (Trainable(graph, load, each, timing.device) for each in (cuts, []))
    return [
        _measure(units, whole, graph.sizes(count), timing.clock, timing.repeats_for(count)) for count in timing.rows
    ]


def measure_loss(
    graph: Graph, load: Callable[[State], Tensor], loss: Loss, timing: Timing
) -> list[tuple[float, float]]:
    """Time forward and backward of the loss, for each batch size."""
    whole = Trainable(graph, load, [], timing.device)
    return [_loss_s(whole.outputs(graph.sizes(rows)), rows, loss, timing) for rows in timing.rows]


def _loss_s(outputs: Sequence[Tensor], rows: int, loss: Loss, timing: Timing) -> tuple[float, float]:
    forward, backward = [], []
    for _ in range(timing.repeats_for(rows) + 1):  # the first has no memory to reuse
        given = [x.detach().requires_grad_(x.is_floating_point()) for x in outputs]
        begin = timing.clock()
        total = loss(given, rows)
        between = timing.clock()
        total.backward()
        forward.append(between - begin)
        backward.append(timing.clock() - between)
    return statistics.median(forward[1:]), statistics.median(backward[1:])


def measure_update_s_per_byte(timing: Timing) -> float:
    """Time the end of a step, per byte of weights: dividing gradients, AdamW's step, releasing gradients.

    The weights have the size of a transformer's; together they exceed the caches.
    """
    torch.set_num_threads(timing.threads)
    weights = [torch.zeros(_UPDATED).to(timing.device).requires_grad_() for _ in range(4)]
    optimizer = torch.optim.AdamW(weights)
    seconds = []
    for _ in range(timing.repeats + 1):  # the first creates the optimizer's state
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        begin = timing.clock()
        for weight in weights:
            weight.grad.div_(2.0)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(timing.clock() - begin)
    return statistics.median(seconds[1:]) / sum(weight.nbytes for weight in weights)


def measure_sum_s_per_byte(timing: Timing) -> float:
    """Time the all-reduce of a gradient bucket without messages, per byte: concatenation, and one addition."""
    torch.set_num_threads(timing.threads)
    gradients = [torch.ones(_UPDATED // 4) for _ in range(4)]
    other = torch.ones(_UPDATED)
    seconds = []
    for _ in range(timing.repeats + 1):
        begin = timing.clock()
        flat = torch.cat(gradients)
        flat += other
        seconds.append(timing.clock() - begin)
    return statistics.median(seconds) / other.nbytes


def _measure(
    units: Trainable, whole: Trainable, sizes: Mapping[str, int], clock: Callable[[], float], repeats: int
) -> TrainingSeconds:
    units.step(sizes, clock)
    whole.step(sizes, clock)
    # for each direction: seconds of the units and of the whole, pass by pass
    passes: tuple[list[list[float]], list[list[float]]] = ([], [])
    wholes: tuple[list[float], list[float]] = ([], [])
    began = time.perf_counter()
    for _ in range(MOST_ROUNDS):
        for _ in range(repeats):
            for direction, (parts, (all_of_it,)) in enumerate(
                zip(units.step(sizes, clock), whole.step(sizes, clock), strict=True)
            ):
                passes[direction].append(parts)
                wholes[direction].append(all_of_it)
        steady = all(spread(seconds) <= STEADY * statistics.median(seconds) for seconds in wholes)
        if steady or time.perf_counter() - began > MOST_S:
            break
    forward, backward = (medians_scaled(*both) for both in zip(passes, wholes, strict=True))
    return TrainingSeconds(forward, backward)


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
