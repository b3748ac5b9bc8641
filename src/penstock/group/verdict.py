"""Board entries: a process's heartbeat, its exit, and on rank 0's board the group's verdict."""

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
    again: bool = False  # the run forms another group, of all ranks that answer and the waiting newcomers


def prepare_board(board: Store, rank: int) -> None:
    """Write the initial entries of a new board, for ranks that poll it before the first beat."""
    board.set(beat_key(rank), "")
    if rank == FEEDER:
        board.set(VERDICT_KEY, "")


def beat_key(rank: int) -> str:
    """Return the key of a rank's beat on a board."""
    return f"beat/{rank}"


def gone_key(rank: int) -> str:
    """Return the key of a rank's exit on a board."""
    return f"gone/{rank}"


def write_verdict(verdict: Verdict) -> str:
    """Encode a verdict for `read_verdict`."""
    return msgspec.json.encode(verdict).decode()


def read_verdict(text: str) -> Verdict:
    """Decode a verdict of another process; if that fails, return a verdict that states the problem."""
    try:
        verdict = msgspec.json.decode(text, type=Verdict)
    except (msgspec.MsgspecError, UnicodeError):
        message = (
            "the failure report cannot be read, as processes run different versions of penstock; install the same one "
            "everywhere"
        )
        return Verdict(rank=FEEDER, message=message, lost=False)
    line = (verdict.message.splitlines() or [""])[0]
    return msgspec.structs.replace(verdict, message=line[:MAX_MESSAGE])
