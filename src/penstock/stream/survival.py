"""A stream that continues without lost devices and with joining devices: it replans, then migrates.

    a device is lost ──▶ the survivors form a group ──▶ plan ──▶ deploy ──▶ send microbatches without results again
    a device joins or slows down ──▶ drain microbatches in flight ──▶ plan ──▶ deploy ──▶ send the next microbatches

Forward stages keep no state between microbatches, so a result has the same bits on any device. Only the driver yields
results, so each is yielded once and in order.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from torch import Tensor

from penstock.deploy.deployment import Deployment, name_devices
from penstock.deploy.run_options import OnLoss
from penstock.engine.counters import by_stage, read_counters
from penstock.engine.driver import Microbatch
from penstock.engine.observer import StreamReport
from penstock.errors import DeviceLost, OutOfMemory, PenstockError, PlanError, RunError, TransportError
from penstock.group.regroup import regroup, wait_for_newcomers
from penstock.group.world import World
from penstock.spec.plan import Plan
from penstock.stream.replanner import Count, ObservedSpeeds, Replanner
from penstock.tensors import copy_exactly
from penstock.text import note
from penstock.tracing.trace import StreamTrace
from penstock.wire import FEEDER


class Feed:
    """The microbatches of a stream; after a device is lost, first those without a result, then the remaining ones.

    The caller may reuse tensors once a microbatch was sent, so microbatches that may be sent again are copied.
    """

    def __init__(self, source: Iterator[Microbatch]) -> None:
        self._source = source
        self._pending: deque[Microbatch] = deque()
        self.paused = False
        self.fed_s = 0.0

    @property
    def num_pending(self) -> int:
        """Number of microbatches that were sent and have no result."""
        return len(self._pending)

    def done(self) -> Mapping[str, int]:
        """Record a result; return the sizes of its microbatch."""
        return self._pending.popleft()[1]

    def __iter__(self) -> Iterator[Microbatch]:
        yield from list(self._pending)
        while not self.paused and (following := next(self._source, None)) is not None:
            tensors, sizes = following
            self._pending.append(([copy_exactly(tensor) for tensor in tensors], sizes))
            self.fed_s = time.perf_counter()
            yield following


_LOOK_S = 1.0
_ATTEMPTS = 8

# deploys the stages of a plan: (world, plan, rank of each device, number of the first job)
Place = Callable[[World, Plan, Mapping[str, int], int], Deployment]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChange:
    """A placement change during a stream: when, why and how long, microbatches sent again, and the devices afterwards.

    `at_s` is the time from the stream's beginning until the stages were deployed again, `took_s` the time since the
    cause was detected.
    """

    at_s: float
    why: str
    took_s: float
    num_again: int
    devices: tuple[str, ...]
    num_lost: int = 0


class SurvivingDeployment(Deployment):
    """A deployment that survives lost devices: its pipelines are replaced by those of another plan.

    `ranks` has the rank of each device by name. A regroup switches the world to the new group. With `adapts`, a stream
    that was cut without a plan is replanned as soon as the devices' speeds have been observed.

    Example:
        stages = SurvivingDeployment(world, deploy, {"board0": 0, "board1": 1}, replanner, place, options)
        for result in stages.stream(microbatches):
            ...
    """

    def __init__(
        self,
        world: World,
        deploy: Callable[[], Deployment],
        ranks: Mapping[str, int],
        replanner: Replanner,
        place: Place,
        options: OnLoss,
        *,
        adapts: bool = False,
    ) -> None:
        super().__init__(world, ())
        self.changes: list[StreamChange] = []  # changes of the last stream
        self._replanner, self._put, self._options = replanner, place, options
        self._report, self._begin_s = StreamReport(), time.perf_counter()
        members = _members(world)
        self._names = {members[rank]: name for name, rank in ranks.items()}  # also of lost devices
        self._next: tuple[str, Plan | None] = ("", None)  # reason of the next change, and its plan
        self._number = 0
        self._looked_s = time.monotonic()
        self._adapts = adapts
        self._speeds = self._watch_speeds({})
        try:
            self._take(deploy())
        except (DeviceLost, OutOfMemory) as error:
            self.recover(error, 0)

    def _take(self, deployment: Deployment) -> None:
        self.pipelines, self.order = deployment.pipelines, deployment.order
        self._number += len(self.pipelines)

    @property
    def traces(self) -> Sequence[StreamTrace]:
        """Empty: a stream whose devices may change cannot be traced."""
        return ()

    @property
    def last_report(self) -> StreamReport:
        """Times of the last stream, including its changes."""
        return self._report

    def stream(self, microbatches: Iterable[Microbatch]) -> Generator[list[Tensor], None, None]:
        """Stream microbatches and yield their results in order, as `Deployment.stream` does, even if devices are lost.

        Raises `DeviceLost` or `OutOfMemory` if the stream cannot continue.
        """
        feed = Feed(iter(microbatches))
        report = self._report = StreamReport()
        self.changes, self._begin_s = [], time.perf_counter()
        while True:
            try:
                with closing(super().stream(feed)) as results:
                    for result in results:
                        self._count(report, feed.done())
                        yield result
                        feed.paused = feed.paused or self.wants_change()
                report.stages = super().last_report.stages
                report.fed_s = feed.fed_s - self._begin_s
                if not feed.paused:
                    return
                self.change()
            except (DeviceLost, OutOfMemory) as error:
                self.recover(error, feed.num_pending)
            feed.paused = False

    def _count(self, report: StreamReport, sizes: Mapping[str, int]) -> None:
        report.num_rows += sizes.get("batch", 1)
        report.took(time.perf_counter() - self._begin_s)

    def wants_change(self, *, by_speed: bool = True) -> bool:
        """Return True if a device waits to be admitted, or speeds changed enough for another plan; looks once a second.

        The caller then stops feeding, takes the results in flight, and calls `change`.
        """
        if not self.world.followed or time.monotonic() - self._looked_s < _LOOK_S:
            return False
        self._looked_s = time.monotonic()
        if wait_for_newcomers(self.world, 1):
            self._next = "a device has joined", None
            return True
        if not by_speed or not self._speeds.changed():
            return False
        try:
            plan = self._replanner.plan(list(self._ranks()), self._speeds.now())
        except PlanError:  # for example, no memory for another plan: keep the current one
            plan = self._replanner.current
        if plan.pipelines == self._replanner.current.pipelines:
            self._speeds.accept()
            return False
        name, factor = self._speeds.most_changed()
        why = (
            f"{name} computes {factor:.2f} times as fast as before" if factor != 1.0 else "device speeds were measured"
        )
        self._next = why, plan
        return True

    def change(self) -> None:
        """Make the change that `wants_change` found, while nothing is in flight."""
        began_s, (why, plan) = time.perf_counter(), self._next
        speeds = self._speeds.now()
        try:
            self.close()
            if plan is None:
                self.world.dismiss(again=True)
                self._regroup(set())
            self._place(plan or self._replanner.plan(list(self._ranks()), speeds), speeds)
        except (DeviceLost, OutOfMemory, TransportError) as error:
            self.recover(error, 0)
            return
        self._tell(why, began_s)

    def recover(self, error: PenstockError, num_again: int) -> None:
        """Continue without the lost rank; `num_again` microbatches are sent again.

        Raises `DeviceLost`, or the given error, if this is impossible.
        """
        began_s, first, num_lost = time.perf_counter(), error, 0
        speeds = self._speeds.now()
        for _ in range(_ATTEMPTS):
            lost = self._lost()
            if not lost:
                raise first
            num_lost += len(lost)
            self.abandon()
            self._wait_for_others(len(lost), first)
            self._regroup(lost)
            try:
                self._place(self._replanner.plan(list(self._ranks()), speeds), speeds)
            except PlanError as problem:
                raise DeviceLost(
                    f"{_sentence(first)}, and the survivors cannot continue without it: {problem}"
                ) from problem
            except (DeviceLost, OutOfMemory, TransportError):
                continue
            self._tell(_sentence(first), began_s, num_again, num_lost)
            return
        raise first

    def _lost(self) -> set[int]:
        """Return the lost ranks if the stream can continue without them, otherwise an empty set."""
        failure = self.world.health.failure
        if failure is None or failure.rank == FEEDER or not (failure.lost or failure.memory):
            return set()
        return {failure.rank}

    def _wait_for_others(self, num_lost: int, error: PenstockError) -> None:
        """With `on_loss="wait"`, wait until as many devices have joined as were lost."""
        if self._options.action != "wait":
            return
        note(f"{_sentence(error)}; waiting up to {self._options.wait_s:g} s for another device to join")
        if not wait_for_newcomers(self.world, num_lost, self._options.wait_s):
            raise DeviceLost(
                f"{_sentence(error)}; no other device joined within {self._options.wait_s:g} s; start again"
            )

    def _regroup(self, lost: set[int]) -> None:
        """Form another group, in which surviving devices keep their names."""
        self.world.become(regroup(self.world, lost))
        members = _members(self.world)
        taken = {self._names[members[rank]] for rank in self.world.devices if members[rank] in self._names}
        for name, rank in name_devices(self.world).items():
            if members[rank] not in self._names:
                self._names[members[rank]] = name if name not in taken else f"{name}.{members[rank][:6]}"
                taken.add(self._names[members[rank]])

    def _ranks(self) -> dict[str, int]:
        """Return the rank of every device, by its name."""
        members = _members(self.world)
        return {self._names[members[rank]]: rank for rank in self.world.devices}

    def _place(self, plan: Plan, speeds: Mapping[str, float]) -> None:
        """Deploy the stages of a plan that was made for devices of these speeds."""
        self._take(self._put(self.world, plan, self._ranks(), self._number))
        self._replanner.take(plan)
        self._speeds = self._watch_speeds(speeds)

    def _watch_speeds(self, planned: Mapping[str, float]) -> ObservedSpeeds:
        """Watch the speeds of the deployed devices, compared with the speeds that they were planned with."""
        by_rank = {rank: name for name, rank in self._ranks().items()}
        known = {name: planned[name] for name in by_rank.values() if name in planned}

        def count() -> dict[str, Count]:
            found: dict[str, Count] = {}
            for pipeline in self.pipelines:
                heard = read_counters(pipeline.job.number, self.world.health.statuses())
                for (_stage, rank), counters in by_stage(heard).items():
                    found[by_rank[rank]] = Count(counters.needed_s, counters.num_run)
            return found

        # true at the beginning, and after a loss that came before any observation: the plan assumed equal devices
        at_first = self._adapts and len(known) < len(by_rank)
        return ObservedSpeeds(count, self._replanner.seconds, planned=known, at_first=at_first)

    def _tell(self, why: str, began_s: float, num_again: int = 0, num_lost: int = 0) -> None:
        now_s = time.perf_counter()
        devices = self._replanner.current.devices
        change = StreamChange(
            at_s=now_s - self._begin_s,
            why=why,
            took_s=now_s - began_s,
            num_again=num_again,
            devices=devices,
            num_lost=num_lost,
        )
        self.changes.append(change)
        note(f"{why}; continuing on {', '.join(devices)} after {change.took_s:.1f} s")


def _members(world: World) -> tuple[str, ...]:
    if world.membership is None:
        raise RunError(
            "only a run that survives lost devices can form another group; start the run with on_loss='continue'"
        )
    return world.membership.members


def _sentence(error: PenstockError) -> str:
    """Return the message of an error without its advice."""
    return str(error).partition(";")[0]
