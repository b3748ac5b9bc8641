"""Losses of one process's microbatches, computed by their convention and checked for agreement between processes.

A model's own loss has its convention derived from the graph.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock import trees
from penstock.engine.stages import MicrobatchRows
from penstock.errors import RunError, UsageError, everywhere
from penstock.graph.call import build_output
from penstock.graph.graph import Graph
from penstock.graph.ops import GETITEM, Op, Ref, resolve_operator
from penstock.train.batches import RowCut, sample_rows
from penstock.train.loss_convention import LossConvention, LossFunction, MeasuredLoss, combined, common, loss_value
from penstock.train.loss_watch import LossWatch
from penstock.values import Size

# operators that preserve a mean or a sum over rows
_KEEPING = {
    "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "to", "_to_copy", "alias", "clone", "contiguous", "neg",
    "mean", "sum", "expand", "lift_fresh_copy", "type_as",
}  # fmt: skip
_MEAN, _SUM = 1, 2  # values of the `reduction` argument of ATen operators
_LABELS = {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"}


class OwnLoss:
    """The convention of a model's own loss: a mean over rows, a mean over counted labels, or a sum.

    `around` wraps operators that count labels, to record a microbatch's weight.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._ops = {op.name: op for op in graph.ops}
        self._depending = _depending(graph)
        self.kinds: set[str] = set()
        self.counting: list[str] = []  # operations that count labels
        self.refused = ""
        self._num_reductions = 0
        self._watches: list[LossWatch] = []
        output = pytree.tree_unflatten(list(graph.outputs), graph.output_spec)
        loss = _called_loss(output) or next((each for each in graph.outputs if isinstance(each, Ref)), None)
        try:
            if not isinstance(loss, Ref) or self._row_dims(loss.name):
                raise _UnknownError("the model returns no loss")
            self._check_rows(loss.name)
            self._walk(loss.name)
            if {"mean", "sum"} <= self.kinds or {"constant", "sum"} <= self.kinds or not self.kinds - {"constant"}:
                raise _UnknownError("it is neither a mean nor a sum over rows")
        except _UnknownError as error:
            self.refused = str(error)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an operator that counts labels."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            with LossWatch([x for x in arguments if isinstance(x, Tensor)], 1) as watch:
                result = function(*arguments, **keywords)
            self._watches.append(watch)
            return result

        return call

    def forget(self) -> None:
        """Drop the records of a microbatch for which another loss is used."""
        self._watches.clear()

    def measure(self, output: Any, rows: int, *, alone: bool) -> MeasuredLoss:
        """Return the loss of a microbatch from the model's output."""
        loss = own_loss(output)
        watches, self._watches = self._watches, []
        weights = [weight for watch in watches for weight in watch.weights()]
        if alone:
            return MeasuredLoss(loss, loss_value(loss), 1.0, "whole")
        reason = self.refused
        if not reason and len(watches) != len(self.counting):
            reason = "its labels are counted in an earlier stage than the last"
        if reason:
            return MeasuredLoss(
                loss.detach() * 0,
                0.0,
                0.0,
                None,
                refused=f"the loss of {self._graph.model} cannot be computed from microbatches: {reason}; pass "
                "train_step a loss_fn that returns (sum, count), or use microbatches=1 and replicas=1",
            )
        by_rows = len(self.counting) < self._num_reductions or any(not watch.weights() for watch in watches)
        kind = "sum" if "sum" in self.kinds else "mean"
        if kind == "mean" and not by_rows and common(weights) is not None:
            kind = "weighted"
        return combined(loss, kind, rows, weights, by_rows=by_rows)

    def _walk(self, name: str) -> None:
        """Trace a value without rows back to the reduction over rows."""
        if name not in self._depending:
            self.kinds.add("constant")
            return
        op = self._ops.get(name)
        if op is None:
            raise _UnknownError(f"it is computed from the input {name}")
        target = op.packet
        operands = [each for each in op.uses() if each in self._depending]
        if any(self._row_dims(each) for each in operands):
            self._reduce(op, target)
        elif target in {"add", "sub"} or (target in _KEEPING and len(operands) == 1):
            for each in op.uses():
                self._walk(each)
        elif target in {"mul", "div"} and operands == [_first(op)]:
            self._scale(op, target, operands[0])
        elif target == "mul" and len(operands) == 1:
            self._walk(operands[0])
        else:
            raise _UnknownError(f"{op.name} ({op.target}) is not linear in a mean over rows")

    def _scale(self, op: Op, target: str, operand: str) -> None:
        number = op.arguments[1]
        if isinstance(number, Ref) and any(each.name == number.name for each in self._graph.prelude):
            raise _UnknownError(f"{op.name} scales it by {number.name}, which depends on sizes")
        before = set(self.kinds)
        self._walk(operand)
        if isinstance(number, Size) and number.mentions("batch"):
            if target != "div" or "mean" in self.kinds:
                raise _UnknownError(f"{op.name} scales it by the number of rows")
            self.kinds = {*before, "mean", *(self.kinds - {"sum"})}

    def _reduce(self, op: Op, target: str) -> None:
        reduction = _reduction(op)
        if target in {"mean", "sum"}:
            self.kinds.add(target)
        elif reduction in {_MEAN, _SUM}:
            self.kinds.add("mean" if reduction == _MEAN else "sum")
            if target in _LABELS and reduction == _MEAN and op.name not in self.counting:
                self.counting.append(op.name)
        else:
            raise _UnknownError(f"{op.name} ({op.target}) combines rows")
        self._num_reductions += 1

    def _row_dims(self, name: str) -> int:
        value = self._graph.values.get(name) or next((v for v in self._graph.tensor_inputs() if v.name == name), None)
        return (
            sum(isinstance(size, Size) and size.mentions("batch") for size in value.shape) if value is not None else 0
        )

    def _check_rows(self, loss: str) -> None:
        """Raise `_UnknownError` if a value that leads to the loss has rows in two dimensions, such as pairs of rows."""
        waiting, seen = [loss], set[str]()
        while waiting:
            name = waiting.pop()
            if name in seen or name not in self._ops:
                continue
            seen.add(name)
            if self._row_dims(name) > 1:
                raise _UnknownError(f"{name} relates rows to each other")
            waiting += self._ops[name].uses()


class _UnknownError(Exception):
    """The loss is not a known mean or sum over rows."""


def _called_loss(output: Any) -> Any:
    loss = getattr(output, "loss", None)
    return output.get("loss") if loss is None and isinstance(output, Mapping) else loss


def own_loss(output: Any) -> Tensor:
    """Find the loss in a model's output, as Hugging Face models return it for labels."""
    loss = _called_loss(output)
    if loss is None:
        loss = next(iter(trees.tensors(output)), None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise RunError("the model returns no loss; pass a loss_fn to train_step, or labels to the model")
    return loss.reshape(())


def _depending(graph: Graph) -> set[str]:
    """Return the names of values that depend on the inputs."""
    found = {value.name for value in graph.tensor_inputs()}
    for op in graph.ops:
        if not found.isdisjoint(op.uses()):
            found.add(op.name)
    return found


def _first(op: Op) -> str | None:
    first = op.arguments[0] if op.arguments else None
    return first.name if isinstance(first, Ref) else None


def _reduction(op: Op) -> Any:
    if op.target == GETITEM:
        return None
    for place, argument in enumerate(resolve_operator(op.target)._schema.arguments):
        if argument.name == "reduction":
            return (
                op.arguments[place]
                if place < len(op.arguments)
                else op.keywords.get("reduction", argument.default_value)
            )
    return None


_EVEN = 1e-5
_KEPT = 8  # number of functions whose convention is cached
_NAMES = {
    "mean": "mean over rows",
    "weighted": "weighted mean",
    "sum": "sum",
    "count": "pair of sum and count",
    "whole": "batch's own",
}


class Losses:
    """Losses of microbatches, with a cache of the conventions over rows of recent loss functions.

    Example:
        measured = losses.measure(F.cross_entropy, graph, outputs, microbatch, own=own, alone=False)
        document = described([measured])
    """

    def __init__(self, cut: RowCut) -> None:
        self._cut = cut
        self._conventions: dict[int, LossConvention] = {}  # by the id of the function, which its convention holds

    def measure(
        self,
        loss_fn: LossFunction | None,
        graph: Graph,
        outputs: Sequence[Tensor],
        microbatch: MicrobatchRows,
        *,
        own: OwnLoss,
        alone: bool,
    ) -> MeasuredLoss:
        """Return a microbatch's loss from the last stage's outputs; `alone` is set if it is the whole batch."""
        sizes, labels, count = microbatch.sizes, microbatch.labels, microbatch.sizes["batch"]
        output = build_output(graph, outputs, sizes)
        if loss_fn is None:
            return own.measure(output, count, alone=alone)
        own.forget()

        def sample(rows: Sequence[int], noise: Sequence[float]) -> tuple[Any, Any]:
            return sample_rows(graph, outputs, sizes, rows, noise), self._cut.parts(labels, count, [rows])[0]

        convention = self._conventions.setdefault(id(loss_fn), LossConvention(loss_fn))
        if len(self._conventions) > _KEPT:
            del self._conventions[next(iter(self._conventions))]
        measured = convention.measure(output, labels, count, sample, alone=alone)
        return replace(measured, counts=_counts(labels, count)) if measured.divisors else measured


def described(found: Sequence[MeasuredLoss]) -> dict[str, Any]:
    """Return a process's document about its microbatches' losses."""
    return {
        "losses": [(each.number, each.count) for each in found],
        "kinds": sorted({each.kind for each in found if each.kind}),
        "ratios": [each.ratios for each in found if each.ratios or each.kind == "mean"],
        "refused": next((each.refused for each in found if each.refused), ""),
        "divisors": next((each.divisors for each in found if each.divisors), ()),
        "counts": [math.fsum(counts) for counts in zip(*(each.counts for each in found if each.counts), strict=False)],
    }


def _counts(labels: Any, rows: int) -> tuple[float, ...]:
    """Return numbers of rows and of labels by which a mean over these rows may divide."""
    found = [float(rows)]
    for label in trees.tensors(labels):
        if label.is_complex() or label.is_nested or label.layout != torch.strided:
            continue
        for each in (label, label[:, 1:] if label.dim() > 1 else label):  # of a language model, shifted
            found += [float(each.numel()), float((each >= 0).sum()), float((each != 0).sum())]
    return tuple(found)


@everywhere()
def check_agreed(gathered: Sequence[Mapping[str, Any]]) -> None:
    """Raise `UsageError` on every process unless all microbatches have one convention."""
    refused = next((document["refused"] for document in gathered if document["refused"]), "")
    if refused:
        raise UsageError(refused)
    kinds = sorted({kind for document in gathered for kind in document["kinds"]})
    if len(kinds) > 1:
        raise UsageError(
            f"loss_fn is a {' and a '.join(_NAMES[kind] for kind in kinds)} in microbatches of one batch; "
            "return (sum, count), or use microbatches=1 and replicas=1"
        )
    _check_divisors([document for document in gathered if document["divisors"]])
    ratios = [ratio for document in gathered for ratio in document["ratios"]]
    if ratios and any(not _same(ratios[0], other) for other in ratios):
        raise UsageError(
            "loss_fn gives rows unequal weights, so a batch's loss is not the mean of its microbatches' losses; "
            "return (sum, count), or use microbatches=1 and replicas=1"
        )


def _check_divisors(gathered: Sequence[Mapping[str, Any]]) -> None:
    """Raise `UsageError` if sums of several replicas are divided by numbers that count the rows of each."""
    if len(gathered) < 2:
        return
    divisors = [document["divisors"] for document in gathered]
    differ = any(not _same(divisors[0], other) for other in divisors)
    own = all(
        any(_same([number], [count]) for number in each["divisors"] if number != 1.0 for count in each["counts"])
        for each in gathered
    )
    if differ or own:
        found = " and ".join(f"{each[-1]:g}" for each in divisors)
        raise UsageError(
            f"loss_fn divides a sum by {found} in the replicas, counts of their own rows, but sums of replicas are "
            "added; count inside loss_fn and return (sum, count)"
        )


def _same(first: Sequence[float], other: Sequence[float]) -> bool:
    pairs = zip(first, other, strict=False)
    return len(first) == len(other) and all(math.isclose(a, b, rel_tol=_EVEN, abs_tol=1e-9) for a, b in pairs)


def is_undivided(kinds: Iterable[str | None]) -> bool:
    """Return whether losses of these kinds add up to the loss of a batch without division."""
    return not {"sum", "whole"}.isdisjoint(kinds)


def total_count(gathered: Sequence[Mapping[str, Any]]) -> float:
    """Return the divisor of the sum of all microbatches' losses: 1 for a sum."""
    if any(is_undivided(document["kinds"]) for document in gathered):
        return 1.0
    return math.fsum(count for document in gathered for _, count in document["losses"])


def total_loss(gathered: Sequence[Mapping[str, Any]]) -> float:
    """Return the sum of the losses of all microbatches, in the order of replicas and microbatches."""
    return math.fsum(value for document in gathered for value, _ in document["losses"])
