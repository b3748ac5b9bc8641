"""What processes tell each other while some are lost: each exchange is complete for all who are left, or for none.

    a ── work ── tells ──▶ has all     goes on to the next one, which fails: the group has changed
    b ── work ── tells ──▶ c is lost   the group has changed: a has what b lacks, and gives it
    c ── work ──  ✗                    nobody has it: all who are left do the work again

An exchange needs everybody, so one process is at most one exchange ahead of another. (Birman and Joseph 1987, virtual
synchrony: who goes on from one group to the next has seen the same messages.)
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from penstock.errors import PenstockError
from penstock.group.following import Following
from penstock.group.world import World
from penstock.transport.base import FEEDER
from penstock.transport.collectives import all_gather
from penstock.transport.metered import MeteredTransport

Documents = list[dict[str, Any]]
_NONE = -1  # exchanges of a process that has only just come


class Exchanges:
    """One process's part in the exchanges of a run, in one group after the other.

    `world` becomes each group, and `outer`, which is the same with the transport as it was made. `changed` is called
    with the new rank of each old one that is left, `describe` on the first process for those that come.

    Example:
        exchanges = Exchanges(world, outer)
        told = exchanges.once(lambda: {"loss": compute()})      # None: the group has changed, so do it again
    """

    def __init__(self, world: World, outer: World, *, joins: bool = False) -> None:
        if not isinstance(world.transport, MeteredTransport):
            raise TypeError("a training's transport is metered, so that it can become another group's")
        self._world, self._outer, self._transport = world, outer, world.transport
        self._following = Following(outer)
        self.count = _NONE if joins else 0
        self.last: Documents = []
        self.changed: Callable[[Mapping[int, int]], None] = lambda _ranks: None
        self.describe: Callable[[], dict[str, Any]] = dict
        self.described: Mapping[str, Any] = {}
        self.why, self.ended_s = "", 0.0  # the last group
        if joins:
            self._meet_first()

    def once(self, work: Callable[[], dict[str, Any]]) -> Documents | None:
        """Work, and return what all processes tell of it; None where the group has changed and nobody has that.

        Raises what keeps the run from going on.
        """
        before = self.count
        try:
            with self._world.explained():
                documents = all_gather(self._transport, work())
        except PenstockError as error:
            self.go_over(error)
            return self.last if self.count > before else None
        self.count, self.last = before + 1, documents
        return documents

    def go_over(self, error: PenstockError) -> None:
        """Go over to the group that follows the one in which an error came up; raises the error where none does."""
        began_s = time.monotonic()
        while True:
            if getattr(error, "everywhere", False):
                raise error
            following = self._following.newest(error)
            if following.membership is self._world.membership:
                raise error
            self.why, self.ended_s = str(error).partition(";")[0], began_s
            self._become(following)
            try:
                with self._world.explained():
                    self._meet()
            except PenstockError as problem:
                error = problem
                continue
            return

    def leave(self, error: PenstockError) -> NoReturn:
        """Leave the run, which goes on without this process, and raise why."""
        self._world.health.report(error, lost=True)
        raise error

    def close(self) -> None:
        """Go over to no other group."""
        self._following.close()

    def _meet_first(self) -> None:
        """Meet a group as one that has just come."""
        try:
            with self._world.explained():
                self._meet()
        except PenstockError as error:
            self.go_over(error)

    def _become(self, following: World) -> None:
        old, new = _members(self._world), _members(following)
        places = {name: rank for rank, name in enumerate(new)}
        for world in (self._outer, self._world):
            world.become(following)
        self._transport.become(following.transport)
        self._world.transport = self._transport
        self.changed({rank: places[name] for rank, name in enumerate(old) if name in places})

    def _meet(self) -> None:
        """Come to be as far as the others: who is one exchange behind gets what it lacks."""
        first = self._transport.rank == FEEDER
        told = all_gather(self._transport, {"count": self.count, "described": self.describe() if first else None})
        counts = [document["count"] for document in told]
        most = max(counts)
        if min(count for count in counts if count != _NONE) < most:
            giver = counts.index(most)
            mine = self.last if self._transport.rank == giver else None
            self.last = all_gather(self._transport, {"last": mine})[giver]["last"]
        self.count, self.described = most, told[FEEDER]["described"]


def _members(world: World) -> Sequence[str]:
    return world.membership.members if world.membership is not None else ()
