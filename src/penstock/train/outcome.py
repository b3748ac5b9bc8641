"""What processes tell each other of a training step, and what all of them make of it alike."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import RunError


def tell(
    losses: Mapping[int, tuple[float, float]], *, odd: Mapping[int, int | None], used: Iterable[str],
    unused: Iterable[str],
) -> dict[str, Any]:  # fmt: skip
    """Say what a process has seen of a step: its microbatches' losses with what they count, and where it went wrong.

    `odd` has for each stage the first microbatch with numbers that are not finite, if any; `used` and `unused` are
    the parameters held here.
    """
    return {
        "losses": [losses[index] for index in sorted(losses)],
        "odd": [stage for stage, microbatch in odd.items() if microbatch is not None],
        "unused": list(unused),
        "used": list(used),
    }


def total_count(told: Sequence[Mapping[str, Any]]) -> float:
    """Return how much the mean loss is over."""
    return math.fsum(pair[1] for document in told for pair in document["losses"])


def mean_loss(told: Sequence[Mapping[str, Any]], step: int, last_stage: int) -> float:
    """Return the mean loss, added up in the order of replicas and microbatches.

    Raises `RunError` for what cannot be trained on; every process finds it out alike, so nobody waits and
    training can go on.
    """
    loss, total = math.fsum(pair[0] for document in told for pair in document["losses"]), total_count(told)
    if not math.isfinite(loss):
        odd = [stage for document in told for stage in document["odd"]]
        where = f"stage {min(odd)}" if odd else f"stage {last_stage}, in the loss itself"
        raise _everywhere(
            f"the loss of step {step} is {loss}: the first numbers that are not finite came from {where}; "
            "lower the learning rate, clip gradients, or look at this batch"
        )
    if not total:
        raise _everywhere(f"the loss of step {step} is over nothing: no row counts; leave such batches out")
    used = {name for document in told for name in document["used"]}
    unused = sorted({name for document in told for name in document["unused"]} - used)
    if unused and step == 0:
        raise _everywhere(
            f"{len(unused)} parameters have no part in the loss, first {unused[0]}; freeze them with "
            "requires_grad_(False), or use the output that they make"
        )
    return loss / total


def _everywhere(message: str) -> RunError:
    error = RunError(message)
    error.everywhere = True  # type: ignore[attr-defined]
    return error
