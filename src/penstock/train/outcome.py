"""Outcome of a training step: documents gathered from all ranks, the loss or error, and a process's report."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.errors import RunError, UsageError, everywhere
from penstock.train.loss_convention import MeasuredLoss
from penstock.train.losses import check_agreed, described, total_count, total_loss


def step_document(
    losses: Mapping[int, MeasuredLoss],
    *,
    nonfinite: Iterable[int],
    used: Iterable[str],
    unused: Iterable[str],
    problem: str = "",
) -> dict[str, Any]:
    """Return a process's document about a step: the losses of its microbatches, and stages with non-finite numbers.

    `nonfinite` are stages with non-finite numbers; `used` and `unused` are names of parameters held here; `problem` is
    why the rows cannot be trained on (see `RowExchange`).
    """
    return {
        **described([losses[index] for index in sorted(losses)]),
        "nonfinite": list(nonfinite),
        "unused": list(unused),
        "used": list(used),
        "problem": problem,
    }


class LossTensor(Tensor):
    """The loss of a step, whose backward has run: another one raises `UsageError`."""

    __module__ = "torch"  # Weights & Biases recognizes tensors by the names of their module and class

    def backward(self, *_: Any, **__: Any) -> None:
        """Raise `UsageError`."""
        raise UsageError("train_step has run the backward of this loss; remove loss.backward() from the loop")

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a tensor, so that files need no class of this package."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


@everywhere()
def mean_loss(gathered: Sequence[Mapping[str, Any]], step: int, last_stage: int) -> float:
    """Return the loss of the whole batch, added up in the order of replicas and microbatches.

    Raises `RunError` for a non-finite loss, `UsageError` if ranks compute with different random numbers, on every
    process, so that none waits and training can continue.
    """
    check_same_rows(gathered)
    check_agreed(gathered)
    loss, total = total_loss(gathered), total_count(gathered)
    if not math.isfinite(loss):
        stages = [stage for document in gathered for stage in document["nonfinite"]]
        where = f"stage {min(stages)}" if stages else f"stage {last_stage}, in the loss itself"
        raise RunError(
            f"the loss of step {step} is {loss}: the first numbers that are not finite came from {where}; "
            "lower the learning rate, clip gradients, or look at this batch"
        )
    if not total:
        raise RunError(f"the loss of step {step} is undefined: no label of the batch counts; skip such batches")
    used = {name for document in gathered for name in document["used"]}
    unused = sorted({name for document in gathered for name in document["unused"]} - used)
    if unused and step == 0:
        raise RunError(
            f"{len(unused)} parameters do not contribute to the loss, first {unused[0]}; freeze them with "
            "requires_grad_(False), or use their output"
        )
    return loss / total


@everywhere()
def check_same_rows(gathered: Sequence[Mapping[str, Any]]) -> None:
    """Raise `UsageError` on every process if ranks of a replica would compute with different random numbers."""
    if problem := next((document["problem"] for document in gathered if document["problem"]), ""):
        raise UsageError(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingChange:
    """A switch of a training run to another process group at a step, and its duration in seconds.

    `went_back` is set if all state was restored from a checkpoint of that step.
    """

    step: int
    why: str
    took_s: float
    processes: int
    replicas: int
    stages: int
    went_back: bool = False


@dataclass(slots=True)
class StepReport:
    """Time and traffic of one process's step, in seconds and bytes.

    `wait_s` is spent waiting for messages of neighbours, including sends; `synchronize_s` for gradient sums that did
    not overlap with backwards, and for the losses of other ranks. `peak_memory_bytes` is the process's peak so far.
    `num_synchronizations` counts gradient sums with other processes, `synchronized_bytes` the bytes of these gradients.

    Example:
        loss = pipe.train_step(images, labels, F.cross_entropy)
        print(pipe.last_step.forward_s, pipe.last_step.sent_bytes)
    """

    load_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    wait_s: float = 0.0
    synchronize_s: float = 0.0
    sent_bytes: int = 0
    num_synchronizations: int = 0
    synchronized_bytes: int = 0
    peak_memory_bytes: int = 0
