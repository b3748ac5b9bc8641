"""Models that work with one batch size: trained if no batch is cut, otherwise refused with the line."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.group.world import World
from penstock.pipeline import Pipeline
from tests.fewer import first
from tests.trainers import in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(3, (8,), generator=torch.Generator().manual_seed(1))


class Fixed(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.last, self.way = nn.Linear(4, 4), nn.Linear(4, 3), way

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.way == "chunk":
            left, right = h.chunk(2)
            h = torch.cat([left, right * 2])
        elif self.way == "len":
            h = h * torch.arange(len(h)).unsqueeze(1)
        elif self.way == "loop":
            h = torch.stack([row * row.sum() for row in h])
        elif self.way == "cdist":
            h = h + torch.cdist(h, h)[:, :4]
        elif self.way == "range":
            h = torch.stack([h[index] for index in range(int(h.shape[0]))])
        elif self.way == "assert":
            assert x.shape[0] == 8
        elif self.way == "contrastive":
            return F.cross_entropy(h @ h.t(), torch.arange(len(h)))
        found: Tensor = self.last(h)
        return found


WAYS = {
    "chunk": r"left, right = h\.chunk\(2\)", "len": r"len\(h\)", "loop": "for row in h", "cdist": r"torch\.cdist",
    "range": r"h\.shape\[0\]", "assert": "assert x", "contrastive": r"len\(h\)",
}  # fmt: skip


def loss_of(out: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(out, labels) if out.dim() else out


@pytest.mark.parametrize("way", first(3, [*WAYS]))
def test_a_whole_batch_is_trained(way: str) -> None:
    torch.manual_seed(0)
    model = Fixed(way).train()
    twin = copy.deepcopy(model)
    expected = loss_of(twin(ROWS), LABELS)
    expected.backward()
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}

    def script(world: World) -> tuple[float, float, Tensor]:
        own = copy.deepcopy(model)
        with Pipeline(own, ROWS, stages=2, world=world) as pipe:
            loss = float(pipe.train_step(ROWS, LABELS, loss_of))
            for name, parameter in pipe.named_parameters():
                if name in gradients:
                    torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
            with pytest.raises(UsageError, match=r"8 rows.*got 6"):
                pipe.train_step(ROWS[:6], LABELS[:6], loss_of)
            return loss, pipe.evaluate(ROWS, LABELS, loss_of), pipe(ROWS)

    for loss, evaluated, out in in_threads(2, script):
        assert [loss, evaluated] == pytest.approx([float(expected.detach())] * 2, rel=1e-5)
        torch.testing.assert_close(out, twin(ROWS).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_that_would_be_cut_is_refused_with_the_line(way: str) -> None:
    with (
        pytest.raises(UsageError, match=rf"8 rows.*test_fixed_batch\.py:\d+: .*{WAYS[way]}.*2 microbatches"),
        Pipeline(Fixed(way).train(), ROWS, stages=1, microbatches=2) as pipe,
    ):
        pipe.train_step(ROWS, LABELS, loss_of)
