from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.graph.attributes import HiddenAttributes, left_attributes
from penstock.graph.capture import capture


class Leaving(nn.Module):
    """Leaves tensors, sizes and a count in its attributes, as losses and logs read them later."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kl: Any = 0.0
        self.cache: Any = None
        self.losses: list[Any] = []
        self.maps: dict[str, Any] = {"none": 1}
        self.calls = 0
        self.same = [1, 2]

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        self.kl = h.pow(2).mean()
        self.losses.append(h.mean())
        self.maps["last"] = h
        self.cache = h.detach()
        self.rows = x.shape[0]
        self.calls += 1
        return h


def state(model: Leaving) -> list[Any]:
    return [model.kl, model.cache, model.losses, model.maps, model.calls, model.same, hasattr(model, "rows")]


def test_capture_leaves_attributes_as_they_were() -> None:
    model = Leaving().train()
    before = state(model)
    graph = capture(model, (torch.randn(3, 4),))
    assert state(model) == before
    assert graph.left == {"kl": None, "losses": None, "maps": None, "cache": None, "rows": None, "calls": 1}


def test_what_a_forward_has_left_cannot_be_read_until_it_is_shown() -> None:
    outer = nn.Sequential(Leaving())
    with left_attributes(outer) as left:
        outer(torch.randn(3, 4))
    assert set(left) == {"0.kl", "0.losses", "0.maps", "0.cache", "0.calls"}
    model: Any = outer[0]
    hidden = HiddenAttributes(outer, left)
    hidden.hide()
    hidden.hide()
    for use in (
        lambda: torch.ones(()) + model.kl, lambda: 0.1 * model.kl, lambda: torch.stack([model.kl]),
        lambda: model.kl.item(), lambda: sum(model.losses), lambda: model.maps["last"], lambda: f"{model.calls}",
    ):  # fmt: skip
        with pytest.raises(UsageError, match=r"self\.(kl|losses|maps|calls)"):
            use()
    assert model.cache is None
    hidden.show()
    assert (model.kl, model.losses, model.maps, model.calls) == (0.0, [], {"none": 1}, 0)
