"""Which layers lose most in 8 bits."""

import torch
from torch import nn

from penstock.compress.measure import INT8, OnRuntimes, keeping, layer_losses


class Sensitive(nn.Module):
    """A layer whose inputs have one number far larger than the rest, which 8 bits cannot hold beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.hard, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.scale = nn.Buffer(torch.ones(16).index_fill(0, torch.tensor([3]), 2000.0))
        nn.init.zeros_(self.hard.weight[:, 3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.hard(self.plain(x) * self.scale))
        return hidden


def test_the_layer_that_loses_most_comes_first_and_stays_in_float32() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        model = Sensitive().eval()
    inputs = list(torch.randn(6, 16))
    on = OnRuntimes(model, (torch.stack(inputs[:2]),))
    assert on.linear_layers() == ["plain", "hard", "head"]
    losses = layer_losses(on, inputs)
    assert losses[0].layer == "hard"
    assert losses[0].error > 5 * losses[1].error
    assert keeping(losses, 1) == f"{INT8}+hard"

    def error(name: str) -> float:
        runtime = on.load(name)
        with torch.no_grad():
            found = torch.cat([runtime(on.sizes, [x[None].clone()])[0] for x in inputs])
            return float((found - model(torch.stack(inputs))).norm())

    assert error(keeping(losses, 1)) < 0.3 * error(str(INT8))
