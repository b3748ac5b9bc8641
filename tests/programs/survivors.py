"""Streams in three processes that run the same script, of which the second is killed, and goes on with two."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from penstock.errors import RunError
from penstock.group import entry
from penstock.pipeline import Pipeline
from penstock.runtime.eager import Runtime
from penstock.transport.base import Transport
from penstock.transport.faulty import wrap_if_faulty
from tests.worlds import tower, tower_inputs

del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
os.environ["MASTER_PORT"] = sys.argv[2]
torch.set_num_threads(1)
calls: list[int] = []
run = Runtime.__call__
made: list[int] = []


def late(transport: Transport) -> Transport:
    made.append(0)
    if (os.environ["RANK"], len(made), sys.argv[3]) == ("2", 2, "late"):  # in the group after the loss
        time.sleep(1.0)  # the first process has connected to it, and goes on if it does not wait
        raise RunError("rank 2 cannot connect to another")
    return wrap_if_faulty(transport)


entry.wrap_if_faulty = late  # type: ignore[attr-defined]


def held(*given: Any) -> Any:
    calls.append(0)
    if os.environ["RANK"] == "1" and len(calls) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return run(*given)


Runtime.__call__ = held  # type: ignore[assignment, method-assign]
model, inputs = tower(), tower_inputs(60)
with Pipeline(model, inputs[0], stages=3, threads=1, on_loss="continue") as pipe:
    outputs = list(pipe.stream(inputs))
    more = list(pipe.stream(inputs[:5]))
if os.environ["RANK"] == "0":
    with torch.no_grad():
        equal = all(torch.equal(one, model(*two)) for one, two in zip(outputs + more, inputs + inputs[:5], strict=True))
    Path(sys.argv[1]).write_text(json.dumps([equal, len(outputs), len(pipe.changes)]))
