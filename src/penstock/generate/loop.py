"""The thread that feeds the stages and samples tokens; steps as microbatches; the record of a traced stream."""

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.engine.driver import JOIN_S, DeployedPipeline
from penstock.engine.observer import StageReport, StreamReport
from penstock.engine.tracers import FeederTracer
from penstock.errors import PenstockError, RunError, UsageError
from penstock.generate.lanes import Guesser, Lanes, SequenceState, Step, room_of
from penstock.generate.request import Request
from penstock.generate.sampling import Likely, drawn, most_likely
from penstock.graph.call import bind_inputs, build_output
from penstock.graph.graph import Graph
from penstock.group.world import failed
from penstock.runtime.registry import RUNTIMES
from penstock.stream.streaming_pipeline import StreamingPipeline
from penstock.tensors import HOST
from penstock.tracing.trace import GenerationFacts, RequestTimes

_LOOK_S = 1.0  # how often to look for joining devices while idle
_VOCABULARY = 4  # tokens that every model has


class GenerationLoop:
    """Requests in flight on a pipeline's stages, served by a background thread until `end`.

    Example:
        loop = GenerationLoop(pipeline, Lanes(num_lanes=3, num_used=2, slots=4, chunk=32))
        loop.take(request)
        request.result()
    """

    def __init__(
        self, pipeline: StreamingPipeline, lanes: Lanes, *, speculates: bool = True, device: torch.device = HOST
    ) -> None:
        self._device = device
        self._pipeline, self._lanes, self._speculates = pipeline, lanes, speculates and not lanes.recurrent
        self._microbatches = Microbatches(pipeline.graph)
        self._condition = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._requests: dict[SequenceState, Request] = {}
        self._closing = False
        self._record: GenerationRecord | None = None  # set if the stream is traced
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-generator", daemon=True)
        self._thread.start()
        # runs before the pipeline's own handler, which closes the stages
        self._process = os.getpid()
        atexit.register(self._leave)

    def take(self, request: Request) -> None:
        """Enqueue a request; raises `RunError` once the loop has failed, and `UsageError` once it is closed."""
        with self._condition:
            if self._failure is not None:
                raise RunError(f"the generator has ended: {self._failure}") from self._failure
            if self._closing:
                raise UsageError("the generator is closed; make a new one")
            self._waiting.append(request)
            self._condition.notify_all()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended all requests, if any."""
        return self._failure

    @property
    def num_guesses(self) -> tuple[int, int]:
        """Number of draft tokens, and of the accepted ones."""
        return self._lanes.num_guesses, self._lanes.num_right

    def end(self) -> None:
        """Finish requests in flight, fail waiting ones, and join the thread."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()  # every wait in the thread has a deadline

    def _leave(self) -> None:
        """Stop at interpreter exit, with requests still in flight; after an error the pipeline's own handler aborts."""
        if os.getpid() != self._process or failed() is not None:
            return
        with self._condition:
            self._closing = True
            for request in [*self._requests.values()]:
                request.cancel()
            self._condition.notify_all()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            self._pipeline.deployment.abandon()

    def fail(self, error: BaseException) -> None:
        """Fail every request; later requests raise the first error."""
        with self._condition:
            self._failure = self._failure or error
            ended = [*self._requests.values(), *self._waiting]
            self._requests.clear()
            self._waiting.clear()
        for request in ended:
            request.fail(error)

    def _run(self) -> None:
        """Generate until `end`; recover from lost devices if the pipeline survives them."""
        try:
            self._pipeline.run_over_losses(self._generate, lambda: len(self._requests), self._lanes.begin_again)
        except Exception as error:  # raised to the callers by their requests
            self.fail(error)
            self._pipeline.deployment.abandon()
        finally:
            atexit.unregister(self._leave)  # it would keep the pipeline alive

    def _generate(self) -> None:
        if not self._awaits_request():
            return
        (deployed,) = self._pipeline.deployment.pipelines
        self._lanes.single_rows = computes_single_rows(self._microbatches, deployed, self._lanes)
        deployed.begin(on_host=False)
        # limit on microbatches in flight: high enough that no stage waits, low enough that a new request does not wait
        # long
        most = 2 * len(deployed.job.ranks)
        in_flight: deque[tuple[Step, Mapping[str, int]]] = deque()
        tracer = deployed.tracer
        record = self._record = GenerationRecord(deployed, tracer, self._lanes) if tracer is not None else None
        while self._goes_on(in_flight):
            # only devices that join cause a change: speeds vary between prompts and tokens, so they do not trigger a
            # replan
            changes = self._pipeline.wants_change(by_speed=False)
            if changes and not in_flight:
                break
            while not changes and deployed.has_room and len(in_flight) < most:
                moment = record.begin() if record is not None else (0.0, 0.0)
                step = self._lanes.next(guesses=self._speculates and len(in_flight) < most // 2)
                if step is None:
                    break
                in_flight.append((step, self._microbatches.feed(deployed, step)))
                if record is not None:
                    record.fed(step, moment)
                if deployed.has_result:
                    break
            if in_flight:
                step, sizes = in_flight.popleft()
                self._sample(step, self._microbatches.take(deployed, sizes))
                if record is not None:
                    record.took()
        stages = deployed.finish()
        if record is not None and record.report.num_microbatches:
            self._pipeline.write_trace(record.report, record.end(stages))

    def _awaits_request(self) -> bool:
        """Wait for a request; returns False if the loop ends, or the stages are to change, before there is one.

        Other processes of torchrun may begin to serve only when they close their generator.
        """
        while self._goes_on(()):
            if self._requests:
                return True
            if self._pipeline.wants_change(by_speed=False):
                return False
        return False

    def _goes_on(self, in_flight: Sequence[object]) -> bool:
        """Admit requests, and wait briefly for one when idle; return False once closed and drained."""
        with self._condition:
            for sequence, request in list(self._requests.items()):
                if request.cancelled and not sequence.waits:
                    self._release(sequence).finish("cancelled")
            while self._waiting and self._lanes.has_room and not self._closing:
                request = self._waiting.popleft()
                if request.cancelled:
                    request.finish("cancelled")
                    continue
                begin = request.start or request.prompt
                sequence = SequenceState(
                    list(begin),
                    len(begin),
                    source=request.prompt if request.start else (),
                    scored=request.scored,
                    max_length=request.max_length,
                    guesser=Guesser(begin) if self._speculates else None,
                )
                self._lanes.admit(sequence)
                request.num_reused = sequence.num_reused
                self._requests[sequence] = request
            while self._closing and self._waiting:
                self._waiting.popleft().fail(UsageError("the generator was closed before this request began"))
            if not in_flight and not self._requests:
                if self._closing:
                    return False
                self._condition.wait(_LOOK_S)
        return True

    def _sample(self, step: Step, logits: Tensor) -> None:
        """Sample the next token of each row that needs one."""
        for row, index, sequence, token in step.scored:
            if (scored := self._requests.get(sequence)) is not None:
                scored.score(token, logits[row, index])
        continued = [(row, sequence, self._requests[sequence]) for row, sequence in step.continued()]
        likely = self._chosen({row: request for row, _, request in continued}, logits)
        for row, sequence, request in continued:
            if request.cancelled:
                self._release(sequence).finish("cancelled")
                continue
            try:
                reason = request.take(sequence.tokens, logits[row, -1], likely.get(row))
            except Exception as error:  # fails this request only
                failed = error if isinstance(error, PenstockError) else RunError(f"sampling failed: {error}")
                self._release(sequence).fail(failed)
                continue
            self._lanes.add(sequence, request.tokens[-1])
            if reason is not None:
                self._release(sequence).finish(reason)

    def _chosen(self, requests: Mapping[int, Request], logits: Tensor) -> dict[int, Likely]:
        """Return the tokens of rows that need no processors, computed together.

        On a GPU samples are drawn there, always on this process's, so that they do not depend on where stages are.
        On the CPU each request draws as `model.generate` does.
        """
        likely: dict[int, Likely] = {}
        if greedy := [row for row, request in requests.items() if request.sample.greedy]:
            likely |= zip(greedy, most_likely(torch.stack([logits[row, -1] for row in greedy])), strict=True)
        samples = [row for row, request in requests.items() if request.sample.draws and self._device != HOST]
        if samples:
            draws = [requests[row].sample.draw() for row in samples]
            rows = torch.stack([logits[row, -1] for row in samples]).to(self._device)
            likely |= zip(samples, drawn(rows, draws), strict=True)
        return likely

    def _release(self, sequence: SequenceState) -> Request:
        """Free a sequence's slot; returns its request."""
        self._lanes.release(sequence)
        request = self._requests.pop(sequence)
        if self._record is not None:
            self._record.requests.append(request)
        return request


class GenerationRecord:
    """The record of one traced stream; `requests` are those that have finished."""

    def __init__(self, pipeline: DeployedPipeline, tracer: FeederTracer, lanes: Lanes) -> None:
        self.report = StreamReport()
        self.requests: list[Request] = []
        self._pipeline, self._tracer, self._lanes = pipeline, tracer, lanes
        self._begin_s = time.perf_counter()
        self._microbatches: list[tuple[str, int]] = []

    def begin(self) -> tuple[float, float]:
        """Return the current time of the trace and of this thread's CPU, as the start of a microbatch's preparation."""
        return self._tracer.recorder.clock(), time.thread_time()

    def fed(self, step: Step, moment: tuple[float, float]) -> None:
        """Record a microbatch that was prepared since `moment`."""
        self._tracer.loaded(len(self._microbatches), *moment)
        kind = "prompt" if step.lane < 0 else "guess" if step.guesses else "step"
        self._microbatches.append((kind, step.lane))
        self.report.fed_s = time.perf_counter() - self._begin_s

    def took(self) -> None:
        """Record a result."""
        self.report.took(time.perf_counter() - self._begin_s)

    def end(self, stages: list[StageReport]) -> GenerationFacts:
        """Complete the report, with tokens as its rows, and return the facts of the generation."""
        self.report.stages = stages
        self.report.num_rows = sum(len(request.tokens) for request in self.requests)
        self._pipeline.traces = [self._tracer.own(), *self._pipeline.traces]
        return GenerationFacts(
            microbatches=tuple(self._microbatches),
            requests=tuple(map(self._times, self.requests)),
            num_slots=self._lanes.num_slots,
            num_guesses=self._lanes.num_guesses,
            num_right=self._lanes.num_right,
            cache_bytes=tuple(self._pipeline.cache_bytes),
        )

    def _times(self, request: Request) -> RequestTimes:
        return RequestTimes(
            num_prompt=len(request.prompt),
            num_reused=request.num_reused,
            asked_s=request.asked_s - self._begin_s,
            came_s=tuple(moment - self._begin_s for moment in request.came_s),
        )


class Microbatches:
    """Feeds steps to the stages, and takes their logits in the same order.

    Example:
        sizes = microbatches.feed(pipeline, step)
        logits = microbatches.take(pipeline, sizes)
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        # by shapes of the inputs: the inputs' names in the graph's order, and the sizes
        self._known: dict[tuple[torch.Size, ...], tuple[list[str], dict[str, int]]] = {}

    @property
    def encodes(self) -> bool:
        """True if the model has an encoder."""
        return any(value.name == "source" for value in self._graph.tensor_inputs())

    def feed(self, pipeline: DeployedPipeline, step: Step) -> Mapping[str, int]:
        """Send a step; returns its sizes."""
        given = inputs_of(step)
        shapes = tuple(tensor.shape for tensor in given.values())
        if shapes not in self._known:
            tensors, sizes = bind_inputs(self._graph, (), given)
            names = {id(tensor): name for name, tensor in given.items()}
            self._known[shapes] = [names[id(tensor)] for tensor in tensors], sizes
        order, sizes = self._known[shapes]
        pipeline.feed([given[name] for name in order], [sizes[symbol] for symbol in self._graph.symbols])
        return sizes

    def take(self, pipeline: DeployedPipeline, sizes: Mapping[str, int]) -> Tensor:
        """Wait for the logits [B, K, V] of the oldest step; `sizes` are its own."""
        logits: Tensor = build_output(self._graph, pipeline.take(), sizes)
        return logits


def computes_single_rows(microbatches: Microbatches, deployed: DeployedPipeline, lanes: Lanes) -> bool:
    """Return True if these stages compute the same bits for a row alone as in a full lane.

    Most matrix products do not: they add up in another order for one row. The products of some runtimes do
    (`RuntimeKind.single_rows`), which depends on the processor, so it is tried: three tokens in the first slot, at both
    ends of its cache, with other tokens in the other slots and alone. It is a stream of its own, before any sequence
    is in the caches. Logits that are all equal, as of a padding token's zeros, show nothing.
    """
    runtimes = deployed.job.runtimes
    likely = bool(runtimes) and all(each.precision in RUNTIMES[each.name].single_rows for each in runtimes)
    if not likely or lanes.num_rows == 1 or lanes.recurrent or microbatches.encodes:
        return False
    deployed.begin()
    same = True
    for token, position in enumerate((0, 1, lanes.longest - 1)):
        found = []
        for rows in (lanes.num_rows, 1):
            step = Step(
                rows=list(range(rows)),
                ids=[[(token + row) % _VOCABULARY] for row in range(rows)],
                positions=[[position]] * rows,
                last=[0],
                room=room_of(position + 1),
            )
            found.append(microbatches.take(deployed, microbatches.feed(deployed, step))[0])
        same = same and torch.equal(*found) and bool((found[0] != found[0].flatten()[0]).any())
    deployed.finish()
    if deployed.tracer is not None:
        deployed.tracer.own()  # forgets what was recorded of it
        deployed.traces = []
    return same


def inputs_of(step: Step) -> dict[str, Tensor]:
    """Return the inputs of a call that runs one microbatch."""
    found = {
        "ids": torch.tensor(step.ids),
        "positions": torch.tensor(step.positions),
        "rows": torch.tensor(step.rows),
        "last": torch.tensor(step.last),
        "places": torch.arange(step.room),
    }
    if step.source:
        found |= {
            "source": torch.tensor(step.source, dtype=torch.int64),
            "source_sizes": torch.tensor(step.source_sizes),
            "source_places": torch.arange(step.source_room),
        }
    return found
