"""A pipeline in place, seen from the process that feeds it: put microbatches in, take results out."""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.engine.edges import Inlet, Outlet
from penstock.engine.executor import StageReport, serve
from penstock.engine.jobs import (
    LoadState,
    MakeRuntime,
    StagesJob,
    build_slots,
    feeder_edges,
    load_program,
    send_stages,
    tell_progress,
)
from penstock.engine.layout import copy_exactly
from penstock.engine.messages import CLOSE, DATA, END, Message
from penstock.engine.progress import STALL_S, StallWatch
from penstock.engine.runtime import StageRuntime
from penstock.engine.world import FEEDER, World, check_world
from penstock.errors import ConnectionBroken, PenstockError, RunError, TransportError, UsageError
from penstock.graph.program import StageProgram
from penstock.plan.schedule import forward_only

# Two buffers per cut: one message is being worked on while the next one arrives.
DEPTH = 2
_POLL_S = 0.1
_JOIN_S = 5.0
# stages say how far they are with every heartbeat: what is shorter than a few of these means nothing
_SHORTEST_STALL_BEATS = 4


@dataclass(slots=True)
class StreamReport:
    """Times of one stream, in seconds since its first microbatch was fed, and what each stage did."""

    num_microbatches: int = 0
    num_rows: int = 0
    fill_s: float = 0.0  # until the first result
    fed_s: float = 0.0  # until the last microbatch had been taken in
    total_s: float = 0.0  # until the last result
    results_s: list[float] = field(default_factory=list)
    stages: list[StageReport] = field(default_factory=list)

    @property
    def rows_per_s(self) -> float:
        """Rows over the whole stream, fill and drain included."""
        return self.num_rows / self.total_s if self.total_s else 0.0

    @property
    def steady_rows_per_s(self) -> float:
        """Rows per second from the first result until the last input was taken in; of all of it where that is short."""
        steady = [moment for moment in self.results_s if self.fill_s < moment <= self.fed_s]
        if len(steady) < 2:
            return self.rows_per_s
        return len(steady) * self.num_rows / self.num_microbatches / (steady[-1] - self.fill_s)


Microbatch = tuple[Sequence[Tensor], Mapping[str, int]]


class Deployment:
    """Stages placed on the devices of a world, ready for one stream after the other.

    Raises what happened to a device as `RunError` or `DeviceLost`; after that nothing more can be
    streamed. A message that is lost without any device failing shows when nothing has moved and no
    stage has computed for `stall_s`, while the feeder waits.
    """

    def __init__(
        self, world: World, programs: Sequence[StageProgram], load: LoadState | None, *, sizes: Mapping[str, int],
        threads: int, make: MakeRuntime | None = None, number: int = 0, depth: int = DEPTH, stall_s: float = STALL_S,
    ) -> None:  # fmt: skip
        self.world = world
        self._symbols = programs[0].symbols
        ranks = check_world(world, len(programs))
        self.job = StagesJob(
            number=number, ranks=tuple(ranks), sizes=dict(sizes), depth=depth, threads=threads,
            device_names=tuple(world.names),
        )  # fmt: skip
        self._window = (depth + 1) * len(programs) + depth
        self._executor: threading.Thread | None = None
        self._errors: queue.Queue[BaseException] = queue.Queue()
        self._stream: _Ends | None = None
        shortest_s = _SHORTEST_STALL_BEATS * world.health.beat_s
        self._watch = StallWatch(
            number, [world.names[rank] for rank in ranks], world.health.statuses, max(stall_s, shortest_s)
        )
        try:
            send_stages(world.transport, self.job, programs, load)
            self._local = self._serve_own_stages(programs, make or partial(_load_stage, load))
            self._outlet, self._inlet = feeder_edges(world.transport, self.job, programs[0], programs[-1], self._local)
        except TransportError as error:
            raise world.explain(error) from error
        self.last_report = StreamReport()

    def _serve_own_stages(self, programs: Sequence[StageProgram], make: MakeRuntime) -> Mapping[int, Any]:
        """Under torchrun the feeding process holds stages too; a thread of its own runs them."""
        own = [index for index, rank in enumerate(self.job.ranks) if rank == FEEDER]
        if not own:
            return {}
        runtimes = {index: make(index, programs[index]) for index in own}
        slots, local = build_slots(self.world.transport, self.job, runtimes)
        tell_progress(self.world, self.job, slots)

        def run() -> None:
            torch.set_num_threads(self.job.threads)
            try:
                serve(slots, lambda: forward_only(own))
            except ConnectionBroken:
                pass  # the feeding thread sees the same broken connection and explains it
            except Exception as error:
                self.world.health.report(error)
                self._errors.put(error)

        self._executor = threading.Thread(target=run, name="penstock-stages", daemon=True)
        self._executor.start()
        return local

    def stream(self, microbatches: Iterable[Microbatch]) -> Generator[list[Tensor], None, None]:
        """Feed microbatches and give their results in order; leaving early cancels and drains.

        An exception of `microbatches` itself comes out here once what is under way has been drained;
        the next stream finds the stages ready. Raises `UsageError` while another stream is under way.
        """
        if self._stream is not None:
            raise UsageError("another stream is under way; take all of its results or close() it first")
        source = enumerate(iter(microbatches))
        ends = self._stream = self._open()
        report = self.last_report = StreamReport()
        fed = taken = 0
        exhausted = False
        begin = time.perf_counter()
        try:
            while not exhausted or taken < fed:
                while not exhausted and fed - taken < self._window:
                    following = next(source, None)
                    if following is None:
                        exhausted = True
                        ends.end()
                        break
                    index, (tensors, sizes) = following
                    ends.feed(Message(DATA, index, tuple(sizes[s] for s in self._symbols), list(tensors)))
                    fed += 1
                    report.num_rows += sizes.get("batch", 1)
                    report.fed_s = time.perf_counter() - begin
                if taken < fed:
                    message = ends.result()
                    if message.kind != DATA or message.index != taken:
                        raise TransportError(
                            f"the feeding process expected result {taken} of the last stage, got {message}: a message "
                            f"was lost or repeated; {taken} results are complete, start again behind them"
                        )
                    taken += 1
                    report.results_s.append(time.perf_counter() - begin)
                    report.total_s = report.results_s[-1]
                    report.fill_s = report.results_s[0]
                    report.num_microbatches = taken
                    yield message.tensors
        except TransportError as error:
            self.world.health.report(error)  # the stages are out of step: nothing more can be streamed
            raise
        finally:
            self._stream = None
            report.stages = ends.finish()

    def _open(self) -> "_Ends":
        return _Ends(self.world, self.job, self._outlet, self._inlet, self._errors, self._watch, self._give_up)

    def _give_up(self) -> None:
        """After a failure: end every wait of this process, so that its threads end by themselves."""
        self.world.transport.abort()
        for edge in self._local.values():
            edge.abort()

    def abandon(self) -> None:
        """End at once, whatever is under way; nothing more can be streamed."""
        self._give_up()
        if self._stream is not None:
            self._stream.abandon()
        self._join()

    def close(self) -> None:
        """Tell the stages to stop serving; the world stays. A stream under way is cancelled."""
        try:
            if self._stream is not None:
                self._stream.finish()
            if self.world.health.failure is None:
                ends = self._open()
                ends.stop()
        finally:
            if self.world.health.failure is not None:
                self._give_up()
            self._join()

    def _join(self) -> None:
        if self._executor is not None:
            self._executor.join(_JOIN_S)
            self._executor = None


def _load_stage(load: LoadState | None, _index: int, program: StageProgram) -> StageRuntime:
    if load is None:
        raise UsageError("a deployment needs weights to load, or modules to run; give load or make")
    return load_program(program, load)


class _Ends:
    """The feeder's two ends during one stream, each with a thread that may block, so that the caller never does."""

    def __init__(
        self, world: World, job: StagesJob, outlet: Outlet, inlet: Inlet, errors: "queue.Queue[BaseException]",
        watch: StallWatch, give_up: Callable[[], None],
    ) -> None:  # fmt: skip
        self._world = world
        self._job = job
        self._outlet = outlet
        self._inlet = inlet
        self._errors = errors
        self._watch = watch
        self._give_up = give_up
        self._finished = False
        self._num_fed = 0
        self._ended = False
        self._outgoing: queue.Queue[Message | None] = queue.Queue(1)
        self._results: queue.Queue[Message | BaseException] = queue.Queue()
        self._threads = [
            threading.Thread(target=target, name=f"penstock-{name}", daemon=True)
            for name, target in (("feed", self._send), ("results", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    def feed(self, message: Message) -> None:
        """Hand over a microbatch, waiting while the first stage has enough."""
        self._watch.begin()
        while True:
            self._check()
            try:
                self._outgoing.put(message, timeout=_POLL_S)
            except queue.Full:
                self._check_stall()
                continue
            self._num_fed += 1
            return

    def result(self) -> Message:
        """Wait for the next result."""
        self._watch.begin()
        while True:
            try:
                result = self._results.get(timeout=_POLL_S)
            except queue.Empty:
                self._check()
                self._check_stall()
                continue
            if isinstance(result, TransportError):
                raise self._named(self._world.explain(result)) from result
            if isinstance(result, BaseException):
                raise result
            return result

    def finish(self) -> list[StageReport]:
        """End the stream: results on their way are thrown away, the stages' reports come back with the end."""
        if self._finished:
            return []
        if self._world.health.failure is not None or not self._errors.empty():
            self.abandon()
            return []
        message = self._last(END)
        return [StageReport(**report) for report in json.loads(message.body)]

    def stop(self) -> None:
        """Tell the stages to stop serving, and see that all of them have heard it."""
        self._last(CLOSE)

    def end(self) -> None:
        """Say at once that no more microbatches come: a stage that has missed one then knows."""
        if not self._ended:
            self.feed(Message(END, self._num_fed))
            self._ended = True

    def _last(self, kind: int) -> Message:
        try:
            if kind == END:
                self.end()
            else:
                self.feed(Message(kind))
            while (message := self.result()).kind != kind:
                pass
        except BaseException:
            self.abandon()
            raise
        for thread in self._threads:
            thread.join()
        self._finished = True
        return message

    def abandon(self) -> None:
        """After a failure both threads end by themselves, once nothing waits for other processes any more."""
        self._finished = True
        self._give_up()
        with contextlib.suppress(queue.Full):
            self._outgoing.put_nowait(None)
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _check(self) -> None:
        if self._finished:
            raise UsageError("the pipeline was closed while this stream was under way; make a new one")
        if not self._errors.empty():
            raise self._errors.get()
        try:
            self._world.check()
        except RunError as error:
            raise self._named(error) from None

    def _check_stall(self) -> None:
        stalled = self._watch.check()
        if stalled is not None:
            error = RunError(stalled)
            self._world.health.report(error)
            raise error

    def _named(self, error: PenstockError) -> PenstockError:
        """Say which stages ran where it happened, and what to do."""
        failure = self._world.health.failure
        if failure is None or failure.message != str(error):
            return error
        stages = [str(index) for index, rank in enumerate(self._job.ranks) if rank == failure.rank]
        held = f" (stage {', '.join(stages)})" if stages else ""
        return type(error)(f"{failure.message}{held}; the results until now are complete, start again behind them")

    def _send(self) -> None:
        try:
            while (message := self._outgoing.get()) is not None:
                self._outlet.put(message)
                self._watch.fed += 1
                if message.kind != DATA:
                    return
        except Exception as error:
            self._results.put(error)

    def _take(self) -> Message:
        try:
            return self._inlet.take()
        except ConnectionBroken:
            raise
        except TransportError as error:
            raise TransportError(f"from the last stage to the feeding process: {error}") from error

    def _receive(self) -> None:
        try:
            while True:
                message = self._take()
                kept = Message(
                    message.kind,
                    message.index,
                    message.sizes,
                    [copy_exactly(t) for t in message.tensors],
                    message.body,
                )
                if kept.kind != CLOSE:  # nothing may stay posted behind it
                    self._inlet.release()
                self._watch.got += 1
                self._results.put(kept)
                if kept.kind != DATA:
                    return
        except Exception as error:
            self._results.put(error)
