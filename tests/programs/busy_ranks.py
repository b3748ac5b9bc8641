"""Streams in three processes, of which one keeps its interpreter's lock for seconds, in a stage or between inputs."""

import ctypes
import os
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from penstock.deploy import worker
from penstock.group import entry
from penstock.pipeline import Pipeline
from penstock.runtime.eager import Runtime
from tests.worlds import tower, tower_inputs

rank, busy, where = int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2]
calls: list[int] = []
run = Runtime.__call__


def hold() -> None:
    ctypes.PyDLL(None).usleep(7_500_000)  # as a C extension that computes and keeps the interpreter's lock


def held(*given: Any) -> Any:
    calls.append(0)
    if rank == busy and where == "stage" and len(calls) == 3:
        hold()
    return run(*given)


def feed() -> Iterator[tuple[Tensor, Tensor]]:
    for index, given in enumerate(tower_inputs(8)):
        if where == "inputs" and index == 4:
            hold()
        yield given


Runtime.__call__ = held  # type: ignore[assignment, method-assign]
world = entry.join_torchrun(followed=True)
if rank:
    worker.follow(world)
else:
    with world, Pipeline(tower(), tower_inputs(1)[0], stages=3, world=world, threads=1) as pipe:
        assert len(list(pipe.stream(feed()))) == 8
