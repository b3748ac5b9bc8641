"""A pipeline in place, seen from the process that feeds it: put microbatches in, take results out."""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.engine.edges import Inlet, Outlet
from penstock.engine.executor import StageReport, serve
from penstock.engine.jobs import LoadState, StagesJob, build_slots, feeder_edges, load_program, send_stages
from penstock.engine.layout import copy_exactly
from penstock.engine.messages import CLOSE, DATA, END, Message
from penstock.engine.world import FEEDER, World, check_world
from penstock.errors import PenstockError, TransportError
from penstock.graph.program import StageProgram
from penstock.plan.schedule import forward_only

# Two buffers per cut: one message is being worked on while the next one arrives.
DEPTH = 2
_POLL_S = 0.1


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
    streamed.
    """

    def __init__(
        self, world: World, programs: Sequence[StageProgram], load: LoadState, *, sizes: Mapping[str, int],
        threads: int, number: int = 0, depth: int = DEPTH,
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
        try:
            send_stages(world.transport, self.job, programs, load)
            self._local = self._serve_own_stages(programs, load)
            self._outlet, self._inlet = feeder_edges(world.transport, self.job, programs[0], programs[-1], self._local)
        except TransportError as error:
            raise world.explain(error) from error
        self.last_report = StreamReport()

    def _serve_own_stages(self, programs: Sequence[StageProgram], load: LoadState) -> Mapping[int, Any]:
        """Under torchrun the feeding process holds stages too; a thread of its own runs them."""
        own = [index for index, rank in enumerate(self.job.ranks) if rank == FEEDER]
        if not own:
            return {}
        runtimes = {index: load_program(programs[index], load) for index in own}
        slots, local = build_slots(self.world.transport, self.job, runtimes)

        def run() -> None:
            torch.set_num_threads(self.job.threads)
            try:
                serve(slots, lambda: forward_only(own))
            except TransportError:
                pass  # the feeding thread sees the same broken connection and explains it
            except Exception as error:
                self.world.health.report(error)
                self._errors.put(error)

        self._executor = threading.Thread(target=run, name="penstock-stages", daemon=True)
        self._executor.start()
        return local

    def stream(self, microbatches: Iterable[Microbatch]) -> Iterator[list[Tensor]]:
        """Feed microbatches and give their results in order; leaving early cancels and drains."""
        ends = _Ends(self.world, self._outlet, self._inlet, self._errors)
        report = self.last_report = StreamReport()
        source = enumerate(iter(microbatches))
        fed = taken = 0
        exhausted = False
        begin = time.perf_counter()
        try:
            while not exhausted or taken < fed:
                while not exhausted and fed - taken < self._window:
                    following = next(source, None)
                    if following is None:
                        exhausted = True
                        break
                    index, (tensors, sizes) = following
                    ends.feed(Message(DATA, index, tuple(sizes[s] for s in self._symbols), list(tensors)))
                    fed += 1
                    report.num_rows += sizes.get("batch", 1)
                    report.fed_s = time.perf_counter() - begin
                if taken < fed:
                    message = ends.result()
                    if message.index != taken:
                        raise TransportError(f"result {message.index} came where {taken} was due")
                    taken += 1
                    report.results_s.append(time.perf_counter() - begin)
                    report.total_s = report.results_s[-1]
                    report.fill_s = report.results_s[0]
                    report.num_microbatches = taken
                    yield message.tensors
        finally:
            report.stages = ends.finish(fed - taken)

    def close(self) -> None:
        """Tell the stages to stop serving; the world stays."""
        if self.world.health.failure is not None:
            for edge in self._local.values():
                edge.abort()
        else:
            try:
                self._outlet.put(Message(CLOSE))
                while self._inlet.take().kind != CLOSE:
                    pass
            except TransportError as error:
                raise self.world.explain(error) from error
        if self._executor is not None:
            self._executor.join()
            self._executor = None


class _Ends:
    """The feeder's two ends during one stream, each with a thread that may block, so that the caller never does."""

    def __init__(self, world: World, outlet: Outlet, inlet: Inlet, errors: "queue.Queue[BaseException]") -> None:
        self._world = world
        self._outlet = outlet
        self._inlet = inlet
        self._errors = errors
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
        while True:
            try:
                return self._outgoing.put(message, timeout=_POLL_S)
            except queue.Full:
                self._check()

    def result(self) -> Message:
        """Wait for the next result."""
        while True:
            try:
                result = self._results.get(timeout=_POLL_S)
            except queue.Empty:
                self._check()
                continue
            if isinstance(result, TransportError):
                raise self._world.explain(result) from result
            if isinstance(result, BaseException):
                raise result
            return result

    def finish(self, num_waiting: int) -> list[StageReport]:
        """End the stream: results on their way are thrown away, the stages' reports come back with the end."""
        if self._world.health.failure is not None or not self._errors.empty():
            self._abandon()
            return []
        try:
            self.feed(Message(END))
            while (message := self.result()).kind == DATA:
                num_waiting -= 1
        except PenstockError:
            self._abandon()
            raise
        for thread in self._threads:
            thread.join()
        return [StageReport(**report) for report in json.loads(message.body)]

    def _abandon(self) -> None:
        """After a failure the transport is aborted, so both threads end by themselves."""
        self._world.transport.abort()
        for edge in (self._outlet, self._inlet):
            if hasattr(edge, "abort"):
                edge.abort()
        with contextlib.suppress(queue.Full):
            self._outgoing.put_nowait(None)
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _check(self) -> None:
        if not self._errors.empty():
            raise self._errors.get()
        self._world.check()

    def _send(self) -> None:
        try:
            while (message := self._outgoing.get()) is not None:
                self._outlet.put(message)
                if message.kind != DATA:
                    return
        except Exception as error:
            self._results.put(error)

    def _receive(self) -> None:
        try:
            while True:
                message = self._inlet.take()
                kept = Message(
                    message.kind,
                    message.index,
                    message.sizes,
                    [copy_exactly(t) for t in message.tensors],
                    message.body,
                )
                self._inlet.release()
                self._results.put(kept)
                if kept.kind != DATA:
                    return
        except Exception as error:
            self._results.put(error)
