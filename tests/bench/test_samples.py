"""Inputs whose results are known, and how results are held against them."""

import re

import pytest
import torch

from penstock.bench.samples import Difference, Samples, doubt_of
from penstock.graph.capture import capture
from penstock.zoo.models.models import load_model
from tests.cli.conftest import SMALL


def test_inputs_are_distinct_and_come_in_turn() -> None:
    zoo = load_model(SMALL)
    graph = capture(zoo.module, zoo.example_args, zoo.example_kwargs)
    sizes = graph.sizes(2)
    samples = Samples(zoo, graph, sizes)
    fed = [tensors for tensors, given in samples.feed(len(samples.inputs) + 1) if given == sizes]
    assert len(fed) == len(samples.inputs) + 1
    assert fed[-1] is samples.inputs[0]
    assert all(tensor.shape[0] == 2 for (tensor,) in samples.inputs)
    assert not torch.equal(samples.inputs[0][0], samples.inputs[1][0])


def test_a_result_that_is_off_by_one_place_is_seen() -> None:
    expected = [[torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 4.0])]]
    difference = Difference(expected)
    difference.add(1, [torch.tensor([3.0, 4.0])])
    assert difference.equal
    difference.add(0, [torch.tensor([1.0, 2.25])])
    assert not difference.equal
    assert difference.largest == 0.25


def test_agreement_is_of_rows_of_scores() -> None:
    expected = [[torch.tensor([[1.0, 2.0], [4.0, 3.0]])], [torch.tensor([5, 6])]]
    difference = Difference(expected)
    difference.add(1, [torch.tensor([5, 6])])
    assert difference.top1_agreement is None
    difference.add(0, [torch.tensor([[1.0, 1.5], [2.0, 3.0]])])
    assert difference.top1_agreement == 0.5


@pytest.mark.parametrize(
    ("row", "doubt"),
    [
        ({"drift": 0.05, "efficiency": 0.98}, "^$"),
        ({"drift": -0.5, "efficiency": 0.98}, "50% slower around this row"),
        ({"drift": 0.3, "efficiency": None}, "30% faster around this row"),
        ({"drift": 0.0, "efficiency": 6.5}, r"efficiency of 6\.50 is more"),
        ({"drift": 0.0, "efficiency": 6.5, "runtime": "onnxruntime"}, "^$"),  # its references run on eager
        ({}, "^$"),
    ],
)
def test_figures_beyond_what_devices_can_do_are_doubted(row: dict[str, object], doubt: str) -> None:
    assert re.search(doubt, doubt_of({"runtime": "eager", **row}, "eager"))
