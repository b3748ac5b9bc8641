"""Random numbers that are not torch's are refused by line; attributes that a forward assigns are restored."""

import os
import random
import threading
from collections.abc import Callable
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.errors import CaptureError, UsageError
from penstock.graph.capture import capture
from penstock.graph.side_effects import HiddenAttributes, left_attributes

BESIDE, OWN = np.random.default_rng(0), random.Random(3)


class Net(nn.Module):
    def __init__(self, draw: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.draw, self.rng, self.generator = (
            nn.Linear(3, 3), draw, np.random.RandomState(1), torch.Generator(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self, torch.dropout(self.fc(x), 0.5, self.training))


def layer_drop(_: Net, x: Tensor) -> Tensor:
    if random.random() < 0.5:
        return x * 2
    return x


def helped(_: Net, x: Tensor) -> Tensor:
    def amount() -> float:
        return uniform(0, 1)  # this line

    return x * amount()


def forked(_: Net, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return x + torch.manual_seed(0).initial_seed()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (layer_drop, r"random \(test_side_effects\.py:\d+: if random\.random\(\)"),
        (helped, r"random \(test_side_effects\.py:\d+: return uniform\(0, 1\)  # this line"),
        (lambda _, x: x + torch.from_numpy(np.random.randn(3)).float(), r"numpy\.random \(test_side_effects\.py"),
        (lambda _, x: x[:, np.random.permutation(3)], r"numpy\.random \(test_side_effects\.py"),
        (lambda net, x: x * net.rng.rand(), r"numpy RandomState \(test_side_effects\.py"),
        (lambda _, x: x * BESIDE.random(), r"numpy Generator \(test_side_effects\.py"),
        (lambda _, x: x * OWN.random(), r"random\.Random \(test_side_effects\.py"),
        (lambda _, x: x * np.random.default_rng().random(), r"default_rng.*test_side_effects\.py"),
        (lambda _, x: x * os.urandom(1)[0], r"urandom.*test_side_effects\.py"),
        (forked, r"fork_rng.*test_side_effects\.py"),
        (lambda _, x: x + torch.manual_seed(0).initial_seed(), r"manual_seed.*test_side_effects\.py"),
        (lambda net, x: x + torch.rand(3, generator=net.generator), r"Generator.*test_side_effects\.py"),
        (lambda _, x: x * torch.rand(1).item(), r"item.*test_side_effects\.py|test_side_effects\.py.*item"),
    ],
)
def test_random_draws_are_refused(training: bool, draw: Callable[[Net, Tensor], Tensor], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(Net(draw).train(training), (torch.randn(4, 3),))


def test_a_capture_leaves_the_generators_as_they_were() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    capture(Net(lambda _, x: x * torch.rand(()) * np.random.default_rng(0).random()).train(), (torch.ones(4, 3),))
    with pytest.raises(CaptureError, match="random"):
        capture(Net(layer_drop), (torch.ones(4, 3),))
    torch.manual_seed(1)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    assert after == before


def test_other_threads_may_seed_during_a_capture() -> None:
    inside, seeded = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            seeded.wait(20.0)
            return x * 2

    def seed() -> None:
        inside.wait(20.0)
        torch.manual_seed(1)
        np.random.default_rng()
        seeded.set()

    thread = threading.Thread(target=seed)
    thread.start()
    capture(Waits().eval(), (torch.zeros(2, 3),))
    thread.join()
    assert seeded.is_set()


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
