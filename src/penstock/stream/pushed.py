"""A stream fed by `push` calls from any thread instead of an iterator."""

import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from penstock.deploy.deployment import Deployment
from penstock.engine.driver import Microbatch
from penstock.errors import RunError, UsageError
from penstock.graph.call import as_call, bind_inputs, build_output
from penstock.stream.streaming_pipeline import StreamingPipeline
from penstock.tensors import copy_exactly

_LOOK_S = 0.2


@dataclass(slots=True)
class _Pushed:
    microbatch: Microbatch
    future: "Future[Any]" = field(default_factory=Future)


class PushedStream:
    """Streams pushed inputs through a pipeline and completes a future per input; runs in its own thread.

    Use it in the driver, with no other stream in flight. If a device is lost and the pipeline survives that, inputs
    without a result are sent again.

    Example:
        with PushedStream(pipeline) as stream:
            output = stream.push(image).result()
    """

    def __init__(self, pipeline: StreamingPipeline) -> None:
        self._pipeline = pipeline
        self._news = threading.Condition()
        self._waiting: deque[_Pushed] = deque()
        self._fed: deque[_Pushed] = deque()
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-pushed", daemon=True)
        self._thread.start()

    def push(self, item: Any) -> "Future[Any]":
        """Submit one input of `Pipeline.stream`; raises `UsageError` if it does not match the example."""
        tensors, sizes = bind_inputs(self._pipeline.graph, *as_call(item))
        self._pipeline.check_sizes(sizes)
        pushed = _Pushed(([copy_exactly(tensor) for tensor in tensors], sizes))  # the caller may reuse its tensors
        with self._news:
            if self._failure is not None:
                raise RunError(f"the stream has ended: {self._failure}") from self._failure
            if self._closing:
                raise UsageError("the stream is closed; make a new one")
            self._waiting.append(pushed)
            self._news.notify()
        return pushed.future

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the stream, if any."""
        return self._failure

    def close(self) -> None:
        """Finish all pushed inputs and stop the thread."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join()

    def __enter__(self) -> "PushedStream":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._pipeline.run_over_losses(self._stream, lambda: len(self._fed), self._begin_again)
        except Exception as error:  # raised to the callers through their futures
            with self._news:
                self._failure = error
                left = [*self._fed, *self._waiting]
                self._fed.clear()
                self._waiting.clear()
            for pushed in left:
                _answer(pushed, error=error)
            self._pipeline.deployment.abandon()

    def _begin_again(self) -> None:
        with self._news:
            self._waiting.extendleft(reversed(self._fed))
            self._fed.clear()

    def _stream(self) -> None:
        deployment = self._pipeline.deployment
        for pipeline in deployment.pipelines:
            pipeline.begin(self._notify)
        fed = taken = 0
        changes = False
        while self._wait(deployment, fed, taken, changes=changes):
            changes = self._pipeline.wants_change()
            while not changes and self._waiting and deployment.pipeline_of(fed).has_room:
                pushed = self._waiting.popleft()
                self._fed.append(pushed)
                tensors, sizes = pushed.microbatch
                values = [sizes[symbol] for symbol in self._pipeline.graph.symbols]
                deployment.pipeline_of(fed).feed(tensors, values)
                fed += 1
            if taken < fed and deployment.pipeline_of(taken).has_result:
                tensors = deployment.pipeline_of(taken).take()
                taken += 1
                pushed = self._fed.popleft()
                _answer(pushed, build_output(self._pipeline.graph, tensors, pushed.microbatch[1]))
            if changes and taken == fed:
                break
        for pipeline in deployment.pipelines:
            pipeline.finish()

    def _wait(self, deployment: Deployment, fed: int, taken: int, *, changes: bool) -> bool:
        """Wait briefly for an input or a result; return False once closed and drained."""
        with self._news:
            may_feed = self._waiting and not changes and deployment.pipeline_of(fed).has_room
            if may_feed or (taken < fed and deployment.pipeline_of(taken).has_result):
                return True
            if self._closing and not self._waiting and taken == fed:
                return False
            self._news.wait(_LOOK_S)
        if taken < fed:
            deployment.pipeline_of(taken).check()
        return True

    def _notify(self) -> None:
        with self._news:
            self._news.notify()


def _answer(pushed: _Pushed, output: Any = None, error: BaseException | None = None) -> None:
    with suppress(InvalidStateError):  # the caller cancelled the future
        if error is not None:
            pushed.future.set_exception(error)
        else:
            pushed.future.set_result(output)
