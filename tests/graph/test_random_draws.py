"""Random numbers that are not torch's are refused by line: a graph would draw them once."""

import os
import random
import threading
from collections.abc import Callable
from random import uniform

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.errors import CaptureError
from penstock.graph.capture import capture

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
        (layer_drop, r"random \(test_random_draws\.py:\d+: if random\.random\(\)"),
        (helped, r"random \(test_random_draws\.py:\d+: return uniform\(0, 1\)  # this line"),
        (lambda _, x: x + torch.from_numpy(np.random.randn(3)).float(), r"numpy\.random \(test_random_draws\.py"),
        (lambda _, x: x[:, np.random.permutation(3)], r"numpy\.random \(test_random_draws\.py"),
        (lambda net, x: x * net.rng.rand(), r"numpy RandomState \(test_random_draws\.py"),
        (lambda _, x: x * BESIDE.random(), r"numpy Generator \(test_random_draws\.py"),
        (lambda _, x: x * OWN.random(), r"random\.Random \(test_random_draws\.py"),
        (lambda _, x: x * np.random.default_rng().random(), r"default_rng.*test_random_draws\.py"),
        (lambda _, x: x * os.urandom(1)[0], r"urandom.*test_random_draws\.py"),
        (forked, r"fork_rng.*test_random_draws\.py"),
        (lambda _, x: x + torch.manual_seed(0).initial_seed(), r"manual_seed.*test_random_draws\.py"),
        (lambda net, x: x + torch.rand(3, generator=net.generator), r"Generator.*test_random_draws\.py"),
        (lambda _, x: x * torch.rand(1).item(), r"item.*test_random_draws\.py|test_random_draws\.py.*item"),
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
