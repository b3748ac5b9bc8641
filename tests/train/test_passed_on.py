"""Outputs that come from an earlier stage as they are, such as an encoder's last hidden state."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.group.world import World
from penstock.pipeline import Pipeline
from tests.trainers import in_threads

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Both(nn.Module):
    """Gives what its first half makes beside what the second half makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden), hidden


def loss(output: tuple[Tensor, Tensor], _labels: Any = None) -> tuple[Tensor, int]:
    return output[0].pow(2).sum() + 3 * output[1].pow(2).sum(), len(output[0])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_loss_of_what_an_earlier_stage_made(schedule: str, checkpointing: bool) -> None:
    torch.manual_seed(1)
    model = Both().train()
    alone = copy.deepcopy(model)
    total, count = loss(alone(X))
    (total / count).backward()

    def script(world: World) -> tuple[float, dict[str, Tensor]]:
        with Pipeline(
            copy.deepcopy(model), X, stages=2, cuts=["first:after"], microbatches=2, schedule=schedule,
            checkpointing=checkpointing, world=world,
        ) as pipe:  # fmt: skip
            found = float(pipe.train_step(X, None, loss))
            return found, {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}

    results = in_threads(2, script)
    gradients = {name: gradient for _, own in results for name, gradient in own.items()}
    assert results[0][0] == pytest.approx(float(total) / count, rel=1e-6)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
