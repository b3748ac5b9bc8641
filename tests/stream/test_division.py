"""What a caller's wishes make of a model, before anything is started."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from penstock.deploy.run_options import CutOptions, ModelCall, RunOptions
from penstock.errors import UsageError
from penstock.stream.division import Division, divide_model

EXAMPLE = (torch.zeros(2, 8),)


def divide(model: Any, device: str = "cpu", **cut: Any) -> Division:
    return divide_model(ModelCall(model=model, args=EXAMPLE), CutOptions(**cut), RunOptions(device=device), None)


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count))).eval()


def test_default_number_of_stages_is_four() -> None:
    assert len(divide(layers(6)).cuts) == 3


def test_division_has_the_requested_number_of_stages() -> None:
    assert len(divide(layers(6), stages=2).cuts) == 1


def test_devices_are_balanced_where_some_hold_two_stages() -> None:
    call = ModelCall(model=layers(9), args=EXAMPLE)
    division = divide_model(call, CutOptions(stages=3), RunOptions(), Mock(devices=[1, 2]))
    # of nine equal layers the first device, which holds stages 0 and 1, has as many as the other
    assert int(division.cuts[1].name.partition(":")[0]) in {3, 4}


def test_cuts_by_hand_come_before_a_number_of_stages() -> None:
    division = divide(layers(6), cuts=["1:after", "4:before"])
    assert [cut.name for cut in division.cuts] == ["1:after", "3:after"]


def test_modules_are_stages_as_they_are() -> None:
    division = divide(list(layers(3)))
    assert division.cuts == ()
    world = division.start_world()
    try:
        assert len(world.devices) == 3
    finally:
        world.close(0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 2}, r"a list of 3 modules .*leave stages and cuts out"),
        ({"cuts": ["0:after"]}, r"a list of 3 modules .*leave stages and cuts out"),
        ({"device": "cuda"}, "leave device out"),
    ],
)
def test_options_without_effect_on_modules_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        divide(list(layers(3)), **change)


def test_stream_needs_a_model() -> None:
    with pytest.raises(UsageError, match="needs the model"):
        divide(None)
