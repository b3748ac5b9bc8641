"""Observation of a process's running stages: counters, times, spans, and microbatches kept for a baseline run."""

import contextlib
import json
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from penstock.engine.counters import COMPUTING, Counters
from penstock.engine.reference import measure_baseline
from penstock.engine.stages import ForwardStage
from penstock.plan.schedule.schedules import Action
from penstock.resources import cpu_quota
from penstock.tensors import copy_exactly, held_bytes, mark, synchronize
from penstock.tracing.record import KEPT_BYTES, Clock, Recorder
from penstock.tracing.trace import Alone
from penstock.transport.messages import DATA, END, Message

_QUOTA_S = 1.0  # interval between reads of a quota
# the window starts after the first microbatches, which allocate buffers, and is short, since profiling slows the stream
FIRST, COUNT = 2, 4
MAX_OPERATIONS = 20_000
_MARK = "penstock: the recorder's clock"
# torch has one profiler per process, but a process may run stages in several threads
_BUSY = threading.Lock()


@dataclass(slots=True)
class StageSeconds:
    """Time breakdown of one stage since the last `Observer.begin`."""

    num_microbatches: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    compute_cpu_s: float = 0.0  # CPU time of the computing thread
    wait_s: float = 0.0  # waiting for messages, except the first
    fill_s: float = 0.0  # waiting for the first message, while the pipeline fills
    send_s: float = 0.0


class Observer:
    """Counters and times of one process's stages, recorded as spans if `recorder` is set.

    The executor reports each event as it occurs. `between` also records the CPU time between computations.

    Example:
        observer = Observer([0, 1])
        run_schedule(actions, stages, channels, observer)
        print(observer.counters[0].num_run, observer.seconds[0].forward_s)
    """

    between = False

    def __init__(self, stages: Iterable[int], clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.counters = {index: Counters() for index in stages}
        self.seconds = {index: StageSeconds() for index in self.counters}
        self.recorder: Recorder | None = None
        self.profile: ProfileWindow | None = None
        self._since = self._since_cpu_s = 0.0  # begin of the current phase
        self._quota, self._quota_s = 1.0, -math.inf  # the quota, and the time at which it was last read
        # computations that a device may not have finished: their events, and what takes their begin and end
        self._queued: deque[tuple[Any, Any, Callable[[float, float], None]]] = deque()
        self._zero: tuple[Any, float] | None = None  # an event, and its time on the clock, of a recorded stream
        self._computed: dict[int, tuple[float, float]] = {}  # end of each stage's last computation: time, CPU time

    def _cores(self, now_s: float) -> float:
        """Return this process's current CPU quota in cores, at most one, since one thread computes."""
        if now_s - self._quota_s > _QUOTA_S:
            self._quota, self._quota_s = min(1.0, cpu_quota() or 1.0), now_s
        return self._quota

    def begin(self) -> None:
        """Reset the times for another stream or step."""
        self.seconds = {index: StageSeconds() for index in self.counters}
        self._zero = None

    def starts(self, action: Action, awaits: str | None) -> None:
        """Record the start of an action, and the kind of message that the action waits for, if any."""
        self.counters[action.stage].doing = awaits or COMPUTING
        self._since, self._since_cpu_s = self.clock(), time.thread_time()

    def took(self, action: Action, kind: str, _message: Message) -> None:
        """Record the arrival of an action's message."""
        counters, seconds, now_s = self.counters[action.stage], self.seconds[action.stage], self.clock()
        counters.taken[kind] += 1
        counters.doing = COMPUTING
        if seconds.num_microbatches:
            seconds.wait_s += now_s - self._since
        else:
            seconds.fill_s += now_s - self._since
        self._since, self._since_cpu_s = now_s, time.thread_time()

    @contextlib.contextmanager
    def computing(self, action: Action, device: torch.device, *, shared: bool) -> Iterator[None]:
        """Record the computation in the block, profiled if enabled.

        At the end a device has finished it if it is profiled, or `shared`: another process's device sends what it reads
        or receives what it writes. Otherwise the next action is queued behind it, and events tell its time later:

            host      F0 ─ F1 ─ B1 ─ B0 ─────────▶
            device      [  F0  ][  F1  ][ B1 ][ B0 ]
        """
        window = self.profile if self.recorder is not None else None
        if self.recorder is not None and self._zero is None and (zero := mark(device)) is not None:
            zero.synchronize()
            self._zero = zero, self.clock()
        begin = mark(device) if window is None and not shared else None
        with contextlib.nullcontext() if window is None else window.around(action.stage, action.microbatch):
            yield
            if begin is None:
                synchronize(device)
        counters, seconds = self.counters[action.stage], self.seconds[action.stage]
        now_s, now_cpu_s = self.clock(), time.thread_time()
        cpu_s = now_cpu_s - self._since_cpu_s
        if action.kind == "F":
            seconds.num_microbatches += 1
        seconds.compute_cpu_s += cpu_s
        counters.num_run += 1
        counters.doing = ""
        if self.recorder is not None:
            self._record_between(self.recorder, action)
            self.recorder.sample(now_s)
        add = partial(self._add, action, seconds, cpu_s, self._cores(now_s))
        if begin is None:
            add(self._since, now_s)
        else:
            self._queued.append((begin, mark(device), add))
            self.settle(wait=False)
        self._computed[action.stage] = now_s, now_cpu_s
        self._since, self._since_cpu_s = now_s, now_cpu_s

    def settle(self, *, wait: bool = True) -> None:
        """Add the times of computations that a device has finished; wait for those that it has not."""
        while self._queued and (wait or self._queued[0][1].query()):
            begin, end, add = self._queued.popleft()
            end.synchronize()
            zero, zero_s = self._zero or (begin, 0.0)
            begin_s = zero_s + zero.elapsed_time(begin) / 1e3
            add(begin_s, begin_s + begin.elapsed_time(end) / 1e3)

    def _add(
        self, action: Action, seconds: StageSeconds, cpu_s: float, cores: float, begin_s: float, end_s: float
    ) -> None:
        """Add the time of a computation, which is known once the device has finished it."""
        counters, took_s = self.counters[action.stage], end_s - begin_s
        if action.kind == "F":
            seconds.forward_s += took_s
        else:
            seconds.backward_s += took_s
        counters.busy_s += took_s
        counters.needed_s += max(took_s, cpu_s / cores)
        if self.recorder is not None:
            self.recorder.span("compute", action.stage, action.microbatch, begin_s, end_s, action.kind, cpu_s=cpu_s)

    def _record_between(self, recorder: Recorder, action: Action) -> None:
        if self.between and action.microbatch and action.stage in self._computed:
            before_s, before_cpu_s = self._computed[action.stage]
            between_s = self._since_cpu_s - before_cpu_s
            recorder.span("between", action.stage, action.microbatch, before_s, self._since, cpu_s=between_s)

    def sends(self, action: Action, begin_s: float | None = None) -> None:
        """Record that an action's output was being sent since `begin_s`, or since what was recorded last."""
        now_s = self.clock()
        self.seconds[action.stage].send_s += now_s - (self._since if begin_s is None else begin_s)
        self._since, self._since_cpu_s = now_s, time.thread_time()

    def sent(self, action: Action, kind: str, *, num_bytes: int = 0, begin_s: float | None = None) -> None:
        """Record that an action's output, or the end of a stream, was sent."""
        self.counters[action.stage].sent[kind] += 1
        self.counters[action.stage].sent_bytes += num_bytes
        self.sends(action, begin_s)

    def ended(self, action: Action, message: Message) -> bytes:
        """Record the end of a stream at a stage; returns the body of the END message to forward."""
        self.settle()
        self.counters[action.stage].num_run += 1
        self.counters[action.stage].doing = ""
        return message.body


@dataclass(slots=True)
class StageReport:
    """One stage's report on one stream, in seconds.

    `compute_cpu_s` is CPU time of the computing thread during `compute_s`; if lower than `compute_s`, another thread or
    process used the core. `cpu_s` is CPU time of the whole process during the stream. `memory_bytes` is the memory that
    the process held (on its GPU, if any) after the stage's last microbatch (see `held_bytes`).
    """

    stage: int
    device: str
    num_microbatches: int = 0
    compute_s: float = 0.0
    compute_cpu_s: float = 0.0
    cpu_s: float = 0.0
    wait_s: float = 0.0
    send_s: float = 0.0
    memory_bytes: float | None = None


@dataclass(slots=True)
class StreamReport:
    """Times of one stream, in seconds since its first microbatch was fed, and the stages' reports."""

    num_microbatches: int = 0
    num_rows: int = 0
    fill_s: float = 0.0  # until the first result
    fed_s: float = 0.0  # until the last microbatch was accepted
    total_s: float = 0.0  # until the last result
    results_s: list[float] = field(default_factory=list)
    stages: list[StageReport] = field(default_factory=list)

    def took(self, at_s: float) -> None:
        """Record a result that arrived `at_s` after the first microbatch was fed."""
        self.results_s.append(at_s)
        self.num_microbatches = len(self.results_s)
        self.total_s, self.fill_s = at_s, self.results_s[0]

    @property
    def rows_per_s(self) -> float:
        """Rows per second over the whole stream, including fill and drain."""
        return self.num_rows / self.total_s if self.total_s else 0.0

    @property
    def steady_rows_per_s(self) -> float:
        """Rows per second from the first result to the last accepted input; for short streams, of the whole stream."""
        steady = [moment for moment in self.results_s if self.fill_s < moment <= self.fed_s]
        if len(steady) < 2:
            return self.rows_per_s
        return len(steady) * self.num_rows / self.num_microbatches / (steady[-1] - self.fill_s)


class StreamObserver(Observer):
    """An observer of a stream's stages: each stage adds its report to the END message, and measures a baseline.

    `others` is the number of other stages of the model.
    """

    between = True

    def __init__(
        self, stages: Mapping[int, ForwardStage], device_name: str, others: int, clock: Clock = time.perf_counter
    ) -> None:
        super().__init__(stages, clock)
        self._stages, self._device_name, self._others = stages, device_name, others
        self._began_cpu_s: dict[int, float] = {}
        self.kept: dict[int, dict[int, Message]] = {}  # first message by stage and program
        self.num_run: dict[int, Counter[int]] = {}  # microbatches by stage and program
        self.alone: dict[int, Alone] = {}
        self.forget()

    def took(self, action: Action, kind: str, message: Message) -> None:
        """Record the arrival of an action's message; keep the first message of each program."""
        super().took(action, kind, message)
        if message.kind == DATA:
            if not self.seconds[action.stage].num_microbatches:
                self._began_cpu_s[action.stage] = time.process_time()
            if self.recorder is not None:
                self.keep(action.stage, message)

    def keep(self, stage: int, message: Message) -> None:
        """Keep a microbatch of each program for the baseline, within a memory limit for all of them."""
        kept = self.kept[stage]
        self.num_run[stage][message.program] += 1
        if message.program in kept:
            return
        num_bytes = sum(tensor.nbytes for tensor in message.tensors)
        before = sum(tensor.nbytes for each in kept.values() for tensor in each.tensors)
        if not kept or before + num_bytes <= KEPT_BYTES:
            tensors = [copy_exactly(tensor, self._stages[stage].device) for tensor in message.tensors]
            kept[message.program] = replace(message, tensors=tensors)

    def ended(self, action: Action, message: Message) -> bytes:
        """Record the end of a stream at a stage, and add its report."""
        index, stage = action.stage, self._stages[action.stage]
        body = message.body
        self.settle()
        if message.kind == END:
            body = json.dumps([*json.loads(message.body or b"[]"), asdict(self._report(index))]).encode()
            if self.kept[index] and self.seconds[index].num_microbatches:
                self.alone[index] = measure_baseline(
                    index, stage.runtimes, self.kept[index], self.num_run[index], others=self._others
                )
        super().ended(action, message)
        return body

    def _report(self, index: int) -> StageReport:
        seconds = self.seconds[index]
        report = StageReport(
            index,
            self._device_name,
            seconds.num_microbatches,
            seconds.forward_s,
            seconds.compute_cpu_s,
            wait_s=seconds.wait_s,
            send_s=seconds.send_s,
        )
        if seconds.num_microbatches:
            report.cpu_s = time.process_time() - self._began_cpu_s[index]
            report.memory_bytes = held_bytes(self._stages[index].device)
        return report

    def forget(self) -> None:
        """Drop kept microbatches and measurements, for another stream."""
        self.kept = {index: {} for index in self._stages}
        self.num_run = {index: Counter() for index in self._stages}
        self.alone = {}


class ProfileWindow:
    """Profiles the blocks inside `around` for a window of microbatches, and writes the operations to a recorder.

    The profiler has a separate clock; a mark, made at a known time of the recorder's clock, aligns both clocks.

    Example:
        window = ProfileWindow(recorder)
        with window.around(stage=0, microbatch=2):
            runtime(sizes, inputs)
    """

    def __init__(self, recorder: Recorder, *, first: int = FIRST, count: int = COUNT, by_step: bool = False) -> None:
        self._recorder = recorder
        self._window = range(first, first + count)
        self._by_step = by_step
        self._room = MAX_OPERATIONS

    @contextlib.contextmanager
    def around(self, stage: int, microbatch: int) -> Iterator[None]:
        """Profile the block if its microbatch is in the window, or its step with `by_step`."""
        inside = (self._recorder.step if self._by_step else microbatch) in self._window and self._room > 0
        if not inside or not _BUSY.acquire(blocking=False):
            yield
            return
        try:
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as profiler:
                at_s = self._recorder.clock()
                with record_function(_MARK):
                    pass
                yield
            self._keep(profiler, stage, microbatch, at_s)
        finally:
            _BUSY.release()

    def _keep(self, profiler: profile, stage: int, microbatch: int, at_s: float) -> None:
        events = list(profiler.events() or ())
        marked = next((event.time_range.start for event in events if event.name == _MARK), None)
        for event in events:
            if marked is None or event.name == _MARK or self._room <= 0:
                continue
            self._room -= 1
            begin_s, end_s = (at_s + (us - marked) / 1e6 for us in (event.time_range.start, event.time_range.end))
            shapes = " ".join("x".join(map(str, shape)) for shape in event.input_shapes or () if shape)
            self._recorder.span(
                "profile", stage, microbatch, begin_s, end_s, event.name, max(0, event.cpu_memory_usage), detail=shapes
            )
