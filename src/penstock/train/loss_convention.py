"""The loss of a batch from the losses of its microbatches: detects a mean over rows, a weighted mean or a sum.

A mean is weighted by its rows, a weighted mean by its divisor, a sum by one. The convention of a loss function is
detected on a microbatch and on halves of its rows:

    mean        L = (n1 L1 + n2 L2) / n
    weighted    L = (w1 L1 + w2 L2) / w        w as recorded by `LossWatch`
    sum         L = L1 + L2
    (sum, count)    both are sums

A loss that fits none of these conventions depends on several rows jointly, and cannot be computed from microbatches.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from penstock import trees
from penstock.errors import PenstockError, RunError, UsageError
from penstock.runtime.training import seeded_generator
from penstock.tensors import HOST
from penstock.train.loss_watch import LossWatch

LossFunction = Callable[[Any, Any], Any]
# returns outputs and labels of some rows, by row number; each row's outputs are perturbed by the given noise
Sample = Callable[[Sequence[int], Sequence[float]], tuple[Any, Any]]

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_COARSE = 3e-2  # tolerance for 16-bit numbers
_WAY_OUT = "return (sum, count), or use microbatches=1 and replicas=1"


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """The loss of one microbatch: the tensor to minimize, its value as a sum, and its weight.

    The value is `times` a number that may still be on a GPU: `number` reads it, after all that is queued there.
    `kind` is None if every convention fits, as for a loss of 0. `ratios` are the divisors per row or per count; if they
    differ between microbatches, rows have unequal weights and the loss is refused. `refused` is the reason why the loss
    of the batch cannot be computed from microbatches. `divisors` are numbers that a sum was divided by,
    `counts` those of rows and labels.
    """

    total: Tensor
    value: float | Tensor
    count: float
    kind: str | None
    times: float = 1.0
    ratios: tuple[float, ...] = ()
    refused: str = ""
    divisors: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()

    @property
    def number(self) -> float:
        """The value on the host."""
        return float(self.value) * self.times


@dataclass(frozen=True, slots=True)
class _Result:
    """A loss function's result for some rows, with the record of its operations."""

    total: Tensor
    count: float | None
    rows: int
    weights: list[float]
    watch: LossWatch

    @property
    def value(self) -> float:
        """The result as a number; reading it waits for a GPU."""
        return float(self.total.detach())

    @property
    def weight(self) -> float | None:
        """The divisor that depends on the data; None without one, if several differ, or if the loss divides by rows."""
        if not self.weights or self.watch.by_rows:
            return None
        return common(self.weights)


def common(weights: Sequence[float]) -> float | None:
    """Return the value that all weights have in common, or None."""
    return weights[0] if weights and all(_close(weights[0], other, 1e-6) for other in weights) else None


class NotALossError(ValueError):
    """A loss function returned something that is not a loss."""


def call_loss(loss_fn: LossFunction, output: Any, labels: Any) -> tuple[Tensor, float | None]:
    """Return the value of a loss function, and the count if it returns (sum, count).

    Raises `RunError` if it fails, `NotALossError` if it returns neither a scalar nor (sum, count).
    """
    try:
        result = loss_fn(output, labels)
    except PenstockError:
        raise
    # for any error of the caller's function, add its arguments to the message
    except Exception as error:
        given = [tuple(tensor.shape) for tensor in trees.tensors(labels)]
        raise RunError(
            f"loss_fn failed: {(str(error).splitlines() or [repr(error)])[0]} (the labels are {given}); "
            "check that labels fit the model's output"
        ) from error
    for value in trees.tensors(result):
        if isinstance(value, FakeTensor):
            raise UsageError(
                "loss_fn uses a tensor without values, which a hook or a list kept during the model's capture; "
                "return it as an output of the model instead"
            )
        if value.device.type == "meta":
            raise UsageError(
                "loss_fn uses parameters that are in other processes (on the meta device); move such a penalty to the "
                "optimizer, as weight_decay, or use one stage with replicas"
            )
    if _is_scalar(result):
        return result.reshape(()), None
    if isinstance(result, tuple) and len(result) == 2 and _is_scalar(result[0]):
        count = result[1]
        if isinstance(count, (int, float)) or _is_scalar(count):
            return result[0].reshape(()), float(count)
    raise NotALossError(f"loss_fn must return a scalar or (sum, count); got {_described(result)}")


class _DependsError(Exception):
    """The loss of a batch cannot be computed from its microbatches."""


class LossConvention:
    """A loss function with its convention over rows: detected on first use, and checked if rows have unequal weights.

    Example:
        convention = LossConvention(F.cross_entropy)
        measured = convention.measure(output, labels, 8, sample, alone=False)
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn
        self._kind: str | None = None

    def measure(self, output: Any, labels: Any, rows: int, sample: Sample, *, alone: bool) -> MeasuredLoss:
        """Compute the loss of a microbatch; `alone` is set if it is the whole batch."""
        try:
            result = _run(self._loss_fn, output, labels, rows)
        except NotALossError as error:
            return _refused(str(error))
        if result.count is None and alone:
            return MeasuredLoss(result.total, loss_value(result.total), 1.0, "whole")
        if result.count is not None:
            return self._measure_pair(result, sample)
        kind, watch = self._kind, result.watch
        counted = watch.counts_labels and result.weight is not None
        ignored = bool(result.weights) and not any(result.weights)  # True if no label counts
        known = kind == "weighted" if counted else kind in {"mean", "sum"} and not result.weights and not watch.uneven
        if not ignored and not known:
            try:
                kind = self._scalar_kind(result, sample)
            except _DependsError as error:
                return _refused(f"{error}; {_WAY_OUT}")
            self._kind = "weighted" if kind == "nothing" else kind
        measured = combined(result.total, kind, rows, result.weights, by_rows=watch.by_rows)
        return replace(measured, divisors=(watch.divisor, watch.divisor_inside)) if kind == "sum" else measured

    def _measure_pair(self, result: _Result, sample: Sample) -> MeasuredLoss:
        count = result.count or 0.0
        if self._kind is None or result.watch.uneven or result.weights:
            try:
                self._kind = self._pair_kind(result, sample)
            except _DependsError as error:
                return _refused(str(error))
        divisors = [*result.weights, *([float(result.rows)] if result.watch.by_rows else [])]
        ratios = tuple(divisor / count for divisor in divisors) if count else ()
        return MeasuredLoss(result.total, loss_value(result.total), count, self._kind and "count", ratios=ratios)

    def _scalar_kind(self, result: _Result, sample: Sample) -> str | None:
        """Return the convention of a scalar loss; raises `_DependsError` if it has none."""
        if result.watch.draws:
            raise _DependsError("loss_fn draws random numbers, so it cannot be checked for a mean over rows")
        if not math.isfinite(result.value):
            return None
        whole, halves = self._runs(result, sample, noisy=False)
        fits = self._fits(whole, halves)
        # equal losses, or losses of 0 (for example of zero-initialized outputs), fit several conventions: perturb the
        # outputs
        if {"mean", "sum"} <= fits or _close(halves[0].value, halves[1].value, 0.2):
            with contextlib.suppress(_DependsError):
                noisy = self._fits(*self._runs(result, sample, noisy=True))
                fits = noisy if {"mean", "sum"} <= fits else fits & noisy
        if not fits:
            raise _DependsError("loss_fn must be a mean or a sum over rows, but it depends on several rows jointly")
        if "weighted" in fits:
            return "weighted"
        if {"mean", "sum"} <= fits:
            return None if result.weight is None else "nothing"
        return "mean" if "mean" in fits else "sum"

    def _pair_kind(self, result: _Result, sample: Sample) -> str | None:
        """Return "count" if both entries of a pair are sums, None if not decidable yet; raises `_DependsError`."""
        if not math.isfinite(result.value):
            return None
        try:
            whole, halves = self._runs(result, sample, noisy=False)
        except _DependsError:
            return "count"
        tolerance = _tolerance(result.total)
        counts = [half.count if half.count is not None else math.nan for half in halves]
        fits = _close(whole.count or 0.0, math.fsum(counts), 1e-4)
        fits &= result.watch.draws or _adds_up(whole.value, [half.value for half in halves], tolerance)
        if not fits:
            raise _DependsError(
                "loss_fn must return a scalar or (sum, count); got a pair whose entries do not add up over rows, such "
                "as (loss, accuracy)"
            )
        return "count" if whole.value and whole.count else None

    @staticmethod
    def _fits(whole: _Result, halves: Sequence[_Result]) -> set[str]:
        tolerance = _tolerance(whole.total)
        values = [half.value for half in halves]
        found = set()
        if _close(whole.value, _mean(values, [half.rows for half in halves]), tolerance):
            found.add("mean")
        if _adds_up(whole.value, values, tolerance):
            found.add("sum")
        weights = [half.weight for half in halves if half.weight is not None]
        if whole.weight is not None and len(weights) == len(halves):
            # a count that was clamped to 1 is treated as 0 if the loss is 0
            unclamped = [weight if value else 0.0 for weight, value in zip(weights, values, strict=True)]
            for each in (weights, unclamped):
                if _close(whole.weight, math.fsum(each), 1e-5) and _close(whole.value, _mean(values, each), tolerance):
                    found.add("weighted")
        return found

    def _runs(self, result: _Result, sample: Sample, *, noisy: bool) -> tuple[_Result, list[_Result]]:
        """Return the results of the whole microbatch, computed again only if noisy, and of its halves.

        A single row and a perturbed copy of it serve as its halves.
        """

        def run(rows: Sequence[int], noise: Sequence[float]) -> _Result:
            try:
                return _run(self._loss_fn, *sample(rows, noise), len(rows))
            except (NotALossError, RunError) as error:
                raise _DependsError(
                    f"loss_fn fails when it is called with only some of a batch's rows ({error})"
                ) from error

        # other threads draw from the same generator, so it is seeded only if the loss draws random numbers
        draws = seeded_generator(result.total.device, 0) if result.watch.draws else contextlib.nullcontext()
        with torch.no_grad(), draws:
            first = float(noisy)
            if result.rows == 1:
                one = run([0], [first]) if noisy else result
                try:
                    return run([0, 0], [first, first + 1]), [one, run([0], [first + 1])]
                except _DependsError:  # e.g. outputs that are no longer probabilities
                    return run([0, 0], [first, first]), [one, one]
            middle = (result.rows + 1) // 2
            noise = [first] * middle + [2 * first] * (result.rows - middle)
            halves = [run(range(middle), noise[:middle]), run(range(middle, result.rows), noise[middle:])]
            return (run(range(result.rows), noise) if noisy else result), halves


def loss_value(total: Tensor) -> float | Tensor:
    """Return a loss as a number, or on a GPU a copy of it, which is read later."""
    return float(total.detach()) if total.device == HOST else total.detach().clone()


def combined(total: Tensor, kind: str | None, rows: int, weights: Sequence[float], *, by_rows: bool) -> MeasuredLoss:
    """Weigh a microbatch's scalar loss by its convention and the recorded divisors."""
    value = loss_value(total)
    if kind == "sum":
        return MeasuredLoss(total, value, 1.0, kind)
    if weights and not any(weights):  # no label counts, and the loss is NaN
        ratios = (0.0,) if by_rows else ()
        return MeasuredLoss(total.new_zeros(()), 0.0, 0.0, None if by_rows else "weighted", ratios=ratios)
    if kind == "nothing":
        return MeasuredLoss(total * 0, 0.0, 0.0, "weighted")
    if kind == "weighted":
        return MeasuredLoss(total * weights[0], value, weights[0], kind, times=weights[0])
    shares = tuple(weight / rows for weight in weights)
    return MeasuredLoss(total * rows, value, float(rows), kind, times=rows, ratios=shares)


def _run(loss_fn: LossFunction, output: Any, labels: Any, rows: int) -> _Result:
    with LossWatch([*trees.tensors(output), *trees.tensors(labels)], rows) as watch:
        total, count = call_loss(loss_fn, output, labels)
    return _Result(total, count, rows, watch.weights(), watch)


def _refused(reason: str) -> MeasuredLoss:
    return MeasuredLoss(torch.zeros(()), 0.0, 0.0, None, refused=reason)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return a weighted mean; values of weight 0 are ignored, even NaN."""
    total = math.fsum(weights)
    return math.fsum(v * w for v, w in zip(values, weights, strict=True) if w) / total if total else math.nan


def _adds_up(whole: float, parts: Sequence[float], tolerance: float) -> bool:
    return _close(whole, math.fsum(parts), tolerance) if all(map(math.isfinite, parts)) else False


def _close(a: float, b: float, tolerance: float) -> bool:
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance * 1e-3)


def _tolerance(loss: Tensor) -> float:
    return _TOLERANCES.get(loss.dtype, _COARSE if loss.dtype.is_floating_point else 1e-6)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _described(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of {tuple(result.shape)}; use reduction='mean' or 'sum'"
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {', '.join(type(each).__name__ for each in result)}"
    return f"a {type(result).__name__}"
