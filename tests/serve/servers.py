"""A server that runs: `penstock serve` in a process of its own."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import psutil

from tests.processes import Finished, Running


class Server:
    """Where a server answers, and how it ends."""

    def __init__(self, running: Running, url: str) -> None:
        self.running, self.url = running, url

    def end(self, number: int = signal.SIGTERM) -> Finished:
        """End it in order, and check that nothing is left of it."""
        self.running.children()
        os.kill(self.running.pid, number)
        ended = self.running.wait()
        assert not self.running.children()
        return ended

    def workers(self) -> list[psutil.Process]:
        """Return its other processes that hold stages."""
        own = [each for each in self.running.children() if each.pid != self.running.pid]
        return [each for each in own if "penstock.serve.trial" not in each.cmdline()]


@contextlib.contextmanager
def serving(*words: object, deadline_s: float = 240.0) -> Iterator[Server]:
    """Start a server at a port that is free, and wait until it answers."""
    command = [sys.executable, "-m", "penstock", "serve", *map(str, words), "--port", "0"]
    with Running(command, deadline_s=deadline_s) as running:
        line = running.line()
        if " answers at " not in line:
            raise AssertionError(f"it does not answer: {line}\n{running.wait().stderr}")
        yield Server(running, line.rpartition(" ")[2])
