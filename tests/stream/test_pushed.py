"""A stream fed by calls from any thread."""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from penstock.errors import RunError, UsageError
from penstock.pipeline import Pipeline
from penstock.stream.pushed import PushedStream
from tests.worlds import tower, tower_inputs

pytestmark = pytest.mark.usefixtures("one_thread")


def check(results: "list[Future[Any]]") -> None:
    with torch.no_grad():
        wanted = [tower()(*each) for each in tower_inputs(len(results))]
    found: list[Tensor] = [each.result(60) for each in results]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_from_several_threads() -> None:
    inputs = tower_inputs(40)
    results: dict[int, Future[Any]] = {}
    with Pipeline(tower(), inputs[0], stages=2, threads=1) as pipe, PushedStream(pipe._streaming) as stream:

        def push(first: int) -> None:
            for index in range(first, 40, 4):
                x, rows = (tensor.clone() for tensor in inputs[index])
                results[index] = stream.push((x, rows))
                x.zero_()  # it was copied

        threads = [threading.Thread(target=push, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(UsageError):
            stream.push(torch.zeros(1))
        check([results[index] for index in range(40)])
    with pytest.raises(UsageError, match="closed"):
        stream.push(inputs[0])


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.long
@pytest.mark.usefixtures("no_garbage_collection")
def test_a_device_that_is_lost_and_comes_back() -> None:
    inputs = tower_inputs(600)
    with (
        Pipeline(tower(), inputs[0], stages=2, threads=1, on_loss="continue") as pipe,
        PushedStream(pipe._streaming) as stream,
    ):
        workers = pipe._streaming.world.workers
        assert workers is not None
        results = [stream.push(each) for each in inputs[:10]]
        results[-1].result(60)
        open_files = psutil.Process().num_fds()
        os.kill(workers.pids[0], signal.SIGSTOP)
        results += [stream.push(each) for each in inputs[10:30]]
        results[-1].result(60)
        assert [change.devices for change in pipe.changes] == [("worker-2",)]
        os.kill(workers.pids[0], signal.SIGCONT)
        until_s = time.monotonic() + 40
        while len(pipe.changes) == 1 and time.monotonic() < until_s and len(results) < 590:
            results.append(stream.push(inputs[len(results)]))
            time.sleep(0.1)
        assert {*pipe.changes[1].devices} == {"worker-1", "worker-2"}
        results += [stream.push(each) for each in inputs[len(results) : len(results) + 9]]
        check(results)
        assert psutil.Process().num_fds() <= open_files  # what a group held is closed with it


def test_push_fails_if_a_worker_is_lost() -> None:
    inputs = tower_inputs(3)
    with Pipeline(tower(), inputs[0], stages=2, threads=1) as pipe:
        stream = PushedStream(pipe._streaming)
        workers = pipe._streaming.world.workers
        assert workers is not None
        os.kill(workers.pids[1], signal.SIGKILL)
        with pytest.raises(RunError, match="killed"):
            stream.push(inputs[0]).result(60)
        with pytest.raises(RunError, match="killed"):
            stream.push(inputs[1])
        assert isinstance(stream.failure, RunError)
        stream.close()
