"""Board entries: a process's progress, its exit, and on the first process's board the group's verdict."""

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.wire import FEEDER

VERDICT_KEY = "verdict"
MAX_MESSAGE = 2000  # characters of a verdict


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The failure that ended a group: the rank that failed, and a message for people."""

    rank: int
    message: str
    lost: bool
    memory: bool = False  # it ran out of memory
    again: bool = False  # a group of all ranks and the waiting newcomers follows


def prepare_board(board: Store, rank: int) -> None:
    """Write the initial entries of a new board, read before its process writes any."""
    board.set(beat_key(rank), "")
    if rank == FEEDER:
        board.set(VERDICT_KEY, "")


def beat_key(rank: int) -> str:
    """Return the key of a rank's progress on a board."""
    return f"beat/{rank}"


def gone_key(rank: int) -> str:
    """Return the key of a rank's exit on a board."""
    return f"gone/{rank}"


def write_verdict(verdict: Verdict) -> str:
    """Encode a verdict for `read_verdict`."""
    return msgspec.json.encode(verdict).decode()


def read_verdict(text: str) -> Verdict:
    """Decode a verdict of another process; one that cannot be decoded becomes a verdict as well."""
    try:
        verdict = msgspec.json.decode(text, type=Verdict)
    except (msgspec.MsgspecError, UnicodeError):
        message = "the group's verdict cannot be read: a process of another version took part; start again"
        return Verdict(rank=FEEDER, message=message, lost=False)
    line = (verdict.message.splitlines() or [""])[0]
    return msgspec.structs.replace(verdict, message=line[:MAX_MESSAGE])
