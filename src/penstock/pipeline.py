"""The public `Pipeline`: streams a model in evaluation mode, trains a model in training mode."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import nn

from penstock.deploy.run_options import Bundle, CutOptions, LinkOptions, ModelCall, OnLoss, RunOptions, Trace
from penstock.elastic.elastic_training import ElasticTraining
from penstock.elastic.options import ElasticOptions
from penstock.engine.observer import StreamReport
from penstock.errors import UsageError
from penstock.graph.cuts import Cut
from penstock.graph.graph import Graph
from penstock.group.world import World
from penstock.plan.check import read_plan
from penstock.plan.schedule.schedules import DEFAULT_SCHEDULE
from penstock.runtime.registry import parse_runtime
from penstock.spec.plan import Plan
from penstock.stream.streaming_pipeline import StreamingPipeline
from penstock.terminal.live import StageState
from penstock.train.arrangement import TrainOptions
from penstock.train.loader import Loader
from penstock.train.step import StepReport
from penstock.train.trainer import Trainer
from penstock.train.training_pipeline import TrainingPipeline, trains
from penstock.zoo.weights.weights import Weights

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_Options = TypeVar("_Options")


def _of_training(
    method: Callable[Concatenate[TrainingPipeline, _Given], _Result],
) -> "Callable[Concatenate[Pipeline, _Given], _Result]":
    """Delegate a method to the training pipeline, with its name and documentation."""

    @functools.wraps(method)
    def call(self: "Pipeline", *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        return method(self._training, *args, **kwargs)

    return cast("Callable[Concatenate[Pipeline, _Given], _Result]", call)


def _takes(
    make: Callable[_Given, _Options],
) -> """Callable[
    [Callable[[Pipeline, Loader, _Options], _Result]], Callable[Concatenate[Pipeline, Loader, _Given], _Result]
]""":
    """Return a decorator that replaces the parameter of options by keyword arguments, one for each field."""

    def decorate(
        method: "Callable[[Pipeline, Loader, _Options], _Result]",
    ) -> "Callable[Concatenate[Pipeline, Loader, _Given], _Result]":
        @functools.wraps(method)
        def call(self: "Pipeline", loader: Loader, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
            return method(self, loader, make(*args, **kwargs))

        own = inspect.signature(method)
        shown = [*list(own.parameters.values())[:-1], *inspect.signature(make).parameters.values()]
        call.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
        return cast("Callable[Concatenate[Pipeline, Loader, _Given], _Result]", call)

    return decorate


class Pipeline:
    """A model cut into stages that run in separate processes, with this one as the driver.

    Started alone it starts one worker process per stage. Under torchrun it uses the existing processes, on one machine
    or many; rank 0 is the driver, and all processes run the same script.

    Example:
        with penstock.Pipeline(model, (image,), stages=4) as pipe:
            for output in pipe.stream(images):
                print(output.argmax())

    Arguments:
        model: any module that `torch.export` accepts; its parameters may be on the meta device if `weights` is given.
            Or a list of modules, one per stage, called in sequence, for models that cannot be exported. They run in
            threads of this process, or under torchrun in one process each; every process then needs the whole list.
        args, kwargs: an example call with the largest microbatch that will be streamed.
        stages: number of stages; default: one per process under torchrun, 4 for a stream started alone.
        cuts: where to cut the model: a policy, by default `balanced`, or a list of names, as for `penstock.split`.
        plan: a plan from `penstock plan`, or the path of its file; determines stages, cuts and depth. A plan for
            training, made with `--schedule`, also replaces replicas, schedule and microbatches.
        dynamic: further symbolic dimensions, as for `penstock.capture`.
        world: already connected processes; default: join those of torchrun, or start new ones.
        weights: where tensors are read from, one at a time; default: the model itself.
        threads: threads per stage; default: by this machine's cores.
        device: device of the stages, `cpu` or `cuda`. With `cuda` each process uses the GPU with its local rank;
            processes share GPUs if there are fewer. Outputs are on the CPU. A list of modules computes on the modules'
            own devices.
        runtime: how stages compute: `eager`; `compiled`, by torch.compile, with other last bits; in a stream also
            `onnxruntime`, or `onnxruntime:int8`, with linear layers in 8 bits. A plan sets this for each stage.
        trace: a folder for the timeline, read by `penstock report`. Each stream replaces the previous one; a training
            run is written when the pipeline is closed. `penstock.Trace` also records every operation, or what
            torch.profiler records.
        on_loss: policy for a lost device: `stop` raises `DeviceLost`; `continue` replans for the surviving devices,
            moves the stages to them and continues (a stream with the same bits, a training run with the same batches);
            `wait` first waits for another device to join (`penstock worker --join`, in training the same
            script with PENSTOCK_JOIN). With `continue` and `wait`, devices may join, and in a stream a device that has
            become slower gets less work. In training the state of moved stages is read from replicas; if no replica
            has it, all state is read from the last checkpoint. Not for lists of modules, traces, or under torchrun's
            agents, which end all processes. If rank 0 is lost, the run always ends. `penstock.OnLoss` also has the
            longest wait, and a profile and a cluster for the planner; a training run needs both or neither.
        links: how stages exchange messages, such as `penstock.LinkOptions(depth=4)`.

    A model in training mode, or a function that makes one, can be trained: see the methods from `optimizer` on. The
    first call decides between training and streaming. For training under torchrun, all processes run the same script;
    started alone, this process does everything.

    Arguments of training:
        replicas: number of whole pipelines that share each batch; default: as many as fit with `stages`.
        schedule: a name that `penstock schedule --help` lists, or a custom schedule: its text, or the path of a file.
            It has one line for each device with its actions in order: F for forward, B for backward (or I and W for its
            halves, the gradients of inputs and of weights), then the microbatch, and after a dot the stage if a device
            has several.
        microbatches: number of microbatches that each replica splits its rows of a batch into; default: two per stage.
        seed: seed of dropout, of the order of data, and of the weights of a function that makes the model.
        autocast: a dtype for `torch.autocast`, such as torch.bfloat16; default: no autocast.
        checkpointing: keep only a stage's inputs until its backward, and recompute the forward then.

    Raises `CaptureError` and `CutError` as `penstock.split` does, `RunError` if the processes fail to connect, and
    `DeviceLost` while streaming if one of them is lost. After a `RunError` nothing more can be streamed; after an
    exception raised by the caller's code the next stream works.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Callable[[], nn.Module] | None,
        args: Any,
        kwargs: Mapping[str, Any] | None = None,
        *,
        stages: int | None = None,
        cuts: str | Sequence[str] | None = None,
        plan: Plan | str | Path | None = None,
        weights: Weights | None = None,
        dynamic: Mapping[str, Mapping[str | int, int]] | None = None,
        threads: int | None = None,
        device: str | torch.device = "cpu",
        runtime: str = "eager",
        links: LinkOptions | None = None,
        on_loss: str | OnLoss = "stop",
        world: World | None = None,
        replicas: int | None = None,
        schedule: str = DEFAULT_SCHEDULE,
        microbatches: int | None = None,
        seed: int = 0,
        autocast: torch.dtype | None = None,
        checkpointing: bool = False,
        trace: str | Path | Trace | None = None,
    ) -> None:
        args, kwargs = _example(args, kwargs)
        call = ModelCall(model=model, args=args, kwargs=kwargs, dynamic=dynamic, weights=weights)
        plan = read_plan(plan) if isinstance(plan, (str, Path)) else plan
        cut = CutOptions(stages=stages, cuts=cuts, plan=plan)
        run = RunOptions(
            threads=threads,
            device=str(device),
            **asdict(links or LinkOptions()),
            trace=trace if trace is None or isinstance(trace, Trace) else Trace(trace),
            runtime=parse_runtime(runtime),
            on_loss=on_loss if isinstance(on_loss, OnLoss) else OnLoss(on_loss),
        )
        start_streaming = functools.partial(StreamingPipeline, call, cut, run, owns_world=world is None)
        self._pipe: StreamingPipeline | TrainingPipeline
        if trains(model) and (world is None or world.workers is None):
            options = TrainOptions(
                replicas=replicas,
                schedule=schedule,
                microbatches=microbatches,
                seed=seed,
                autocast=autocast,
                checkpointing=checkpointing,
            )
            self._pipe = TrainingPipeline(call, cut, run, options, world)
            self._stream_instead = start_streaming
        else:
            self._pipe = start_streaming(world)

    @classmethod
    def from_bundle(
        cls,
        folder: str | Path,
        *,
        threads: int | None = None,
        device: str | torch.device = "cpu",
        links: LinkOptions | None = None,
    ) -> "Pipeline":
        """Stream through the stages of a bundle: every machine reads its own part and does not need the model's source.

        Started alone it starts one worker per device of the bundle's plan; under torchrun it joins the processes of the
        hosts. Inputs and outputs are the model's tensors in order, without names: each output is a list. The arguments
        are as for `Pipeline`.

        Example:
            with penstock.Pipeline.from_bundle("bundle") as pipe:
                for (logits,) in pipe.stream(images.split(1)):
                    print(logits.argmax().item())

        Raises `ProgramError` if a part is damaged or of another plan, `PlanError` if the run's hosts are not the plan's
        devices.
        """
        pipe = cls.__new__(cls)
        run = RunOptions(threads=threads, device=str(device), **asdict(links or LinkOptions()))
        pipe._pipe = StreamingPipeline(ModelCall(model=Bundle(Path(folder).absolute())), CutOptions(), run)
        return pipe

    @property
    def _training(self) -> TrainingPipeline:
        if isinstance(self._pipe, TrainingPipeline):
            return self._pipe
        raise UsageError(
            "this pipeline only streams; to train, make one from a module after model.train(), not from a list"
        )

    @property
    def _streaming(self) -> StreamingPipeline:
        if isinstance(self._pipe, StreamingPipeline):
            return self._pipe
        raise UsageError("this pipeline has not streamed; call stream first, or use a model in evaluation mode")

    @property
    def graph(self) -> Graph:
        """The captured graph of the whole model."""
        return self._pipe.graph

    @property
    def cuts(self) -> Sequence[Cut]:
        """Cuts of the model."""
        return self._pipe.cuts

    @property
    def model_name(self) -> str:
        """Name of the model in a run's files; default: the name of its class."""
        return self._pipe.model_name

    @model_name.setter
    def model_name(self, name: str) -> None:
        self._pipe.model_name = name

    def stream(self, inputs: Iterable[Any]) -> Iterator[Any]:
        """Yield the model's output for every input, in order, while later inputs are in flight.

        Each input is one microbatch: a tensor, a tuple of positional inputs, or a dict of keyword inputs. The batch
        size may be smaller than the example's at any time. A worker process does not read `inputs` and yields nothing;
        it serves its stage until the stream has ended. Leaving the loop early, or an exception in `inputs` or in the
        loop, cancels microbatches in flight; the pipeline stays ready for another stream. Only an interrupt while
        waiting for microbatches or results abandons it.

        Example:
            for output in pipe.stream(images.split(1)):  # image by image, in order
                print(output.argmax().item())

        Raises `UsageError` for a closed pipeline, an input unlike the example and a second simultaneous stream.
        """
        if isinstance(self._pipe, TrainingPipeline):
            # a model in training mode that is streamed first will not be trained
            world, name = self._pipe.release(), self._pipe.model_name
            self._pipe = self._stream_instead(world)
            self._pipe.model_name = name
        yield from self._pipe.stream(inputs)

    def __call__(self, *args: Any, microbatch_size: int = 1, **kwargs: Any) -> Any:
        """Run one batch of any size: cut it into microbatches, stream them, and concatenate the outputs.

        Returns None in a worker process. A pipeline that trains returns the outputs of its current weights in
        evaluation mode, for this replica's rows, on every process of the replica.

        Example:
            scores = pipe(images, microbatch_size=2)

        Raises `UsageError` for an empty batch, for an output without a batch dimension to concatenate, and for several
        microbatches of a bundle, which does not show whether rows depend on each other.
        """
        if isinstance(self._pipe, TrainingPipeline):
            return self._pipe(*args, **kwargs)
        return self._pipe(*args, microbatch_size=microbatch_size, **kwargs)

    @property
    def last_report(self) -> StreamReport:
        """Times of the last stream, on the driver."""
        return self._streaming.deployment.last_report

    @property
    def changes(self) -> Sequence[Any]:
        """Changes of devices: each a `StreamChange` of the last stream, or a `TrainingChange`; empty with `stop`."""
        return self._pipe.changes

    @property
    def joins_at(self) -> str | None:
        """Address at which other devices join, with `penstock worker --join` or in training with PENSTOCK_JOIN; None if
        they cannot.
        """
        return self._pipe.joins_at

    def stage_states(self) -> list[StageState]:
        """Return the progress of each stage at the last heartbeat, two per second; for `LiveView`."""
        return self._streaming.deployment.stage_states()

    optimizer = _of_training(TrainingPipeline.optimizer)
    loader = _of_training(TrainingPipeline.loader)
    train_step = _of_training(TrainingPipeline.train_step)
    clip_grad_norm_ = _of_training(TrainingPipeline.clip_grad_norm_)
    evaluate = _of_training(TrainingPipeline.evaluate)
    named_parameters = _of_training(TrainingPipeline.named_parameters)
    save = _of_training(TrainingPipeline.save)
    save_checkpoint = _of_training(TrainingPipeline.save_checkpoint)
    load_checkpoint = _of_training(TrainingPipeline.load_checkpoint)
    scheduler = _of_training(TrainingPipeline.scheduler)

    @_takes(ElasticOptions)
    def elastic(self, loader: Loader, options: ElasticOptions) -> ElasticTraining:
        """Freeze converged layers, and replan with the freed resources, at the beginning of each epoch.

        Call this once, after `optimizer` and `loader`; the loop is unchanged. Layers are the model's blocks, frozen in
        order from the first; frozen layers run as in evaluation, without dropout and with fixed BatchNorm statistics.
        The planner then chooses stages and replicas again for the remaining epochs, and decides whether outputs of
        frozen layers are read from a cache on disk. Apart from freezing, none of this changes what is learned.

        Example:
            loader = pipe.loader(dataset, batch_size=64, shuffle=True)
            elastic = pipe.elastic(loader, freeze="schedule:1/3", epochs=10)
            for epoch in range(10):
                for images, labels in loader:
                    pipe.train_step(images, labels, loss_fn=F.cross_entropy)
                    optimizer.step(); optimizer.zero_grad()
                elastic.validated(accuracy=measure(pipe))      # if a policy uses it

        The keyword arguments are the fields of `penstock.elastic.options.ElasticOptions`.

        Raises `UsageError` with a trace or a custom schedule, if optimizer groups differ between processes, and if a
        frozen layer shares a weight with a trained layer. If a cache cannot be written, a note is printed and training
        continues without it. After He et al. 2021, PipeTransformer (https://arxiv.org/abs/2102.03161).
        """
        return ElasticTraining(self._training.trainer, loader, options)

    @property
    def last_step(self) -> StepReport:
        """Times of this process's last step."""
        return self._training.last_step

    @property
    def trainer(self) -> Trainer:
        """The trainer of this pipeline, started by the first call that needs it."""
        return self._training.trainer

    def close(self) -> None:
        """Stop the stages and the worker processes, and release everything."""
        self._pipe.close()

    def abandon(self) -> None:
        """Stop immediately, without waiting for work in flight."""
        self._pipe.abandon()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pipe.end(error)


def _example(args: Any, kwargs: Mapping[str, Any] | None) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Read the example call: a tensor is the only positional input, a mapping the keyword inputs."""
    if isinstance(args, torch.Tensor):
        return (args,), kwargs or {}
    if isinstance(args, Mapping):
        return (), {**args, **(kwargs or {})}
    return args, kwargs or {}
