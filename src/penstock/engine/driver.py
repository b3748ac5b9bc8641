"""The feeding process's two ends of a pipeline, with every wait interruptible."""

import json
import queue
import threading
from collections.abc import Callable

from penstock.engine.channels import Inlet, LocalEdge, Outlet
from penstock.engine.counters import StallWatch
from penstock.engine.executor import StageReport
from penstock.engine.placement import StagesJob
from penstock.errors import ConnectionBroken, PenstockError, RunError, TransportError, UsageError
from penstock.group.world import World
from penstock.tensors.devices import HOST
from penstock.tensors.layout import copy_exactly
from penstock.transport.messages import CLOSE, DATA, END, Message

_POLL_S = 0.1
# how long a thread that nothing holds up any more may take to end
JOIN_S = 5.0


class Ends:
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
        self._results: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        targets = {"results": self._receive}
        if isinstance(outlet, LocalEdge):
            self._entry = outlet  # the first stage is in this process: nothing blocks for good
        else:
            self._entry = LocalEdge(1)
            targets["feed"] = self._send
        self._threads = [
            threading.Thread(target=target, name=f"penstock-{name}", daemon=True) for name, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    def feed(self, message: Message) -> None:
        """Hand over a microbatch, waiting while the first stage has enough."""
        self._watch.begin()
        while True:
            self._check()
            if self._entry.offer(message, _POLL_S):
                break
            self._check_stall()
        self._num_fed += 1
        if self._entry is self._outlet:
            self._watch.fed += 1

    @property
    def has_result(self) -> bool:
        """Whether a result waits to be taken."""
        return not self._results.empty()

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
        # a stage that devices share has one of each, in the order of its devices
        return sorted((StageReport(**report) for report in json.loads(message.body)), key=lambda report: report.stage)

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
        self._entry.abort()
        for thread in self._threads:
            thread.join(JOIN_S)

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
        stages = [str(index) for index in self._job.stages_of(failure.rank)]
        held = f" (stage {', '.join(stages)})" if stages else ""
        return type(error)(f"{failure.message}{held}; the results until now are complete, start again behind them")

    def _send(self) -> None:
        try:
            while True:
                message = self._entry.take()
                self._outlet.put(message)
                self._watch.fed += 1 if message.kind == DATA else self._outlet.width
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
                    [copy_exactly(t, HOST) for t in message.tensors],
                    message.body,
                )
                if kept.kind != CLOSE:  # nothing may stay posted behind it
                    self._inlet.release()
                self._watch.got += 1 if kept.kind == DATA else self._inlet.width
                self._results.put(kept)
                if kept.kind != DATA:
                    return
        except Exception as error:
            self._results.put(error)
