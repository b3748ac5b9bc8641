"""Wrapped models: the message names the model inside."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from penstock.errors import UsageError
from penstock.graph.prepare import check_unwrapped
from penstock.pipeline import Pipeline


def inside(model: nn.Module) -> nn.Module:
    outer = nn.Sequential(model)
    outer[0] = torch.compile(model)  # type: ignore[assignment]
    return outer


def compiled(model: nn.Module) -> nn.Module:
    model.compile()
    return model


class DistributedDataParallel(nn.Module):
    """A wrapper of the same name, without a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class FSDPModule(nn.Linear):
    """What fully_shard makes of a module's class."""


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (DataParallel, r"DataParallel.*use model\.module$"),
        (DistributedDataParallel, r"DistributedDataParallel.*use model\.module$"),
        (torch.compile, r"OptimizedModule.*use model\._orig_mod$"),
        (compiled, r"compile\(\)"),
        (inside, r"model\.0 .*use model\.0\._orig_mod$"),
        (lambda _: nn.Sequential(FSDPModule(3, 3)), r"model\.0 .*FSDPModule.*before"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_wrapped_models_are_refused(wrap: Callable[[nn.Module], nn.Module], said: str, training: bool) -> None:
    with pytest.raises(UsageError, match=said):
        Pipeline(wrap(nn.Linear(3, 3)).train(training), torch.ones(2, 3), stages=1)


def test_the_model_inside_is_taken() -> None:
    check_unwrapped(DataParallel(nn.Linear(3, 3)).module)
