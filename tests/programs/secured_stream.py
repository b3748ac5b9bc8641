"""Streams in three processes that prove a key: all is fine, one is lost or busy, or one has another key."""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from penstock.deploy import worker
from penstock.errors import PenstockError
from penstock.group import entry
from penstock.pipeline import Pipeline
from penstock.runtime.eager import Runtime
from tests.worlds import tower, tower_inputs

folder, case, port = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
rank = int(os.environ["RANK"])
# as penstock hosts run starts them: no agents, and a key in a file
del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
os.environ["MASTER_PORT"] = port
key = "other" if case == "stranger" and rank == 2 else "run"
os.environ["PENSTOCK_KEY"] = str(folder / f"{key}.key")
torch.set_num_threads(1)
calls: list[int] = []
run = Runtime.__call__


def held(*given: Any) -> Any:
    calls.append(0)
    if rank == 1 and case == "lost" and len(calls) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and case == "busy" and len(calls) == 5:
        ctypes.PyDLL(None).usleep(7_500_000)  # as a C extension that keeps the interpreter's lock
    return run(*given)


Runtime.__call__ = held  # type: ignore[assignment, method-assign]


def tell(**what: Any) -> None:
    (folder / f"{case}-{rank}.json").write_text(json.dumps(what))


if case == "stranger" and rank < 2:
    if not rank:  # the run that a process with another key would be part of
        store = entry.links_of_run("127.0.0.1").serve_store("127.0.0.1", int(port))
        while not (folder / f"{case}-2.json").exists():
            time.sleep(0.05)
        store.close()  # type: ignore[attr-defined]
    os._exit(0)
try:
    world = entry.join_torchrun(followed=True, again=True)
    if rank:
        tell(message=worker.follow(world))
    else:
        model, inputs = tower(), tower_inputs(60)
        with world:
            with Pipeline(model, inputs[0], stages=3, world=world, threads=1, on_loss="continue") as pipe:
                outputs = list(pipe.stream(inputs))
            world.last_word = "fine"
        with torch.no_grad():
            equal = all(torch.equal(one, model(*two)) for one, two in zip(outputs, inputs, strict=True))
        tell(
            equal=equal, changes=[change.why for change in pipe.changes], transport=type(world.transport.inner).__name__
        )
except PenstockError as error:
    tell(kind=type(error).__name__, message=str(error))
