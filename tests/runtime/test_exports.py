"""What a capture changes in the whole process while it runs is not what another thread sees as torch's settings."""

import threading

import torch
from torch import Tensor, nn

from penstock.graph.capture import capture
from penstock.runtime.torch_settings import read_settings


class Slow(nn.Module):
    """Waits inside its forward pass, as a large model does while it is exported."""

    def __init__(self, inside: threading.Event, go_on: threading.Event) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.events = (inside, go_on)

    def forward(self, x: Tensor) -> Tensor:
        self.events[0].set()
        self.events[1].wait(0.5)
        y: Tensor = self.linear(x)
        return y


def test_settings_are_those_of_before_an_export() -> None:
    before, found = read_settings(), []
    inside, go_on = threading.Event(), threading.Event()
    capturing = threading.Thread(target=capture, args=(Slow(inside, go_on).eval(), (torch.randn(2, 4),)))
    capturing.start()
    assert inside.wait(30.0)
    reading = threading.Thread(target=lambda: found.append(read_settings()))
    reading.start()
    go_on.set()
    for thread in (reading, capturing):
        thread.join(60.0)
    assert found == [before]


def test_captures_in_several_threads_leave_settings_as_they_were() -> None:
    before = read_settings()
    threads = [threading.Thread(target=capture, args=(nn.Linear(4, 4).eval(), (torch.randn(2, 4),))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert read_settings() == before
