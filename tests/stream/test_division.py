"""What a caller's wishes make of a model, before anything is started."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.errors import UsageError
from penstock.stream.division import Wanted, divide_model

ASKED_NOTHING = Wanted(
    stages=None, policy="balanced", cuts=None, plan=None, weights=None, dynamic=None, threads=None, depth=2,
    stall_s=30.0, computes_on="cpu",
)  # fmt: skip
EXAMPLE = (torch.zeros(2, 8),)


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count))).eval()


def test_four_stages_where_nobody_says_how_many() -> None:
    assert len(divide_model(layers(6), EXAMPLE, None, ASKED_NOTHING, None).cuts) == 3


def test_as_many_stages_as_were_asked_for() -> None:
    assert len(divide_model(layers(6), EXAMPLE, None, replace(ASKED_NOTHING, stages=2), None).cuts) == 1


def test_cuts_by_hand_come_before_a_number_of_stages() -> None:
    wanted = replace(ASKED_NOTHING, cuts=["1:after", "4:before"])
    assert [cut.name for cut in divide_model(layers(6), EXAMPLE, None, wanted, None).cuts] == ["1:after", "3:after"]


def test_modules_are_stages_as_they_are() -> None:
    division = divide_model(list(layers(3)), EXAMPLE, None, ASKED_NOTHING, None)
    assert division.cuts == ()
    world = division.start_world()
    try:
        assert len(world.devices) == 3
    finally:
        world.close(0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 2}, "a list of 3 modules is that many stages"),
        ({"cuts": ["0:after"]}, "a list of 3 modules is that many stages"),
        ({"computes_on": "cuda"}, "a list of modules computes where they lie"),
    ],
)
def test_wishes_that_modules_cannot_grant(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        divide_model(list(layers(3)), EXAMPLE, None, replace(ASKED_NOTHING, **change), None)  # type: ignore[arg-type]


def test_a_model_is_needed() -> None:
    with pytest.raises(UsageError, match="the process that feeds needs the model"):
        divide_model(None, EXAMPLE, None, ASKED_NOTHING, None)
