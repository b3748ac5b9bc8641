"""What stands on a process's board: how far it is, that it has left, and on the first one's the group's verdict."""

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.transport.base import FEEDER

VERDICT_KEY = "verdict"
MAX_MESSAGE = 2000  # characters of a verdict


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ended a run: the rank it happened to, and a sentence for people."""

    rank: int
    message: str
    lost: bool
    memory: bool = False  # it ran out of memory
    again: bool = False  # another group follows, with whoever waits to be taken in


def prepare_board(board: Store, rank: int) -> None:
    """Write on a new board what is read of it before its process has said anything."""
    board.set(beat_key(rank), "")
    if rank == FEEDER:
        board.set(VERDICT_KEY, "")


def beat_key(rank: int) -> str:
    """Return where a rank says on a board how far it is."""
    return f"beat/{rank}"


def gone_key(rank: int) -> str:
    """Return where a rank says on a board that it has left."""
    return f"gone/{rank}"


def write_verdict(verdict: Verdict) -> str:
    """Write a verdict for `read_verdict`."""
    return msgspec.json.encode(verdict).decode()


def read_verdict(text: str) -> Verdict:
    """Read a verdict that another process has written; one that cannot be read is a verdict as well."""
    try:
        verdict = msgspec.json.decode(text, type=Verdict)
    except (msgspec.MsgspecError, UnicodeError):
        message = "the group's verdict cannot be read: a process of another version took part; start again"
        return Verdict(rank=FEEDER, message=message, lost=False)
    line = (verdict.message.splitlines() or [""])[0]
    return msgspec.structs.replace(verdict, message=line[:MAX_MESSAGE])
