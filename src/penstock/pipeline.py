"""The public `Pipeline`: streams a model in evaluation mode, trains a model in training mode."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import nn

from penstock.deploy.run_options import CutOptions, ModelCall, RunOptions, SurvivalOptions
from penstock.elastic.elastic_training import ElasticTraining
from penstock.elastic.freezing.history import FreezePolicy
from penstock.elastic.options import ElasticOptions, Stored
from penstock.engine.observer import StreamReport
from penstock.engine.stall import STALL_S
from penstock.engine.wiring import DEPTH
from penstock.errors import UsageError
from penstock.graph.cuts import Cut
from penstock.graph.graph import Graph
from penstock.group.entry import under_torchrun
from penstock.group.world import World
from penstock.runtime.registry import parse_runtime
from penstock.spec.check import read_plan
from penstock.spec.cluster import Cluster, read_cluster
from penstock.spec.plan import Plan
from penstock.spec.profile import Profile, read_profile
from penstock.stream.streaming_pipeline import StreamingPipeline
from penstock.tensors import find_device
from penstock.terminal.live import StageState
from penstock.train.arrangement import TrainOptions
from penstock.train.loader import Loader
from penstock.train.outcome import StepReport
from penstock.train.trainer import Trainer
from penstock.train.training_pipeline import TrainingPipeline, trains
from penstock.zoo.weights.weights import Weights

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def _of_training(
    method: Callable[Concatenate[TrainingPipeline, _Given], _Result],
) -> "Callable[Concatenate[Pipeline, _Given], _Result]":
    """Delegate a method to the pipeline that trains, under the name and with the documentation that it has there."""

    @functools.wraps(method)
    def call(self: "Pipeline", *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        return method(self._training, *args, **kwargs)

    return cast("Callable[Concatenate[Pipeline, _Given], _Result]", call)


class Pipeline:
    """A model cut into stages that run in processes of their own, fed from this one.

    Started alone it makes one fresh worker process per stage. Under torchrun it uses the processes it
    finds, on one machine or many; the first one feeds, and the same script runs in all of them.

    Example:
        with penstock.Pipeline(model, (image,), stages=4) as pipe:
            for output in pipe.stream(images):
                print(output.argmax())

    Arguments:
        model: any module that `torch.export` takes; its parameters may lie on the meta device if `weights` is given.
            Or a list of modules, one per stage, called one after the other: the way in for what does not export.
            They run as threads of this process, or under torchrun in the processes, which all have the list.
        args, kwargs: an example call with the largest microbatch that will be streamed.
        stages: number of stages; by default one per process under torchrun, 4 for a stream started alone.
        policy, cuts: how the model is cut, by a policy or by hand, as for `penstock.split`.
        plan: what `penstock plan` chose, or the path of its file, in place of stages, policy, cuts and depth; for
            training, made with `--schedule`, also of replicas, schedule and microbatches.
        dynamic: further symbolic dimensions, as for `penstock.capture`.
        world: processes that have met already; this one joins or starts some where not given.
        weights: where tensors are read from, one at a time; the model itself where not given.
        threads: per stage; what this machine's cores allow where not given.
        depth: microbatches that may wait at a cut.
        device: what stages compute on, `cpu` or `cuda`: then each process takes the GPU of its number on its machine,
            and shares it where there are fewer. Outputs come to the CPU. A list of modules computes where they lie.
        runtime: what computes the stages of a stream: `eager`, `onnxruntime`, or `onnxruntime:int8`, linear layers in
            8 bits. A plan says it itself, stage by stage.
        between_gpus: how tensors get from one GPU to the next: `gloo`, by way of the hosts; `nccl`, which needs a GPU
            for each process; or `auto`, the second where it can be. NCCL is unverified, as it has never run on two
            GPUs, so it has to be asked for.
        trace: a folder for what a stream did and when, which `penstock report` reads; each stream replaces the last.
            A training is written when the pipeline is closed.
        trace_units: also record every operation, which costs a few percent.
        trace_profile: also run torch.profiler for a few microbatches, in training for one step: operators with their
            shapes and memory.
        on_loss: what a run does when a device is lost: `stop` raises `DeviceLost`; `continue` plans again for the
            devices that are left, puts the stages in place there and goes on, with the same results; `wait` first waits
            `wait_s` for another device to join (`penstock worker --join`, in training the same script with
            PENSTOCK_JOIN). With the latter two, devices that come are taken in, and in a stream one that has become
            slower does less. In training what moves comes from replicas, or everything from the last checkpoint. Not
            for lists of modules, traces, or under torchrun's agents, which end all processes. The first process itself
            cannot be lost.
        profile, cluster: what the planner goes by after a loss, or the paths of their files, as with `plan`; a training
            takes both. Without them what parts cost is counted from shapes, and devices are taken for equal until they
            are seen at work.
        stall_s: how long nothing at all may move while a result is due and no stage computes, before a message
            counts as lost; longer than the slowest link takes for one message. In training, while all wait.

    A model in training mode, or a function that makes one, can be trained: see the methods from `optimizer` on. Whether
    it trains or streams is decided by what is called first. To train, all processes run the same script,
    and alone this one does everything.

    Arguments of training:
        replicas: how many whole pipelines share each batch; as many as fit beside `stages`.
        schedule: gpipe, 1f1b, interleaved, zero-bubble, or a schedule of your own: its text, or the path of a file.
            A line for each device, with its actions in order: F a forward, B a backward (or I and W, its halves: the
            gradient of inputs, then of weights), with a microbatch, and after a dot a stage where a device has several.
        microbatches: how many a replica's rows of a batch are cut into; two for each stage where not given.
        seed: of dropout and of the order of data.
        autocast: a dtype for `torch.autocast`, such as torch.bfloat16; no autocast where not given.
        checkpointing: keep only a stage's inputs until its backward, and recompute the forward then.

    Raises `CaptureError` and `CutError` as `penstock.split` does, `RunError` when the processes do not
    come together, and `DeviceLost` while streaming when one of them is gone. After a `RunError` nothing
    more can be streamed; after an exception of the caller's own the next stream works.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Callable[[], nn.Module] | None,
        args: Any,
        kwargs: Mapping[str, Any] | None = None,
        *,
        stages: int | None = None,
        policy: str = "balanced",
        cuts: Sequence[str] | None = None,
        plan: Plan | str | Path | None = None,
        weights: Weights | None = None,
        dynamic: Mapping[str, Mapping[str | int, int]] | None = None,
        threads: int | None = None,
        depth: int = DEPTH,
        device: str | torch.device = "cpu",
        runtime: str = "eager",
        between_gpus: str = "gloo",
        stall_s: float = STALL_S,
        on_loss: str = "stop",
        wait_s: float = 300.0,
        profile: Profile | str | Path | None = None,
        cluster: Cluster | str | Path | None = None,
        world: World | None = None,
        replicas: int | None = None,
        schedule: str = "1f1b",
        microbatches: int | None = None,
        seed: int = 0,
        autocast: torch.dtype | None = None,
        checkpointing: bool = False,
        trace: str | Path | None = None,
        trace_units: bool = False,
        trace_profile: bool = False,
    ) -> None:
        args, kwargs = _example(args, kwargs)
        call = ModelCall(model=model, args=args, kwargs=kwargs, dynamic=dynamic, weights=weights)
        cut = CutOptions(stages=stages, policy=policy, cuts=cuts, plan=_read(read_plan, plan))
        run = RunOptions(
            threads=threads, depth=depth, device=str(device), between_gpus=between_gpus, stall_s=stall_s,
            trace=Path(trace) if trace is not None else None, trace_units=trace_units, trace_profile=trace_profile,
            runtime=parse_runtime(runtime),
            survival=SurvivalOptions(
                on_loss=on_loss, wait_s=wait_s, profile=_read(read_profile, profile),
                cluster=_read(read_cluster, cluster),
            ),
        )  # fmt: skip
        if world is None and not under_torchrun():
            find_device(device)  # before anything is started
        start_streaming = functools.partial(StreamingPipeline, call, cut, run, owns_world=world is None)
        self._pipe: StreamingPipeline | TrainingPipeline
        if trains(model) and (world is None or world.workers is None):
            options = TrainOptions(
                replicas=replicas, schedule=schedule, microbatches=microbatches, seed=seed, autocast=autocast,
                checkpointing=checkpointing,
            )  # fmt: skip
            self._pipe = TrainingPipeline(call, cut, run, options, world)
            self._stream_instead = start_streaming
        else:
            self._pipe = start_streaming(world)

    @property
    def _training(self) -> TrainingPipeline:
        if isinstance(self._pipe, TrainingPipeline):
            return self._pipe
        raise UsageError(
            "this pipeline streams; to train, make one of a module after model.train(): a list of modules only streams"
        )

    @property
    def _streaming(self) -> StreamingPipeline:
        if isinstance(self._pipe, StreamingPipeline):
            return self._pipe
        raise UsageError("this pipeline has not streamed; stream with it, or with a model in evaluation mode")

    @property
    def graph(self) -> Graph:
        """The whole model, as it was captured."""
        return self._pipe.graph

    @property
    def cuts(self) -> Sequence[Cut]:
        """Where the model is cut."""
        return self._pipe.cuts

    @property
    def model_name(self) -> str:
        """The model's name in what is written of a run; the class's where nobody sets another."""
        return self._pipe.model_name

    @model_name.setter
    def model_name(self, name: str) -> None:
        self._pipe.model_name = name

    def stream(self, inputs: Iterable[Any]) -> Iterator[Any]:
        """Return the model's output for every input, in order, while later inputs are on their way.

        Each input is one microbatch: a tensor, a tuple of positional inputs, or a dict of keyword
        inputs. The batch size may be smaller than the example's at any time. In a process that does
        not feed, `inputs` is not touched and no output comes: it works on its stage until the stream
        has ended. Leaving the loop early cancels what is under way, as does an exception of `inputs` or
        of the loop's body, which then reaches the caller; the pipeline stays ready for another stream.
        Only an interrupt while this waits for microbatches or results gives the pipeline up.

        Raises `UsageError` for a closed pipeline, an input unlike the example and a second stream at once.
        """
        if isinstance(self._pipe, TrainingPipeline):
            # a model in training mode that is streamed first was never meant to be trained
            world, name = self._pipe.release(), self._pipe.model_name
            self._pipe = self._stream_instead(world)
            self._pipe.model_name = name
        yield from self._pipe.stream(inputs)

    def __call__(self, *args: Any, microbatch_size: int = 1, **kwargs: Any) -> Any:
        """Run one batch of any size: cut into microbatches, streamed, and put together again.

        Returns None in a process that does not feed. A pipeline that trains returns the outputs of its current
        weights in evaluation mode, for this replica's rows, on every process of the replica. Raises
        `UsageError` for an empty batch, and where an output has no batch dimension to put together.
        """
        if isinstance(self._pipe, TrainingPipeline):
            return self._pipe(*args, **kwargs)
        return self._pipe(*args, microbatch_size=microbatch_size, **kwargs)

    @property
    def last_report(self) -> StreamReport:
        """The times of the last stream, on the process that feeds."""
        return self._streaming.deployment.last_report

    @property
    def changes(self) -> Sequence[Any]:
        """What changed, each time: a `StreamChange` of the last stream, or a `TrainingChange`; none with `stop`."""
        return self._pipe.changes

    @property
    def joins_at(self) -> str | None:
        """Where one joins: a stream with `penstock worker --join`, a training with PENSTOCK_JOIN; None if nowhere."""
        return self._pipe.joins_at

    def stage_states(self) -> list[StageState]:
        """Return how far each stage is, as of the last heartbeats, which come once a second; for `LiveView`."""
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

    def elastic(
        self, loader: Loader, *, freeze: FreezePolicy | str | Sequence[int] = "gradient-norms",
        epochs: int | None = None, pack: bool = True, replicate: bool = True, cache: bool = True,
        cache_dir: str | Path | None = None, cache_limit: str | int | None = None, cache_dtype: Stored = "float32",
        cache_views: int = 1, keep_cache: bool = False, profile: Profile | str | Path | None = None,
        cluster: Cluster | str | Path | None = None,
    ) -> ElasticTraining:  # fmt: skip
        """Freeze layers that have converged, and plan again with what that frees, at the beginning of each epoch.

        Call this once, after `optimizer` and `loader`; the loop stays as it is. Layers are the model's blocks, frozen
        from the first on: they run as in evaluation, without dropout and with BatchNorm's statistics as they are. The
        planner then chooses stages and replicas anew for the epochs that are left, and whether what frozen layers put
        out is read from a cache on disk. Apart from freezing, nothing of this changes what is learned.

        Example:
            loader = pipe.loader(dataset, batch_size=64, shuffle=True)
            elastic = pipe.elastic(loader, freeze="schedule:1/3", epochs=10)
            for epoch in range(10):
                for images, labels in loader:
                    pipe.train_step(images, labels, loss_fn=F.cross_entropy)
                    optimizer.step(); optimizer.zero_grad()
                elastic.validated(accuracy=measure(pipe))      # where a policy looks at it

        Args:
            freeze: a policy of `penstock.elastic.freezing`, its name, or the frozen layers of each epoch.
            epochs: how many there will be: to move, and to fill a cache, has to pay in those that are left.
            pack, replicate: whether stages may change, and numbers of replicas.
            cache, cache_dir, cache_limit, cache_dtype: whether to cache, in which folder on each machine, with how many
                bytes there, and floats as float32 or bfloat16.
            cache_views: how many variants to keep of a sample that is drawn anew each time.
            keep_cache: whether the cache stays after the run.
            profile, cluster: of `penstock profile --training` and a cluster file; measured where not given.

        Raises `UsageError` for a training with a trace or a schedule of the user's own, for optimizers whose groups
        differ between processes, and where a frozen layer shares a weight with one that trains. A cache that cannot be
        written is noted, and the training goes on without it. After He et al. 2021, PipeTransformer
        (https://arxiv.org/abs/2102.03161).
        """
        options = ElasticOptions(
            freeze=freeze, epochs=epochs, pack=pack, replicate=replicate, cache=cache, cache_dir=cache_dir,
            cache_limit=cache_limit, cache_dtype=cache_dtype, cache_views=cache_views, keep_cache=keep_cache,
            profile=_read(read_profile, profile), cluster=_read(read_cluster, cluster),
        )  # fmt: skip
        return ElasticTraining(self._training.trainer, loader, options)

    @property
    def last_step(self) -> StepReport:
        """Where this process's last step went."""
        return self._training.last_step

    @property
    def trainer(self) -> Trainer:
        """The training that this pipeline does, begun by the first call that needs it."""
        return self._training.trainer

    def close(self) -> None:
        """End the stages and the worker processes; nothing is left behind."""
        self._pipe.close()

    def abandon(self) -> None:
        """Give everything up at once, without waiting for work under way."""
        self._pipe.abandon()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pipe.end(error)


def _read(read: Callable[[str | Path], _Result], given: "_Result | str | Path | None") -> _Result | None:
    """Return what was given, read from its file if that is a path."""
    return read(given) if isinstance(given, (str, Path)) else given


def _example(args: Any, kwargs: Mapping[str, Any] | None) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Read the example call: a lone tensor is its one positional input, a mapping its keyword inputs."""
    if isinstance(args, torch.Tensor):
        return (args,), kwargs or {}
    if isinstance(args, Mapping):
        return (), {**args, **(kwargs or {})}
    return args, kwargs or {}
