"""The driver's ends of a pipeline: feeds microbatches and takes their results; every wait is interruptible."""

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from penstock.engine.channels import LocalChannel, Receiver, Sender
from penstock.engine.counters import ACTIVATIONS, Counters
from penstock.engine.job import StagesJob
from penstock.engine.observer import StageReport, StreamReport
from penstock.engine.stall import StallWatch
from penstock.engine.tracers import FeederTracer
from penstock.engine.wiring import Channels
from penstock.errors import ConnectionBroken, PenstockError, RunError, TransportError, UsageError
from penstock.group.world import World
from penstock.tensors import HOST, copy_exactly
from penstock.tracing.record import FEEDER_STAGE
from penstock.tracing.trace import StreamTrace
from penstock.transport.messages import CLOSE, DATA, END, Message

Microbatch = tuple[Sequence[Tensor], Mapping[str, int]]
_POLL_S = 0.1
# timeout for a thread to end once nothing blocks it
JOIN_S = 5.0


@dataclass(slots=True)
class DeployedPipeline:
    """A pipeline in place, as the driver uses it: ranks, its own ends of it with their counters, stream after stream.

    `stage_bytes` and `cache_bytes` are the bytes of each stage's weights and caches. Microbatches use the programs in
    `order`, which repeats. `window` limits those in flight; `counters` count the driver's sent and taken messages.
    During a stream a thread for each end may block, so the caller never does.
    """

    world: World
    job: StagesJob
    symbols: Sequence[str]
    order: tuple[int, ...]
    stage_bytes: Sequence[int]
    cache_bytes: Sequence[int]
    channels: Channels
    watch: StallWatch
    counters: Counters
    window: int
    tracer: FeederTracer | None = None
    errors: "queue.Queue[BaseException]" = field(default_factory=queue.Queue)  # errors of this process's stages
    executor: threading.Thread | None = None  # runs this process's stages, if any
    report: StreamReport = field(default_factory=StreamReport)  # report on the last stream
    traces: Sequence[StreamTrace] = field(default_factory=list)  # traces of its processes, if recorded

    # of the running stream
    num_fed: int = field(default=0, init=False)
    num_taken: int = field(default=0, init=False)
    _running: bool = field(default=False, init=False)
    _finished: bool = field(default=False, init=False)
    _ended: bool = field(default=False, init=False)
    _copies: bool = field(default=True, init=False)
    _entry: LocalChannel = field(default_factory=lambda: LocalChannel(1), init=False)
    _results: "queue.SimpleQueue[Message | BaseException]" = field(default_factory=queue.SimpleQueue, init=False)
    _heard: Callable[[], object] | None = field(default=None, init=False)
    _threads: list[threading.Thread] = field(default_factory=list, init=False)

    def begin(self, heard: Callable[[], object] | None = None, *, on_host: bool = True) -> None:
        """Start a stream; the receiving thread calls `heard` after each result.

        Results are copied to the host; without `on_host`, those of a last stage in this process stay on its device.
        Raises `UsageError` while another stream is running.
        """
        if self._running:
            raise UsageError("another stream is running; take all of its results or close() it first")
        self._running, self._heard = True, heard
        self._copies = on_host or not isinstance(self._receiver, LocalChannel)  # else the last stage copied them
        self._start()

    def _start(self) -> None:
        self.num_fed = self.num_taken = 0
        self._finished = self._ended = False
        self._results = queue.SimpleQueue()
        targets = {"results": self._receive}
        if isinstance(self._sender, LocalChannel):
            self._entry = self._sender  # the first stage is in this process: nothing blocks permanently
        else:
            self._entry = LocalChannel(1)
            targets["feed"] = self._send
        self._threads = [
            threading.Thread(target=target, name=f"penstock-{name}", daemon=True) for name, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def _sender(self) -> Sender:
        return self.channels.senders[FEEDER_STAGE, ACTIVATIONS]

    @property
    def _receiver(self) -> Receiver:
        return self.channels.receivers[FEEDER_STAGE, ACTIVATIONS]

    @property
    def has_room(self) -> bool:
        """True if the pipeline has room for another microbatch."""
        return self.num_fed - self.num_taken < self.window

    @property
    def has_result(self) -> bool:
        """True if a result is available."""
        return not self._results.empty()

    def check(self) -> None:
        """Raise a failure or a stall, for a caller that waits for results outside of `take`."""
        self._check()
        self._check_stall()

    def feed(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Send a microbatch, for the program whose turn it is; waits while the first stage has no room."""
        order = self.order
        program = order[self.num_fed % len(order)]
        self._hand_over(Message(DATA, self.num_fed, tuple(sizes), list(tensors), program=program))
        self.num_fed += 1

    def take(self) -> list[Tensor]:
        """Wait for the next result."""
        message = self._result()
        if message.kind != DATA or message.index != self.num_taken:
            raise TransportError(
                f"the driver expected result {self.num_taken} of the last stage, got {message}: a message "
                f"was lost or repeated; {self.num_taken} results are complete, start again after them"
            )
        self.num_taken += 1
        return message.tensors

    def end(self) -> None:
        """Send the end of the stream immediately, so that a stage detects a missed microbatch."""
        if not self._ended:
            self._hand_over(Message(END, self.num_fed))
            self._ended = True

    def finish(self) -> list[StageReport]:
        """End the running stream and discard results in flight; returns the stages' reports, which END carries."""
        running, self._running = self._running, False
        if not running or self._finished:
            return []
        if self.world.health.failure is not None or not self.errors.empty():
            self.abandon()
            return []
        message = self._last(END)
        if self.tracer is not None:
            try:
                self.traces = self.tracer.gather(self.job.holders)
            except TransportError as error:
                self.world.raise_cause(error)
        # a stage shared by devices has a report from each device, in order
        return sorted((StageReport(**report) for report in json.loads(message.body)), key=lambda report: report.stage)

    def stop(self) -> None:
        """Close the stages, and wait until all of them have received the CLOSE message."""
        self._start()
        self._last(CLOSE)

    def give_up(self) -> None:
        """Abort every wait of this process after a failure, so that its threads end."""
        self.world.transport.abort()
        self.channels.abort()

    def abandon(self) -> None:
        """Abort all waits after a failure, and wait for both threads to end."""
        self._finished = True
        self.give_up()
        self._entry.abort()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _last(self, kind: int) -> Message:
        try:
            if kind == END:
                self.end()
            else:
                self._hand_over(Message(kind))
            while (message := self._result()).kind != kind:
                pass
        except BaseException:
            self.abandon()
            raise
        for thread in self._threads:
            thread.join()
        self._finished = True
        return message

    def _hand_over(self, message: Message) -> None:
        self.watch.begin()
        while True:
            self._check()
            if self._entry.offer(message, _POLL_S):
                break
            self._check_stall()
        if self._entry is self._sender:
            self.counters.sent[ACTIVATIONS] += 1

    def _result(self) -> Message:
        self.watch.begin()
        while True:
            try:
                result = self._results.get(timeout=_POLL_S)
            except queue.Empty:
                self._check()
                self._check_stall()
                continue
            if isinstance(result, TransportError):
                raise self._named(self.world.explain(result)) from result
            if isinstance(result, BaseException):
                raise result
            return result

    def _check(self) -> None:
        if self._finished:
            raise UsageError("the pipeline was closed during this stream; create a new one")
        if not self.errors.empty():
            raise self.errors.get()
        try:
            self.world.check()
        except RunError as error:
            raise self._named(error) from None

    def _check_stall(self) -> None:
        stalled = self.watch.check()
        if stalled is not None:
            error = RunError(stalled.message)
            self.world.health.report(error)
            raise error

    def _named(self, error: PenstockError) -> PenstockError:
        """Add the failed rank's stages and the next step to an error."""
        failure = self.world.health.failure
        if failure is None or failure.message != str(error):
            return error
        stages = [str(index) for index in self.job.stages_of(failure.rank)]
        held = f" (stage {', '.join(stages)})" if stages else ""
        return type(error)(f"{failure.message}{held}; the results so far are complete, start again after them")

    def _send(self) -> None:
        try:
            while True:
                message = self._entry.take()
                self.counters.sent_bytes += self._sender.put(message)
                self.counters.sent[ACTIVATIONS] += 1
                if message.kind != DATA:
                    return
        except Exception as error:
            self._results.put(error)

    def _receive(self) -> None:
        self.counters.doing = ACTIVATIONS
        try:
            while True:
                message = self._take()
                kept = message
                if self._copies:
                    kept = replace(message, tensors=[copy_exactly(tensor, HOST) for tensor in message.tensors])
                if kept.kind != CLOSE:  # no receive may stay posted after CLOSE
                    self._receiver.release()
                self.counters.taken[ACTIVATIONS] += 1
                self._results.put(kept)
                if self._heard is not None:
                    self._heard()
                if kept.kind != DATA:
                    return
        except Exception as error:
            self._results.put(error)

    def _take(self) -> Message:
        try:
            return self._receiver.take()
        except ConnectionBroken:
            raise
        except TransportError as error:
            raise TransportError(f"from the last stage to the driver: {error}") from error
