"""Rendezvous: independently started processes form one group through rank 0's store.

    claim my rank;  publish a hello: versions, size of the run, host, address and port of my board
    read all hellos, and reject a group that does not match
    rank 0 and every other rank watch each other from now on (`group/liveness.py`)
    exchange addresses for data, and connect

Every call to the store has a deadline. A second process with the same rank is rejected when it claims the rank; a
process of another run is rejected by its hello, which carries the id of its run.
"""

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Annotated

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from penstock.errors import DeviceLost, RunError
from penstock.graph.program import marks_of_operators, unlike_operators
from penstock.group.board import PatientStore, prepare_board, read_if_there
from penstock.group.links import Links, close_store
from penstock.group.liveness import Boards
from penstock.group.roll_call import Rendezvous
from penstock.terminal.progress import working
from penstock.text import first_line, note
from penstock.transport.base import SILENCE_S, StoreSilent
from penstock.version import __version__
from penstock.wire import FEEDER

JOIN_S = 600.0  # a single-board computer may take minutes for its first import of PyTorch
STORE_S = 10.0  # timeout for an answer of rank 0's store
_POLL_S = 0.05
_NAME_S = 10.0  # after this time, the progress line names the missing ranks


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process's announcement when it joins."""

    rank: int
    size: int
    run: str  # torchrun's id of the run, else empty
    nonce: str  # id of this process in all groups of its run; rank 0's is part of the group's id
    penstock: str
    torch: str
    name: str  # display name
    host: str  # name of the machine, as in plans
    address: str
    board_port: int
    bandwidth_bytes_per_s: float | None = None
    again: bool = False  # set by rank 0: the run forms a new group after a rank is lost
    silence_s: Annotated[float, msgspec.Meta(gt=0, le=3600.0)] = SILENCE_S  # set by rank 0: maximum silence of a rank


class Meeting:
    """A completed rendezvous: the hellos of all ranks, and the boards by which they watch each other.

    Raises `RunError` naming ranks that did not join or do not match, and `DeviceLost` if rank 0 is lost.

    Example:
        meeting = Meeting(rendezvous, rank=0, size=4, prefix="run0")
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, size: int, *, prefix: str,
        watch: Callable[[], None] = lambda: None, join_s: float = JOIN_S, again: bool = False,
        own: str | None = None, silence_s: float = SILENCE_S, store_s: float = STORE_S, name_s: float = _NAME_S,
    ) -> None:  # fmt: skip
        self._rank, self._size, self._prefix, self._links = rank, size, prefix, rendezvous.links
        self._join_s, self._name_s, self._named, self._doing = join_s, name_s, "", f"connecting {size} processes"
        # for each rank with another torch version: the operators that differ from those of this process
        self.unlike: Mapping[int, frozenset[str]] = {}
        address = rendezvous.address
        self.board = _serve_board(rendezvous.links, address, rank)
        self._own = Hello(
            rank=rank, size=size, run=os.environ.get("TORCHELASTIC_RUN_ID", ""), nonce=own or uuid.uuid4().hex,
            penstock=__version__, torch=str(torch.__version__).partition("+")[0], name=rendezvous.name,
            host=host_name(), address=address, board_port=self.board.port, bandwidth_bytes_per_s=_bandwidth(),
            again=again, silence_s=silence_s,
        )  # fmt: skip
        store = PatientStore(rendezvous.connect, store_s)
        with contextlib.ExitStack() as where_it_fails:
            where_it_fails.callback(close_store, self.board)
            try:
                self.hellos = self._meet(store, watch)
            except StoreSilent as error:
                raise DeviceLost(
                    f"rank {rank} lost contact with rank 0 during the rendezvous ({error}): rank 0's host is stopped, "
                    "unreachable or off; start again"
                ) from None
            except RuntimeError as error:
                raise DeviceLost(
                    f"rank {rank} lost contact with rank 0 during the rendezvous: {first_line(error)}; start again"
                ) from error
            finally:
                store.close()
            where_it_fails.pop_all()

    @property
    def own(self) -> str:
        """Unique id of this process, the same in all groups of its run."""
        return self._own.nonce

    @property
    def name(self) -> str:
        """Unique id of this group."""
        return f"{self._prefix}.{self.hellos[FEEDER].nonce}"

    @property
    def silence_s(self) -> float:
        """Maximum silence in seconds of a process of this group, as set by rank 0."""
        return self.hellos[FEEDER].silence_s

    @property
    def boards(self) -> Boards:
        """Boards of the ranks that this one watches: rank 0 watches all, the others watch rank 0."""
        watched = [hello for hello in self.hellos if hello.rank != self._rank and FEEDER in (hello.rank, self._rank)]
        return Boards(
            self.board,
            {
                hello.rank: partial(self._links.connect_store, hello.address, hello.board_port, self.silence_s)
                for hello in watched
            },
            {hello.rank: hello.address for hello in watched},
            self._links.connect_s,
        )

    def _meet(self, store: PatientStore, watch: Callable[[], None]) -> list[Hello]:
        self._claim(store)
        deadline = time.monotonic() + self._join_s
        found: dict[int, Hello] = {}
        key, text = self._key(self._rank), msgspec.json.encode(self._own).decode()
        store.call(lambda s: s.set(key, text))
        with working(self._doing, shown=self._rank == FEEDER and self._size > 1) as self._say:
            while True:
                for rank in set(range(self._size)) - found.keys():
                    data = store.call(partial(read_if_there, key=self._key(rank)))
                    if data is not None:
                        found[rank] = check_hello(data, self._own, rank)
                if len(found) == self._size:
                    self.unlike = self._compare_operators(store, found, watch, deadline)
                    return [found[rank] for rank in range(self._size)]
                self._wait_on(watch, deadline, found)

    def _wait_on(self, watch: Callable[[], None], deadline: float, found: Collection[int]) -> None:
        """Wait briefly for the other ranks; raises `RunError` naming late ones after the deadline."""
        watch()
        missing = ", ".join(str(rank) for rank in range(self._size) if rank not in found)
        if missing != self._named and time.monotonic() > deadline - self._join_s + self._name_s:
            self._say(f"{self._doing}, waiting for rank {missing}")
            self._named = missing
        if time.monotonic() > deadline:
            raise RunError(
                f"rank {missing} of {self._size} did not join within {self._join_s:.0f} s; start it, or check that it "
                "can reach rank 0"
            )
        time.sleep(_POLL_S)

    def _compare_operators(
        self, store: PatientStore, hellos: Mapping[int, Hello], watch: Callable[[], None], deadline: float
    ) -> dict[int, frozenset[str]]:
        """For each rank with another torch version, return the operators that differ from this process's."""
        if len({hello.torch for hello in hellos.values()}) == 1:
            return {}
        own = marks_of_operators()
        found = {self._rank: own}
        text = msgspec.json.encode(own).decode()
        store.call(lambda s: s.set(f"{self._key(self._rank)}/operators", text))
        while len(found) < self._size:
            for rank in set(range(self._size)) - found.keys():
                data = store.call(partial(read_if_there, key=f"{self._key(rank)}/operators"))
                if data is not None:
                    found[rank] = _read_marks(data, rank, len(own))
            if len(found) < self._size:
                self._wait_on(watch, deadline, found)
        others = {rank: hello for rank, hello in hellos.items() if hello.torch != self._own.torch}
        if self._rank == FEEDER:
            names = ", ".join(f"{hello.name} ({hello.torch})" for hello in others.values())
            note(
                f"these processes run another torch than this one ({self._own.torch}): {names}; results of different "
                "versions may differ in the last bits"
            )
        return {rank: unlike_operators(own, found[rank]) for rank in others}

    def _key(self, rank: int) -> str:
        return f"penstock/{self._prefix}/hello/{rank}"

    def _claim(self, store: PatientStore) -> None:
        """Claim the rank, which must be unique in the run."""
        key, nonce = f"penstock/{self._prefix}/rank/{self._rank}", self._own.nonce
        holder = store.call(lambda s: s.compare_set(key, "", nonce))
        if holder.decode() != nonce:
            raise RunError(
                f"rank {self._rank} is already taken in this run; end the process that is left from an earlier run, or "
                "use another port for this run"
            )


def check_hello(data: bytes, own: Hello, rank: int) -> Hello:
    """Decode the hello of a rank and compare it with this process's; raises `RunError` on a mismatch."""
    try:
        hello = msgspec.json.decode(data, type=Hello)
    except (msgspec.MsgspecError, UnicodeError):
        raise RunError(
            f"rank {rank} runs a different version of penstock (here {__version__}); install the same one everywhere"
        ) from None
    for what, theirs, ours, mend in (
        ("runs penstock {!r}", hello.penstock, own.penstock, "install the same version everywhere"),
        ("was started with {!r} processes", hello.size, own.size, "start every process with the same number"),
        ("belongs to run {!r}", hello.run, own.run, "start every process with the same --rdzv-id"),
        ("announces rank {!r}", hello.rank, rank, "start again"),
    ):
        if theirs != ours:
            raise RunError(
                f"rank {rank} on {hello.host} {what.format(theirs)}, but rank {own.rank} on {own.host} expects "
                f"{ours!r}; {mend}"
            )
    return hello


def _read_marks(data: bytes, rank: int, count: int) -> list[str]:
    try:
        marks = msgspec.json.decode(data, type=list[str])
    except (msgspec.MsgspecError, UnicodeError):
        marks = []
    if len(marks) != count:
        raise RunError(
            f"rank {rank} sent a list of torch operators that cannot be read; install penstock {__version__} there"
        )
    return marks


def host_name() -> str:
    """Return the name of this process's machine, as in plans and messages."""
    return os.environ.get("PENSTOCK_HOST") or socket.gethostname()


def _serve_board(links: Links, address: str, rank: int) -> TCPStore:
    try:
        board = links.serve_store(address)
    except OSError as error:
        raise RunError(
            f"rank {rank} cannot listen on {address} ({error.strerror or error}); choose an address of this machine "
            "with --bind, or PENSTOCK_BIND"
        ) from None
    prepare_board(board, rank)
    return board


def _bandwidth() -> float | None:
    return float(os.environ.get("PENSTOCK_BANDWIDTH") or "0") or None
