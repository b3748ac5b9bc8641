"""Streams in three processes, of which one stops or dies at a chosen moment; each tells how it ended."""

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.deploy import worker
from penstock.errors import PenstockError
from penstock.group import entry, links
from penstock.group import world as world_module
from penstock.pipeline import Pipeline
from penstock.runtime.eager import Runtime
from penstock.transport.base import receive_bytes
from tests.worlds import tower, tower_inputs

folder, moment, victim, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rank = int(os.environ["RANK"])
# as when started by hand: the first process serves the store, and takes it with it
del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
os.environ["MASTER_PORT"] = sys.argv[5]
calls: list[int] = []
run = Runtime.__call__


def tell(**what: Any) -> None:
    (folder / f"{moment}-{victim}-{number}-{rank}.json").write_text(json.dumps({"at_s": time.monotonic(), **what}))


def stop_here(*_args: Any, **_named: Any) -> None:
    tell(stopped=True)
    if number == signal.SIGSTOP and not os.fork():
        others = [folder / f"{moment}-{victim}-{number}-{other}.json" for other in range(3) if other != victim]
        late_s = time.monotonic() + 16  # longer than what is promised
        while time.monotonic() < late_s and not all(other.exists() for other in others):
            time.sleep(0.1)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    os.kill(os.getpid(), number)
    time.sleep(120)  # another thread may take the signal first, and this one would go on meanwhile


def stop_at_fourth(*given: Any) -> Any:
    if len(calls) == 3:
        stop_here()
    calls.append(0)
    return run(*given)


def stop_before_leave(*given: Any, **named: Any) -> Any:
    if sys._getframe(1).f_code.co_name == "_say_leave":
        time.sleep(0.5)  # what it has sent is on its way, which takes long on a busy machine
        stop_here()
    return receive_bytes(*given, **named)


if rank == victim:
    if moment == "start":
        links.PlainLinks.make_transport = stop_here  # type: ignore[assignment, method-assign]
    elif moment == "stream" and rank:
        Runtime.__call__ = stop_at_fourth  # type: ignore[assignment, method-assign]
    elif moment == "between" and rank:
        worker.follow_stages = lambda *_given: stop_here  # type: ignore[attr-defined]
    elif moment == "leave" and rank:
        worker.send_bytes = stop_here  # type: ignore[attr-defined]
    elif moment == "leave":
        world_module.receive_bytes = stop_before_leave  # type: ignore[attr-defined]


def feed(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for index, (x, rows) in enumerate(tower_inputs(count)):
        if rank == victim and moment == "stream" and index == 5:
            stop_here()
        yield x, rows


message = ""
try:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world = entry.join_torchrun(followed=True)
        if rank:
            message = worker.follow(world)
        else:
            model = tower()
            with world:
                with Pipeline(model, tower_inputs(1)[0], stages=3, world=world, threads=1) as pipe:
                    assert len(list(pipe.stream(feed(8)))) == 8
                    if moment == "between":
                        if not victim:
                            stop_here()
                        time.sleep(2.0)
                    assert len(list(pipe.stream(feed(8)))) == 8
                world.last_word = "fine"
    tell(message=message, warned=[str(w.message) for w in caught])
except PenstockError as error:
    tell(kind=type(error).__name__, message=str(error))
