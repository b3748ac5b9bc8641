"""Losses of one process's microbatches, computed by their convention and checked for agreement between processes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock import trees
from penstock.engine.stages import MicrobatchRows
from penstock.errors import UsageError, everywhere
from penstock.graph.call import build_output
from penstock.graph.graph import Graph
from penstock.train.batches import RowCut, sample_rows
from penstock.train.loss_convention import LossConvention, LossFunction, MeasuredLoss
from penstock.train.own_loss import OwnLoss

_EVEN = 1e-5
_KEPT = 8  # number of functions whose convention is cached
_NAMES = {
    "mean": "mean over rows", "weighted": "weighted mean", "sum": "sum", "count": "pair of sum and count",
    "whole": "batch's own",
}  # fmt: skip


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
        self, loss_fn: LossFunction | None, graph: Graph, outputs: Sequence[Tensor], microbatch: MicrobatchRows, *,
        own: OwnLoss, alone: bool,
    ) -> MeasuredLoss:  # fmt: skip
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
