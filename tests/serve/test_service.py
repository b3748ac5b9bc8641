"""The state of a deployed service."""

from types import SimpleNamespace
from typing import Any, cast

from penstock.serve.service import _Opened
from penstock.stream.survival import StreamChange


def change(why: str, num_lost: int = 0) -> StreamChange:
    return StreamChange(at_s=1.0, why=why, took_s=0.5, num_again=0, devices=("a",), num_lost=num_lost)


def test_joins_and_replans_are_no_losses() -> None:
    changes = [change("worker 2 is lost", 1), change("a device has joined"), change("device speeds were measured")]
    opened = _Opened(cast(Any, None), cast(Any, SimpleNamespace(changes=changes)), lambda: None)
    assert (opened.num_lost, len(opened.told_changes())) == (1, 3)
