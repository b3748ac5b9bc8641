"""Stall detection: a message was lost if no stage computes and no message moves while all processes are alive."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock.engine.counters import ACTIVATIONS, Counters, Heartbeat, by_stage, read_counters, write_counters
from penstock.engine.observer import Observer
from penstock.engine.placement import Replica
from penstock.engine.wiring import StageLink
from penstock.group.board import Verdict
from penstock.group.calls import describe_wait, find_mismatch
from penstock.group.world import World
from penstock.terminal.live import StageState
from penstock.text import note
from penstock.tracing.record import FEEDER_STAGE
from penstock.wire import FEEDER, NUM_BUFFERS

STALL_S = 60.0
_LOOK_S = 0.5
TELL_S, _TELL_AGAIN_S = 5.0, 60.0  # of waiting for a rank that is outside of all calls
Counted = Mapping[tuple[int, int], Counters]


# the ranks of each stage of one pipeline, with their names; includes the driver's if links end there
Holders = Mapping[int, Mapping[int, str]]


class StallWatch:
    """A watch on the progress of all pipelines, from one process.

    `pipelines` has the holders of each watched pipeline's stages, `links` the links between the stages of each;
    `listen` returns the last heartbeats of all processes. `own` are this process's counters as the driver. No stall is
    reported before `everyone`, a number of processes, has sent a heartbeat.

    Example:
        watch.begin()
        while not arrived(timeout_s=0.1):
            if (stalled := watch.check()) is not None:
                raise RunError(stalled.message)
    """

    def __init__(
        self,
        job: int,
        links: Sequence[StageLink],
        pipelines: Sequence[Holders],
        listen: Callable[[], Iterable[str]],
        stall_s: float = STALL_S,
        *,
        own: Counters | None = None,
        everyone: int = 0,
        advice: str = "start again",
    ) -> None:
        self.stall_s = stall_s
        self._job, self._links, self._pipelines, self._listen = job, links, pipelines, listen
        self._own, self._everyone, self._advice = own, everyone, advice
        self._seen: object = None
        self._since = time.monotonic()

    def begin(self) -> None:
        """Restart the timer, so that time in the user's code does not count."""
        self._since = time.monotonic()

    def check(self) -> Verdict | None:
        """Return a verdict naming the stalled stage once nothing has computed or moved for `stall_s`, else None."""
        heard = read_counters(self._job, self._listen())
        seen = (heard, self._own and (dict(self._own.sent), dict(self._own.taken)))
        still = len(heard) >= self._everyone and not any(each.busy for each in heard)
        if not still or seen != self._seen:
            self._seen = seen
            self._since = time.monotonic()
        if time.monotonic() - self._since < self.stall_s:
            return None
        return self._explain(self._counted(heard))

    def states(self, depth: int) -> list[StageState]:
        """Return the progress of each stage at the last heartbeat; `depth` bounds the messages waiting for one."""
        counted, states = self._counted(read_counters(self._job, self._listen())), []
        for holders in self._pipelines:
            if self._own is not None and self._own.sent_bytes:
                name = f"inputs to {', '.join(holders[0].values())}"
                num_sent, num_bytes = self._own.sent[ACTIVATIONS], self._own.sent_bytes
                states.append(StageState(name, num_sent, 0.0, 0, num_bytes, computes=False))
            for stage in sorted(index for index in holders if index != FEEDER_STAGE):
                waiting = sum(max(0, _backlog(link, holders, counted)) for link in self._links if link.target == stage)
                for rank, name in holders[stage].items():
                    own = counted.get((stage, rank), Counters())
                    queue = min(2 * depth, waiting // len(holders[stage]))
                    states.append(
                        StageState(f"stage {stage} on {name}", own.num_run, own.busy_s, queue, own.sent_bytes)
                    )
        return states

    def _counted(self, heard: Iterable[Heartbeat]) -> Counted:
        counted = by_stage(heard)
        if self._own is not None:
            counted[FEEDER_STAGE, FEEDER] = self._own
        return counted

    def _explain(self, counted: Counted) -> Verdict:
        """Find a stage that waits for a message that was sent; otherwise a stage that has not taken a message."""
        found: list[tuple[bool, Verdict]] = []
        for holders in self._pipelines:
            for stage, ranks in holders.items():
                if silent := [rank for rank in ranks if (stage, rank) not in counted]:
                    return self._verdict(silent[0], _name(stage, holders), "its program and weights")
            for link in self._links:
                if _backlog(link, holders, counted) > 0:
                    waits = [r for r in holders[link.target] if counted[link.target, r].doing == link.kind]
                    sent, taken = (_total(counts, link, holders, counted) for counts in ("sent", "taken"))
                    what = f"{link.kind} {taken + 1} of {sent} that {_name(link.source, holders)} has sent it"
                    rank = next(iter(waits or holders[link.target]))
                    found.append((not waits, self._verdict(rank, _name(link.target, holders), what)))
        if found:
            return min(found, key=lambda pair: pair[0])[1]
        held = "; ".join(_name(stage, holders) for holders in self._pipelines for stage in holders)
        return self._verdict(FEEDER, held, "sums or documents of other ranks")

    def _verdict(self, rank: int, name: str, what: str) -> Verdict:
        message = (
            f"{name} has waited {self.stall_s:g} s for {what}, and nothing computes, so a message was lost; "
            f"{self._advice}, or with LinkOptions(stall_s=N) if one message takes longer than that on the slowest link"
        )
        return Verdict(rank=rank, lost=False, message=message)


def _name(stage: int, holders: Holders) -> str:
    return "the driver" if stage == FEEDER_STAGE else f"stage {stage} on {' and '.join(holders[stage].values())}"


def _total(counts: str, link: StageLink, holders: Holders, counted: Counted) -> int:
    """Return the number of messages that the ranks at one end of a link have sent or taken."""
    stage = link.source if counts == "sent" else link.target
    own = [counted[stage, rank] for rank in holders[stage] if (stage, rank) in counted]
    return sum(getattr(each, counts)[link.kind] for each in own)


def _backlog(link: StageLink, holders: Holders, counted: Counted) -> int:
    """Return the number of a link's messages that were sent but not taken."""
    return _total("sent", link, holders, counted) - _total("taken", link, holders, counted)


class _Waits:
    """Reports that a rank in a call waits for one outside of all calls, which may run the caller's own code."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._seen: list[str] = []
        self._since, self._tell_s = 0.0, TELL_S

    def look(self, beats: Sequence[Heartbeat]) -> None:
        now = time.monotonic()
        seen = [beat.call for beat in beats]
        if seen != self._seen:
            self._seen, self._since, self._tell_s = seen, now, TELL_S
        line = describe_wait({b.rank: b.call for b in beats}, {b.rank: not b.busy for b in beats}, self._names)
        if line is not None and (waited_s := now - self._since) >= self._tell_s:
            note(f"{line}, which has run its own code or loaded data for {waited_s:.0f} s")
            self._tell_s = waited_s + _TELL_AGAIN_S


class TrainingWatch:
    """Reports progress with every heartbeat; on rank 0, a thread detects stalls and reports waits.

    Example:
        watch = TrainingWatch(world, training_links(parts), grid.replicas, observer)
        ...
        watch.close()
    """

    def __init__(
        self,
        world: World,
        links: Sequence[StageLink],
        replicas: Sequence[Replica],
        observer: Observer,
        stall_s: float = STALL_S,
    ) -> None:
        self._health, self._names, transport = world.health, world.names, world.transport
        transport.owner = threading.get_ident()  # whose waits tell whether this process computes
        pipelines = [
            {stage: {rank: world.names[rank]} for stage, rank in enumerate(replica.stages)} for replica in replicas
        ]
        self._watch = StallWatch(
            0,
            links,
            pipelines,
            world.health.statuses,
            stall_s,
            everyone=transport.size,
            advice="continue from a checkpoint",
        )
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        world.health.status = lambda: write_counters(
            0,
            transport.rank,
            observer.counters,
            busy=not transport.waits,
            num_moved=transport.num_moved,
            call=world.health.call,
        )
        if transport.rank == FEEDER and transport.size > 1:
            self._thread = threading.Thread(target=self._look, name="penstock-stall", daemon=True)
            self._thread.start()

    def stage_states(self) -> list[StageState]:
        """Return the progress of each stage at the last heartbeat, for `LiveView`."""
        return self._watch.states(NUM_BUFFERS)

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._health.status = str

    def _look(self) -> None:
        waits = _Waits(self._names)
        while not self._stop.wait(min(_LOOK_S, self._watch.stall_s / 4)) and self._health.watching:
            beats = read_counters(0, self._health.statuses())
            waits.look(beats)
            line = find_mismatch({beat.rank: beat.call for beat in beats}, self._names)
            stalled = self._watch.check() if line is None else Verdict(rank=FEEDER, lost=False, message=line)
            if stalled is not None:
                self._health.announce(stalled)
                return
