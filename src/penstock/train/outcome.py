"""What processes gather of a training step, what all conclude from it, and where one process's step went."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError, RunError
from penstock.train.loss_convention import Measured
from penstock.train.losses import check_agreed, described, total_count, total_loss


def step_document(
    losses: Mapping[int, Measured], *, first_nonfinite: Mapping[int, int | None], used: Iterable[str],
    unused: Iterable[str],
) -> dict[str, Any]:  # fmt: skip
    """Describe what a process has seen of a step: the losses of its microbatches, and where it went wrong.

    `first_nonfinite` has for each stage the first microbatch with numbers that are not finite, if any; `used` and
    `unused` are the parameters held here.
    """
    return {
        **described([losses[index] for index in sorted(losses)]),
        "nonfinite": [stage for stage, microbatch in first_nonfinite.items() if microbatch is not None],
        "unused": list(unused),
        "used": list(used),
    }


def mean_loss(gathered: Sequence[Mapping[str, Any]], step: int, last_stage: int) -> float:
    """Return the loss of the whole batch, added up in the order of replicas and microbatches.

    Raises `RunError` for what cannot be trained on; every process finds it out alike, so nobody waits and
    training can go on.
    """
    check_agreed(gathered, everywhere)
    loss, total = total_loss(gathered), total_count(gathered)
    if not math.isfinite(loss):
        stages = [stage for document in gathered for stage in document["nonfinite"]]
        where = f"stage {min(stages)}" if stages else f"stage {last_stage}, in the loss itself"
        raise everywhere(RunError(
            f"the loss of step {step} is {loss}: the first numbers that are not finite came from {where}; "
            "lower the learning rate, clip gradients, or look at this batch"
        ))  # fmt: skip
    if not total:
        raise everywhere(RunError(
            f"the loss of step {step} is over nothing: no label of the batch counts; leave such batches out"
        ))  # fmt: skip
    used = {name for document in gathered for name in document["used"]}
    unused = sorted({name for document in gathered for name in document["unused"]} - used)
    if unused and step == 0:
        raise everywhere(RunError(
            f"{len(unused)} parameters have no part in the loss, first {unused[0]}; freeze them with "
            "requires_grad_(False), or use the output that they make"
        ))  # fmt: skip
    return loss / total


def everywhere(error: PenstockError) -> PenstockError:
    """Mark an error that every process finds out alike, so that none has to tell the others of it."""
    error.everywhere = True  # type: ignore[attr-defined]
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingChange:
    """How a training goes on in another group of processes, from a step on, and the seconds that it took to get there.

    Where it `went_back`, everything came from a checkpoint of that step.
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
    """Where one process's step went, in seconds and bytes.

    `wait_s` is for messages of neighbours, sending included; `synchronize_s` for the sums of gradients that
    the backwards did not cover, and for the losses of the others. `peak_memory_bytes` is the process's
    so far. `num_synchronizations` counts sums of gradients with other processes, `synchronized_bytes` are those of the
    gradients.

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
