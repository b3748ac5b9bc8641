"""All-or-nothing exchanges: each completes on all surviving ranks, or on none.

    C is lost after it has sent its object only to A     A has all objects and forwards C's object to B
    C is lost before it sends its object                 no rank has all objects, so A and B repeat the work

An exchange gathers an object from every rank, as `all_gather_object` does, so one process is at most one exchange ahead
of another. (Birman and Joseph 1987, virtual synchrony: processes that continue from one group to the next have seen the
same messages.)
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from penstock.errors import PenstockError
from penstock.group.regroup import Following
from penstock.group.world import World
from penstock.transport.collectives import all_gather
from penstock.wire import FEEDER

Objects = list[dict[str, Any]]
_NONE = -1  # number of exchanges so far, in a process that has just joined


class Exchanges:
    """One process's exchanges in a run, across its process groups.

    `world` switches to each new group in place. After a switch `changed` is called with a dict {old rank: new rank}.
    `describe` is called on rank 0 and returns a description of the run for newcomers.

    Example:
        exchanges = Exchanges(world)
        told = exchanges.once(lambda: {"loss": compute()})      # None: the group has changed; call again
    """

    def __init__(self, world: World, *, joins: bool = False) -> None:
        self._world, self._transport = world, world.transport
        self._following = Following(world)
        self.inside = False  # True while `once` runs its work, which may exchange objects itself
        self.count = _NONE if joins else 0
        self.last: Objects = []
        self.changed: Callable[[Mapping[int, int]], None] = lambda _ranks: None
        self.describe: Callable[[], dict[str, Any]] = dict
        self.described: Mapping[str, Any] = {}
        self.why, self.ended_s = "", 0.0  # reason and time of the last group's end
        if joins:
            self._meet_first()

    def once(self, work: Callable[[], dict[str, Any]]) -> Objects | None:
        """Run `work` and return the objects of all ranks; None if the group has changed and no rank has all of them.

        Raises the error that ends the run.
        """
        before = self.count
        try:
            with self._world.explained():
                if self._transport.size == 1:
                    # a process alone in its group receives nothing, so no failed receive would tell it that the group
                    # was ended to admit a newcomer
                    self._world.check()
                self.inside = True
                gathered = all_gather(self._transport, work())
        except PenstockError as error:
            self.go_over(error)
            return self.last if self.count > before else None
        finally:
            self.inside = False
        self.count, self.last = before + 1, gathered
        return gathered

    def go_over(self, error: PenstockError) -> None:
        """Switch to the group after the one in which `error` occurred; raises `error` if the run forms none."""
        began_s = time.monotonic()
        while True:
            if error.everywhere:
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
        """Leave the run, which continues without this process, and raise the error."""
        self._world.health.report(error, lost=True)
        raise error

    def close(self) -> None:
        """Stop following new groups."""
        self._following.close()

    def _meet_first(self) -> None:
        """Take part in the first exchange of a group as a newcomer."""
        try:
            with self._world.explained():
                self._meet()
        except PenstockError as error:
            self.go_over(error)

    def _become(self, following: World) -> None:
        old, new = _members(self._world), _members(following)
        ranks = {name: rank for rank, name in enumerate(new)}
        self._world.become(following)
        self.changed({rank: ranks[name] for rank, name in enumerate(old) if name in ranks})

    def _meet(self) -> None:
        """Agree on the last exchange; ranks that missed it receive its objects."""
        first = self._transport.rank == FEEDER
        told = all_gather(self._transport, {"count": self.count, "described": self.describe() if first else None})
        counts = [each["count"] for each in told]
        most = max(counts)
        if min(count for count in counts if count != _NONE) < most:
            giver = counts.index(most)
            mine = self.last if self._transport.rank == giver else None
            self.last = all_gather(self._transport, {"last": mine})[giver]["last"]
        self.count, self.described = most, told[FEEDER]["described"]


def _members(world: World) -> Sequence[str]:
    return world.membership.members if world.membership is not None else ()
