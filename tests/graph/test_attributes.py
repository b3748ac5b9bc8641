from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import CaptureError, UsageError
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


def test_attributes_set_by_forward_are_hidden_until_shown() -> None:
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


class Queue(nn.Module):
    """Keeps what it has seen in a buffer, in one of several ways."""

    seen: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("seen", torch.zeros(2, 3))
        self.register_buffer("later", None)

    def forward(self, x: Tensor) -> Tensor:
        more = torch.cat([self.seen, x.detach()[:1]])
        if self.way == "assigned":
            self.seen = more
        elif self.way == "resized":
            self.seen.resize_(4, 3)
        elif self.way == "set":
            self.seen.set_(more)  # type: ignore[call-overload]
        elif self.way == "data":
            self.seen.data = more
        elif self.way == "dtype":
            self.seen = self.seen.double()
        elif self.way == "registered":
            self.register_buffer("new", x.detach().mean(0))
        elif self.way == "later":
            self.later = x.detach().mean(0)
        else:
            self.seen = torch.roll(self.seen, 1, 0)
        return x + self.seen.sum().float()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("assigned", r"seen float32 \[3, 3\]"), ("resized", r"seen .*\[4, 3\]"), ("set", r"seen .*\[3, 3\]"),
        ("data", r"\.data"), ("dtype", "seen float64"), ("registered", r"new float32 \[3\]"), ("later", "later"),
    ],
)  # fmt: skip
def test_a_buffer_keeps_its_shape(way: str, said: str, training: bool) -> None:
    model = Queue(way).train(training)
    with pytest.raises(CaptureError, match=said):
        capture(model, (torch.ones(4, 3),))
    assert {name: tuple(buffer.shape) for name, buffer in model.named_buffers()} == {"seen": (2, 3)}
    capture(Queue("rolled").train(training), (torch.ones(4, 3),))
