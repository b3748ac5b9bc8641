"""Calls of a training run that compute without a step: mean losses and metrics, and outputs."""

from collections.abc import Sequence
from typing import Any

from penstock.errors import DeviceLost, UsageError
from penstock.train.loss_convention import LossFunction
from penstock.train.losses import check_agreed, total_count, total_loss
from penstock.train.outcome import check_same_rows, everywhere
from penstock.train.step_rows import StepRows
from penstock.train.trainer import Trainer


def evaluate(trainer: Trainer, inputs: Any, labels: Any, loss_fn: LossFunction | None) -> float:
    """Return the mean of `loss_fn` over all rows of all replicas (a collective call).

    Raises `UsageError` if the count is zero.
    """
    ((total, count),) = evaluate_all(trainer, inputs, labels, [loss_fn])
    if not count:
        raise UsageError("evaluate needs at least one row that counts; got none")
    return total / count


def evaluate_all(
    trainer: Trainer, inputs: Any, labels: Any, functions: Sequence[LossFunction | None]
) -> list[tuple[float, float]]:
    """Return the sum and the count of each function over all rows of all replicas, from a single forward pass."""
    trainer.follow()
    rows = StepRows(trainer.data, trainer.exchange, trainer.now.placed, inputs, labels, functions)
    trainer.row_cut.check(labels, rows.bound(trainer.now.evaluation.graph)[1]["batch"])

    def work() -> dict[str, Any]:
        evaluation, only_replica = trainer.now.evaluation, len(trainer.now.placed.grid.replicas) == 1
        given = rows.now(trainer.now.placed, evaluation.parts, evaluation.graph)
        measures = evaluation.measures(given, functions, trainer.losses, trainer.row_cut, only_replica=only_replica)
        return {"measures": measures, "problem": given.problem}

    gathered = trainer.together(work)
    trainer.exchange.mark(trainer.now.placed)
    check_same_rows(gathered)
    found = []
    for index in range(len(functions)):
        documents = [document["measures"][index] for document in gathered]
        check_agreed(documents, everywhere)
        found.append((total_loss(documents), total_count(documents)))
    return found


def predict(trainer: Trainer, inputs: Any) -> Any:
    """Return the model's output for this replica's rows, on every process of the replica.

    Raises `DeviceLost` if a process is lost during the call, because the rows are then redistributed.
    """
    trainer.follow()
    placed = trainer.now.placed
    rows = StepRows(trainer.data, trainer.exchange, placed, inputs, None)
    found: list[Any] = []

    def work() -> dict[str, Any]:
        if trainer.now.placed is not placed:
            raise DeviceLost("a device was lost, and these rows were redistributed; request predictions again")
        evaluation = trainer.now.evaluation
        found[:] = [evaluation.outputs(rows.now(placed, evaluation.parts, evaluation.graph))]
        return {}

    if trainer.survivors is not None:
        trainer.together(work)
    else:
        with trainer.world.explained():
            work()
    trainer.exchange.mark(placed)
    return found[0]
