"""The same gradients, weights and losses as one process that accumulates the same microbatches."""

from typing import Any

import pytest
import torch

from tests.fewer import first, long
from tests.learners import LOSSES, MODELS, REPLICAS, SCHEDULES, adamw, batches, captured, cast, model, sgd
from tests.trainers import by_hand, error, errors, train

CLOSE = 1e-5

pytestmark = pytest.mark.usefixtures("one_thread")


def compare(name: str, cases: Any, num_steps: int, dtype: torch.dtype, make: Any) -> list[list[float]]:
    """Train in every way and by hand; gives the losses."""
    given = cast(batches(name, num_steps), dtype)
    losses = []
    by_replicas: dict[int, Any] = {}
    for size, settings in cases:
        replicas = settings.get("replicas", 1)
        wanted = {1: 3, 2: 2}[replicas]
        got = train(captured(name, dtype), size, given, make, LOSSES[name], microbatches=wanted, **settings)
        if replicas not in by_replicas:
            by_replicas[replicas] = by_hand(model(name, dtype), given, make, LOSSES[name], [wanted] * replicas)
        expected = by_replicas[replicas]
        assert got[0] == pytest.approx(expected[0], rel=1e-6)
        assert set(expected[1]) == set(got[1])
        assert max(errors(expected[1], got[1]).values()) < CLOSE, settings
        weights = {
            key: tensor
            for key, tensor in expected[2].items()
            if replicas == 1 or not ("running" in key or "tracked" in key)  # the first replica's statistics
        }
        assert max(errors(weights, got[2]).values()) < CLOSE, settings
        losses.append(got[0])
    return losses


@pytest.mark.parametrize("name", first(1, MODELS))
def test_sgd_in_float32_with_every_schedule(name: str) -> None:
    losses = compare(name, SCHEDULES, 10, torch.float32, sgd)
    four = losses[3:]
    assert four[0] == four[1], "the same cuts, another schedule: another loss"
    assert losses[0][0] == losses[1][0] == losses[2][0] == losses[3][0]


@pytest.mark.board
@pytest.mark.parametrize("name", first(2, MODELS))
def test_replicas(name: str) -> None:
    compare(name, REPLICAS, 3, torch.float32, sgd)


@pytest.mark.parametrize("name", first(1, MODELS))
def test_adamw_in_float64(name: str) -> None:
    cases: list[tuple[int, dict[str, Any]]] = [
        (3, {"stages": 3}), (2, {"stages": 2, "schedule": "gpipe"}), (4, {"stages": 4, "schedule": "zero-bubble"}),
        (2, {"stages": 4, "schedule": "interleaved"}), (4, {"stages": 2, "replicas": 2}),
    ]  # fmt: skip
    compare(name, cases, 10, torch.float64, adamw)


@pytest.mark.parametrize("name", first(1, MODELS))
def test_losses_are_bit_equal_between_schedules(name: str) -> None:
    given = batches(name, 2)
    losses = [
        train(captured(name, torch.float32), size, given, sgd, LOSSES[name], microbatches=4, stages=4, schedule=way)[0]
        for size, way in ((4, "gpipe"), (4, "1f1b"), (4, "zero-bubble"), (2, "interleaved"), (2, "1f1b"))
    ]
    assert all(loss == losses[0] for loss in losses)


@pytest.mark.parametrize("rows", [7, long(12)], ids=["ragged", "even"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_every_schedule_with_every_number_of_stages(schedule: str, replicas: int, rows: int) -> None:
    given = batches("gpt2", 2, rows)
    wanted = {1: 3, 2: 2}[replicas]
    expected = by_hand(model("gpt2", torch.float32), given, sgd, None, [wanted] * replicas)
    for stages in range(1, 5):
        devices = -(-stages // 2) if schedule == "interleaved" else stages
        settings: dict[str, Any] = {"stages": stages, "replicas": replicas, "schedule": schedule}
        got = train(
            captured("gpt2", torch.float32), devices * replicas, given, sgd, None, microbatches=wanted, **settings
        )
        assert got[0] == pytest.approx(expected[0], rel=1e-6)
        for wants, gives in ((expected[1], got[1]), (expected[2], got[2])):
            assert max(errors(wants, gives).values()) < CLOSE


def test_a_schedule_of_ones_own() -> None:
    own = "F0 F1 B1 B0 \n F0 F1 B1 B0"
    given = batches("deit", 2)
    got = train(captured("deit", torch.float32), 2, given, sgd, LOSSES["deit"], microbatches=2, schedule=own)
    expected = by_hand(model("deit", torch.float32), given, sgd, LOSSES["deit"], [2])
    assert all(error(tensor, got[2][key]) < CLOSE for key, tensor in expected[2].items())


@pytest.mark.parametrize("own", ["F0 F1 B0 I1 W1", "F0 F1 I0 B1 W0", "F0 F1 I0 W0 B1"])
@pytest.mark.parametrize("replicas", [2, long(1)])
def test_whole_and_split_backwards_of_one_stage_add_up(own: str, replicas: int) -> None:
    given = batches("deit", 2)
    settings: dict[str, Any] = {"microbatches": 2, "replicas": replicas, "schedule": own}
    got = train(captured("deit", torch.float32), replicas, given, sgd, LOSSES["deit"], **settings)
    expected = by_hand(model("deit", torch.float32), given, sgd, LOSSES["deit"], [2] * replicas)
    for wants, gives in ((expected[1], got[1]), (expected[2], got[2])):
        assert max(errors(wants, gives).values()) < CLOSE


def test_a_schedule_of_ones_own_may_synchronize_itself() -> None:
    given = batches("deit", 2)
    own = "F0 F1 B0 B1 S.0\nF0 B0 F1 B1 S.1"
    got = train(captured("deit", torch.float32), 2, given, sgd, LOSSES["deit"], microbatches=2, schedule=own)
    usual = train(captured("deit", torch.float32), 2, given, sgd, LOSSES["deit"], microbatches=2, schedule="gpipe")
    assert got[0] == usual[0]
