"""Deployment of a model's stages behind the HTTP server."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from penstock.deploy.run_options import CutOptions, ModelCall, OnLoss, RunOptions
from penstock.errors import RunError, UsageError
from penstock.group.world import World
from penstock.plan.check import read_plan
from penstock.recipes.classify import check_head, example_call
from penstock.recipes.texts import answer_ends, open_generator
from penstock.runtime.registry import parse_runtime
from penstock.serve.admission import Admission
from penstock.serve.app import Served, make_app
from penstock.serve.classes import ClassService
from penstock.serve.metrics import Metrics
from penstock.serve.server import addresses, serve
from penstock.serve.texts import TextService
from penstock.spec.settings import ServeSettings
from penstock.stream.pushed import PushedStream
from penstock.stream.streaming_pipeline import StreamingPipeline
from penstock.stream.survival import StreamChange
from penstock.terminal.live import StageState
from penstock.terminal.progress import working
from penstock.text import note, say
from penstock.zoo.models.language import is_language_model
from penstock.zoo.models.models import load_model


def serve_model(
    settings: ServeSettings, keys: Sequence[str], listener: socket.socket, world: World | None = None
) -> bool:
    """Load a model, deploy its stages and serve until SIGTERM or Ctrl-C; return whether Ctrl-C ended it.

    A transformers language model answers OpenAI's completions and chats; an image model of the zoo classifies images.
    Errors of loading and placing the model propagate.

    Example:
        serve_model(ServeSettings(model="hf:models/smollm2"), ["a key"], listen_at("127.0.0.1", 8000))
    """
    metrics = Metrics()
    name = settings.name or _name_of(settings.model)
    speaks = is_language_model(settings.model)
    if wrong := settings.preprocess if speaks else settings.slots:
        raise UsageError(f"slots are for language models, preprocess for others; got {wrong} for {settings.model}")
    open_service = _texts if speaks else _classes
    with world if world is not None else contextlib.nullcontext(), open_service(settings, metrics, world) as opened:
        metrics.watch(
            lambda: opened.service.admission.num_running,
            lambda: opened.service.admission.num_waiting,
            opened.service.admission.slots,
        )
        metrics.watch_stages(opened.states, lambda: opened.num_lost)
        served = Served(
            name=name, service=opened.service, metrics=metrics, keys=keys, most_bytes=int(settings.max_body * 2**20),
            problem=opened.problem, stages=opened.stages, changes=opened.told_changes, joins_at=lambda: opened.joins_at,
            created=int(time.time()), origins=settings.allow_origin, strict=settings.strict,
        )  # fmt: skip
        scheme = "https" if settings.certificate else "http"
        address, port = addresses(settings.host, listener)

        def begun() -> None:
            say(f"{name} answers at {scheme}://{address}:{port}")
            if world is not None and (place := opened.joins_at) is not None:
                note(f"to add a device, run penstock worker --join {place}")
            if not keys:
                note("--open: every process on this machine may send requests")

        interrupted = serve(
            make_app(served),
            listener,
            drain_s=settings.drain,
            certificate=settings.certificate,
            key=settings.certificate_key,
            begun=begun,
            failed=lambda: opened.problem() is not None,
        )
        if (problem := opened.problem()) is not None:
            raise RunError(problem)
        return interrupted


class _Opened:
    """A deployed service and the state of its stages."""

    def __init__(
        self,
        service: TextService | ClassService,
        pipeline: StreamingPipeline,
        failure: Callable[[], BaseException | None],
    ) -> None:
        self.service, self._pipeline, self._failure = service, pipeline, failure

    @property
    def joins_at(self) -> str | None:
        """Address at which a device can join; None if the run admits none."""
        return self._pipeline.joins_at

    def problem(self) -> str | None:
        """Return the reason why requests cannot be answered, or None."""
        failure = self._failure()
        return f"the stages failed: {failure}" if failure is not None else None

    def states(self) -> Sequence[StageState]:
        """Return the stages' counters."""
        return self._pipeline.deployment.stage_states()

    @property
    def changes(self) -> Sequence[StreamChange]:
        """Placement changes since the start: after lost or joined devices, or for changed speeds."""
        return self._pipeline.changes

    @property
    def num_lost(self) -> int:
        """Number of devices lost since the start."""
        return sum(change.num_lost for change in self.changes)

    def stages(self) -> list[dict[str, Any]]:
        """Return every stage's device, bytes of weights and caches, and counters."""
        world, found = self._pipeline.world, []
        states = iter([state for state in self.states() if state.computes])
        for pipeline in self._pipeline.deployment.pipelines:
            held = zip(pipeline.job.ranks, pipeline.stage_bytes, states, strict=False)
            found += [
                {
                    "stage": index,
                    "device": world.names[rank],
                    "memory_bytes": num_bytes,
                    "microbatches": state.computed,
                    "busy_s": state.busy_s,
                    "sent_bytes": state.sent_bytes,
                    "queue": state.queue,
                }
                for index, (rank, num_bytes, state) in enumerate(held)
            ]
        return found

    def told_changes(self) -> list[dict[str, Any]]:
        """Return the placement changes for the page."""
        return [{"why": change.why, "took_s": round(change.took_s, 2)} for change in self.changes]


@contextlib.contextmanager
def _texts(settings: ServeSettings, metrics: Metrics, world: World | None) -> Iterator[_Opened]:
    with working("deploying the stages"):
        generator = open_generator(settings, world)
    if getattr(generator.tokenizer, "chat_template", None) is None:
        note(f"the tokenizer of {settings.model} has no chat template: chats are refused, completions answered")
    with contextlib.closing(generator):  # on failure its requests have already been failed, so just close it
        with working("running a first token"):
            # checks and compilation happen in the first call, before the server reports that it is ready
            generator.submit([0], max_new_tokens=1, do_sample=False).result()
        admission = Admission(slots=generator.num_slots, most_waiting=settings.most_waiting)
        metrics.watch_guesses(lambda: generator.num_guesses)
        ends = answer_ends(generator, settings.model)
        service = TextService(generator, admission, metrics, deadline_s=settings.deadline, ends=ends)
        service.trial.start()
        with contextlib.closing(service.trial):
            yield _Opened(service, generator.pipeline, lambda: generator.failure)


@contextlib.contextmanager
def _classes(settings: ServeSettings, metrics: Metrics, world: World | None) -> Iterator[_Opened]:
    with working("loading the model"):
        zoo = load_model(
            settings.model, weights=settings.weights, pretrained=settings.pretrained, preprocess=settings.preprocess
        )
    zoo.pictures()
    check_head(zoo)
    args, kwargs = example_call(zoo, 1)
    call = ModelCall(model=zoo.module, args=args, kwargs=kwargs, weights=zoo.weights)
    plan = read_plan(settings.plan) if settings.plan is not None else None
    cut = CutOptions(stages=settings.stages, cuts=settings.cuts, plan=plan)
    if plan is None:
        cut = replace(cut, stages=cut.count(len(world.devices) if world else 2))
    with working("deploying the stages"):
        pipeline = StreamingPipeline(
            call,
            cut,
            RunOptions(
                threads=settings.threads,
                device=settings.device,
                runtime=parse_runtime(settings.runtime),
                on_loss=OnLoss(settings.on_loss or "stop"),
            ),
            world,
            owns_world=world is None,
        )
    with contextlib.closing(pipeline), PushedStream(pipeline) as stream:
        # enough images in flight to keep every stage busy
        admission = Admission(slots=4 * len(pipeline.world.devices), most_waiting=settings.most_waiting)
        service = ClassService(stream, zoo, admission, metrics, deadline_s=settings.deadline)
        yield _Opened(service, pipeline, lambda: stream.failure)


def _name_of(model: str) -> str:
    """Return a model's default name in requests: the last part of its path or name.

    >>> _name_of("hf:models/smollm2/"), _name_of("timm:deit_tiny_patch16_224,depth=2")
    ('smollm2', 'deit_tiny_patch16_224')
    """
    source = model.partition(":")[2].partition(",")[0].rstrip("/")
    return source.rpartition("/")[2] or model
