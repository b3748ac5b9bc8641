"""Modules without values."""

import threading

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.zoo.models.meta import (
    build_on_meta,
    load_buffers,
    materialize,
    meta_parameters,
    move_to_meta,
    parameter_aliases,
    parameter_shapes,
)
from penstock.zoo.weights.weights import TensorWeights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.ones(3, 2))
        self.first = shared
        self.second = nn.Linear(2, 3, bias=False)
        self.second.weight = shared
        self.register_buffer("table", torch.rand(4))


class ReadsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))
        self.register_buffer("start", self.weight.detach() * 2)
        self.size = int(self.weight.sum().item())


def devices(module: nn.Module) -> set[str]:
    return {parameter.device.type for parameter in module.parameters()}


def test_parameters_are_on_meta_and_buffers_are_real() -> None:
    with meta_parameters():
        norm = nn.BatchNorm1d(3)
    assert devices(norm) == {"meta"}
    assert norm.running_var is not None
    assert norm.running_var.tolist() == [1.0, 1.0, 1.0]
    assert devices(nn.Linear(2, 2)) == {"cpu"}


def test_meta_context_ends_after_an_error() -> None:
    with pytest.raises(KeyError), meta_parameters():
        raise KeyError
    assert devices(nn.Linear(2, 2)) == {"cpu"}


def test_meta_context_can_be_nested() -> None:
    with meta_parameters():
        with meta_parameters():
            pass
        assert devices(nn.Linear(2, 2)) == {"meta"}


def test_other_threads_are_not_affected() -> None:
    found: list[set[str]] = []
    with meta_parameters():
        thread = threading.Thread(target=lambda: found.append(devices(nn.Linear(2, 2))))
        thread.start()
        thread.join()
    assert found == [{"cpu"}]


def test_tied_parameters_stay_one() -> None:
    with meta_parameters():
        module = Tied()
    assert module.second.weight is module.first
    assert parameter_aliases(module) == {"second.weight": "first"}
    moved = Tied()
    move_to_meta(moved)
    assert moved.second.weight is moved.first
    assert devices(moved) == {"meta"}


def test_a_module_that_reads_its_parameters_is_built_for_real_first() -> None:
    module, weights = build_on_meta(ReadsItself, seed=0)
    assert isinstance(module, ReadsItself)
    assert devices(module) == {"meta"}
    assert module.get_buffer("start").tolist() == [6.0, 6.0]
    assert module.size == 6
    assert weights.load("weight").tolist() == [3.0, 3.0]
    assert not module.training


def test_random_buffers_depend_on_the_seed_and_leave_the_global_state() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    tables = [build_on_meta(Tied, seed=seed)[0].get_buffer("table") for seed in (0, 0, 1)]
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


def test_materialized_parameters_have_the_weights_values_and_stay_tied() -> None:
    module, weights = build_on_meta(Tied, seed=0)
    materialize(module, weights)
    assert module.get_parameter("second.weight") is module.get_parameter("first")
    assert torch.equal(module.get_parameter("first"), weights.load("first"))
    assert module.get_parameter("first").requires_grad


def test_buffers_come_from_the_weights_when_they_have_them() -> None:
    norm = nn.BatchNorm1d(1)
    load_buffers(norm, TensorWeights({"running_mean": torch.tensor([5.0])}))
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert (norm.running_mean.tolist(), norm.running_var.tolist()) == ([5.0], [1.0])


def test_a_lazy_module_is_refused() -> None:
    with pytest.raises(ModelError, match="the parameter weight has no shape yet"):
        parameter_shapes(nn.LazyLinear(3))
