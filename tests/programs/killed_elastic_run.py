"""Trains from a file of settings, and kills itself in the moment that it is told."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.elastic.shard import ShardFile
from penstock.errors import PenstockError
from penstock.recipes import loop
from penstock.recipes.launch import fit_here
from penstock.recipes.metrics import RunFolder
from penstock.recipes.settings import read_settings
from penstock.train import migration

file, moment, at, who = sys.argv[1:]
calls: list[int] = []


def due(step: int) -> bool:
    return step == int(at) and who in ("all", os.environ["RANK"])


def count(*_: Any, **__: Any) -> int:
    calls.append(1)
    return len(calls)


def die(kind: Any, name: str, step_of: Callable[..., int], *, after: bool = False) -> None:
    """Let this process end before, or after, the call of a function that is due."""
    real = getattr(kind, name)

    def call(*arguments: Any, **named: Any) -> Any:
        ends = due(step_of(*arguments, **named))
        found = real(*arguments, **named) if after or not ends else None
        if ends:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(kind, name, call)


def note(_folder: RunFolder, kind: str, *, step: int, **_: Any) -> int:
    return step if kind == "step" else 0


if moment == "fill":
    die(ShardFile, "append", count)
elif moment == "move":  # the weights have arrived, and no state of an optimizer
    die(migration, "PlacedStages", count, after=True)
elif moment == "step":
    die(RunFolder, "write", note)
elif moment == "validation":
    die(loop, "evaluate_all", lambda trainer, *_: trainer.step)
try:
    fit_here(read_settings(Path(file)))
except PenstockError as error:
    print(error, file=sys.stderr)
    if not moment:
        raise
