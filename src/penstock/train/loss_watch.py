"""Detection of the row weights of a loss from the operations that it runs."""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_MEAN = 1  # value of the `reduction` argument of ATen operators
_NLL = {torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss2d_forward}
_MEANS = {torch.ops.aten.mean}
_DIVISIONS = {torch.ops.aten.div, torch.ops.aten.div_, torch.ops.aten.mul, torch.ops.aten.mul_}
# operators that only check labels, as in `one_hot`; their results are not counts
_EXTREMES = {getattr(torch.ops.aten, name) for name in ("max", "min", "amax", "amin", "aminmax", "any", "all")}
_SOFTMAX = {torch.ops.aten._softmax, torch.ops.aten._log_softmax}


class LossWatch(TorchDispatchMode):
    """A dispatch mode that records the divisors of a loss while it is computed.

    `weights` are the divisors that depend on the data: the weights of the labels that `nll_loss` counts, the sum of a
    mask, the number of selected elements. `by_rows` is set for a mean over all rows, `uneven` if rows may have unequal
    weights in another way, and `draws` if random numbers were drawn.

    Example:
        with LossWatch([output, labels], num_rows=8) as watch:
            loss = loss_fn(output, labels)
        print(watch.weights())
    """

    def __init__(self, data: Iterable[Tensor], num_rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_rows = num_rows
        self._data = {_storage(tensor) for tensor in data}
        self._selected: set[int] = set()  # memory whose size depends on values
        self._kept: list[Any] = []  # kept alive, so that memory is not reused and mistaken for another tensor
        self._numbers: set[float] = set()  # Python numbers that depend on tensor values
        self._sums: set[int] = set()
        self._extremes: set[int] = set()
        self._weights: list[Tensor | float] = []
        self._counts = self.by_rows = self.uneven = self.draws = False
        # products of numbers from outside: by which scalars were divided, by which scalars or whole tensors were
        self.divisor = self.divisor_inside = 1.0

    def weights(self) -> list[float]:
        """Return the divisors that depend on the data, in order."""
        return [float(weight) for weight in self._weights]

    @property
    def counts_labels(self) -> bool:
        """True if labels were counted; such counts add up over rows."""
        return self._counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and inspect it."""
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        self._look(func, packet, args, kwargs or {}, result)
        self.draws |= _draws(func)
        given = {_storage(tensor) for tensor in _tensors(args)}
        made = _tensors(result if isinstance(result, (tuple, list)) else (result,))
        fresh = {_storage(tensor) for tensor in made} - given
        (self._data.difference_update if self._data.isdisjoint(given) else self._data.update)(fresh)
        if self._selected:
            rows = {_storage(tensor) for tensor in made if tensor.dim()}
            (self._selected.difference_update if self._selected.isdisjoint(given) else self._selected.update)(fresh)
            self._selected -= fresh - rows
        if self._selects(packet, args):
            self._select(made)
        if packet is torch.ops.aten.sum:
            self._sums.update(_storage(tensor) for tensor in made if not tensor.dim())
        if packet in _EXTREMES:
            self._extremes.update(_storage(tensor) for tensor in made)
        self._kept += [tensor.untyped_storage() for tensor in made if not tensor.dim()]
        return result

    def _look(self, func: Any, packet: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        if packet in _NLL:
            if args[3] == _MEAN:
                self._counts = True
                self._weights.append(result[1])
        elif packet in _DIVISIONS:
            self._divided(args, is_product=packet in {torch.ops.aten.mul, torch.ops.aten.mul_})
        elif packet is torch.ops.aten.reciprocal:
            self._divided_by(args[0])
        elif packet is torch.ops.aten._local_scalar_dense:
            is_count = _storage(args[0]) in self._data - self._extremes
            if is_count and not isinstance(result, bool):
                self._numbers.add(float(result.real))
        elif packet in _SOFTMAX:
            self.uneven |= bool(args[0].dim()) and not args[1] % args[0].dim() and len(args[0]) == self._num_rows
        elif packet in _MEANS or _reduction(func, args, kwargs) == _MEAN:
            self._averaged(args[0], args[1] if packet in _MEANS and len(args) > 1 else None)

    def _averaged(self, tensor: Tensor, dims: Sequence[int] | None) -> None:
        if dims and 0 not in [dim % max(tensor.dim(), 1) for dim in dims]:
            return
        if _storage(tensor) in self._selected:
            self._weights.append(float(tensor.numel()))
        else:
            self.by_rows = True

    def _scaled(self, tensor: Any, factor: Any, *, is_product: bool) -> None:
        """Record a division by a number that does not come from the outputs and labels of these rows."""
        if isinstance(factor, Tensor) and (factor.dim() or factor.requires_grad or _storage(factor) in self._selected):
            return
        number = float(factor.detach() if isinstance(factor, Tensor) else factor)
        if not isinstance(tensor, Tensor) or not math.isfinite(number) or not number:
            return
        number = 1.0 / number if is_product else number
        self.divisor_inside *= number
        self.divisor *= 1.0 if tensor.dim() else number

    def _divided(self, args: Sequence[Any], *, is_product: bool) -> None:
        divisor = args[1]
        if not isinstance(divisor, complex):
            self._scaled(args[0], divisor, is_product=is_product)
        if isinstance(divisor, Tensor):
            if not is_product:
                self._divided_by(divisor)
            return
        number = float(divisor) if not is_product else 1 / divisor if divisor else math.inf
        if any(math.isclose(number, known, rel_tol=1e-6) for known in self._numbers):
            self._weights.append(number)
        elif _storage(args[0]) in self._sums and number % self._num_rows == 0:
            self.by_rows = True

    def _divided_by(self, divisor: Tensor) -> None:
        if _storage(divisor) not in self._data or not divisor.numel():
            return
        if divisor.numel() == 1 and (not divisor.dim() or self._num_rows > 1):
            self._weights.append(divisor.detach())
        elif not divisor.dim() or divisor.shape[0] != self._num_rows:
            self.uneven = True

    def _selects(self, packet: Any, args: Sequence[Any]) -> bool:
        """Return whether the size of an operation's result depends on values."""
        if packet is not torch.ops.aten.index:
            return packet in {torch.ops.aten.masked_select, torch.ops.aten.nonzero} or "unique" in str(packet)
        return any(isinstance(x, Tensor) and x.dtype in {torch.bool, torch.uint8} for x in args[1])

    def _select(self, made: Sequence[Tensor]) -> None:
        self.uneven = True
        for tensor in made:
            self._selected.add(_storage(tensor))
            sizes = {tensor.numel(), *tensor.shape[:1]} - {self._num_rows}
            self._numbers |= {float(size) for size in sizes}


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(items: Iterable[Any]) -> list[Tensor]:
    found = []
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found += [x for x in item if isinstance(x, Tensor)]
    return found


def _reduction(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    place, default = _reduction_place(func)
    if place is None:
        return None
    return args[place] if place < len(args) else kwargs.get("reduction", default)


@cache
def _reduction_place(func: Any) -> tuple[int | None, Any]:
    """Return the position of an operator's `reduction` argument, and its default."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "reduction":
            return place, argument.default_value
    return None, None
