"""What users import: a model as a pipeline over processes, fed from an ordinary loop."""

import atexit
import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.deploy.deployment import Deployment, Replicas
from penstock.deploy.jobs import MakeRuntime, read_stages, receive_stages
from penstock.deploy.modules import runtime_maker
from penstock.deploy.serving import OwnStages
from penstock.engine.driver import Microbatch, StreamReport
from penstock.engine.executor import serve_stream
from penstock.engine.stall import STALL_S
from penstock.engine.tracers import FeederTracer, follow_stages
from penstock.engine.wiring import DEPTH
from penstock.errors import PenstockError, TransportError, UsageError
from penstock.graph.call import CallInputs, as_call, bind_inputs, build_output
from penstock.graph.graph import Graph
from penstock.graph.ops import Ref
from penstock.group.direct import check_way
from penstock.group.entry import join_torchrun, under_torchrun
from penstock.group.launch import available_cores
from penstock.group.leaving import end_when_dropped, failed
from penstock.group.world import World
from penstock.spec.check import check_purpose
from penstock.spec.plan import Plan
from penstock.stream.division import Wanted, divide_model
from penstock.stream.facts import stream_facts, units_of
from penstock.tensors.devices import find_device
from penstock.terminal.live import StageState
from penstock.terminal.notes import note
from penstock.tracing.trace import write_run
from penstock.train.methods import TrainingMethods, trains
from penstock.transport.base import FEEDER
from penstock.transport.messages import CLOSE
from penstock.zoo.weights.weights import Weights


class Pipeline(TrainingMethods):
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
        stages: how many; under torchrun as many as processes unless given.
        policy, cuts: how the model is cut, by a policy or by hand, as for `penstock.split`.
        plan: what `penstock plan` chose, in place of stages, policy, cuts and depth; for training, made with
            `--schedule`, also of replicas, schedule and microbatches.
        weights: where tensors are read from, one at a time; the model itself where not given.
        threads: per stage; what this machine's cores allow where not given.
        depth: microbatches that may wait at a cut.
        device: what stages compute on, `cpu` or `cuda`: then each process takes the GPU of its number on its machine,
            and shares it where there are fewer. Outputs come to the CPU. A list of modules computes where they lie.
        between_gpus: how tensors get from one GPU to the next: `gloo`, by way of the hosts; `nccl`, which needs a GPU
            for each process; or `auto`, the second where it can be. NCCL is unverified, as it has never run on two
            GPUs, so it has to be asked for.
        trace: a folder for what a stream did and when, which `penstock report` reads; each stream replaces the last.
            A training is written when the pipeline is closed.
        trace_units: also record every operation, which costs a few percent.
        trace_profile: also run torch.profiler for a few microbatches, in training for one step: operators with their
            shapes and memory.
        stall_s: how long nothing at all may move while a result is due and no stage computes, before a message
            counts as lost; longer than the slowest link takes for one message. In training, while all wait.

    A model in training mode, or a function that makes one, can be trained: see `TrainingMethods`. Whether
    it trains or streams is decided by what is called first. To train, all processes run the same script,
    and alone this one does everything. That has further arguments:

        replicas: how many whole pipelines share each batch; as many as fit beside `stages`.
        schedule: gpipe, 1f1b, interleaved, zero-bubble, or a schedule of your own as text.
        microbatches: how many a replica's rows of a batch are cut into; two for each stage where not given.
        seed: of dropout and of the order of data.
        autocast: torch.bfloat16 to compute in it where autocast does.
        checkpointing: keep only a stage's inputs until its backward, and compute forward again.

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
        plan: Plan | None = None,
        weights: Weights | None = None,
        dynamic: Mapping[str, Mapping[str | int, int]] | None = None,
        threads: int | None = None,
        depth: int = DEPTH,
        device: str | torch.device = "cpu",
        between_gpus: str = "gloo",
        stall_s: float = STALL_S,
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
        if trace is None and (trace_units or trace_profile):
            raise UsageError("what is recorded of each operation goes into the trace; give trace= a folder")
        self._trace = Path(trace) if trace is not None else None
        self._trace_units, self._trace_profile = trace_units, trace_profile
        self.model_name = type(model).__name__
        self._deployment: Deployment | Replicas
        self._owns_world = world is None
        self._dropped: weakref.finalize[..., object] | None = None
        self._closed = False
        self._plan: Plan | None = None
        self._between_gpus = between_gpus
        check_way(between_gpus, str(device))
        if world is None and not under_torchrun():
            find_device(device)  # before anything is started
        args, kwargs = _example(args, kwargs)
        wanted = Wanted(
            stages=stages, policy=policy, cuts=cuts, plan=plan, weights=weights, dynamic=dynamic, threads=threads,
            depth=depth, stall_s=stall_s, computes_on=str(device),
        )  # fmt: skip
        if trains(model) and (world is None or world.workers is None):
            self._prepare_training(
                model, args, kwargs, stages=stages, policy=policy, cuts=cuts, plan=plan, weights=weights,
                dynamic=dynamic, world=world, replicas=replicas, schedule=schedule, microbatches=microbatches,
                seed=seed, autocast=autocast, checkpointing=checkpointing, threads=threads, stall_s=stall_s,
                trace=trace is not None, profile=trace_profile, device=device,
            )  # fmt: skip
            if isinstance(model, nn.Module):
                self._streaming = partial(self._start, model, args, kwargs, wanted)
            return
        self._start(model if isinstance(model, (nn.Module, Sequence)) else None, args, kwargs, wanted, world)

    def _start(
        self, model: nn.Module | Sequence[nn.Module] | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None,
        wanted: Wanted, world: World | None,
    ) -> None:  # fmt: skip
        """Put the stages where they will stream."""
        self._plan = wanted.plan
        if wanted.plan is not None:
            check_purpose(wanted.plan, trains=False)
        if world is None and under_torchrun():
            world = join_torchrun()
        self._feeds = world is None or world.rank == FEEDER
        if world is not None and not self._feeds:
            self._world = world
            self._join_stages(None if model is None or isinstance(model, nn.Module) else runtime_maker(model, None))
            self._look_after_end()
            return
        try:
            division = divide_model(model, args, kwargs, wanted, world)
            self.graph: Graph = division.graph
            self.cuts = division.cuts
            world = self._world = world or division.start_world()
            world.between_gpus = self._between_gpus
            self.threads = wanted.threads or threads_per_stage(world)
            self._deployment = division.deploy(world, wanted, self.threads, self._tracer())
        except BaseException as error:
            if world is not None and self._owns_world:
                world.health.report(error)  # the other processes wait for their stages
                world.close(0.0)
            raise
        self._look_after_end()

    def _look_after_end(self) -> None:
        """See that a stream that is left open ends as one that is meant: it has given what was asked of it."""
        if not self._owns_world:
            return
        if self._world.workers is not None:
            self._dropped = end_when_dropped(self, self._world, self._deployment)
        else:
            self._process = os.getpid()
            atexit.register(self._end_at_exit)  # the other processes wait for this one, so it cannot just be dropped

    def _forget_end(self) -> None:
        atexit.unregister(self._end_at_exit)
        if self._dropped is not None:
            self._dropped.detach()

    def _end_at_exit(self) -> None:
        if os.getpid() != self._process:
            return  # a fork of the process that has the pipeline
        if self._end_training(wait=False) or self._closed:
            return
        problem = failed()
        try:
            if problem is not None:
                self._world.health.report(problem)  # the other processes would wait for the next stream
                self.abandon()
            elif self._feeds:
                self._deployment.leave()
            else:
                self._serve_to_end()
        except PenstockError as error:
            note(f"the pipeline was left open at the end of the program, and then {error}")
        finally:
            self._closed = True
            self._world.close()

    def _join_stages(self, make: MakeRuntime | None) -> None:
        """In a process that does not feed: receive stages and weights, or take the modules that it has."""
        try:
            job, runtimes = read_stages(self._world, receive_stages(self._world.transport), make)
            torch.set_num_threads(job.threads)
            own = self._own = OwnStages(self._world, job, runtimes)
            self._stream_ended = follow_stages(self._world, job, own.stages, own.channels, own.observer)
        except TransportError as error:
            raise self._world.explain(error) from error
        except Exception as error:
            self._world.health.report(error)
            raise

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
        if self._closed:
            raise UsageError("the pipeline is closed; make a new one")
        self._check_streams()
        if not self._feeds:
            self._serve()
            return
        shapes: deque[dict[str, int]] = deque()

        def bound() -> Iterator[Microbatch]:
            for item in inputs:
                tensors, sizes = bind_inputs(self.graph, *as_call(item))
                self._check_sizes(sizes)
                shapes.append(sizes)
                yield tensors, sizes

        try:
            with contextlib.closing(self._deployment.stream(bound())) as results:
                for tensors in results:
                    yield build_output(self.graph, tensors, shapes.popleft())
        finally:
            if self._trace is not None and self._deployment.traces:
                self._write_trace(self._trace)

    def __call__(self, *args: Any, microbatch_size: int = 1, **kwargs: Any) -> Any:
        """Run one batch of any size: cut into microbatches, streamed, and put together again.

        Gives None in a process that does not feed. A pipeline that trains gives the outputs of its current
        weights in evaluation mode, for this replica's rows, on every process of the replica. Raises
        `UsageError` for an empty batch, and where an output has no batch dimension to put together.
        """
        if self._streaming is not None or self._trainer is not None:
            return self.trainer.predict(CallInputs(args, kwargs))
        outputs = list(self.stream(self._microbatches(args, kwargs, microbatch_size)))
        if not self._feeds:
            return None
        if not outputs:
            raise UsageError("the batch is empty; give it at least one row")
        for output in self.graph.outputs:
            value = self.graph.values.get(output.name) if isinstance(output, Ref) else None
            if len(outputs) > 1 and (value is None or not value.shape or isinstance(value.shape[0], int)):
                raise UsageError("an output has no batch dimension; use stream() and combine the outputs yourself")
        return outputs[0] if len(outputs) == 1 else pytree.tree_map(lambda *parts: torch.cat(parts), *outputs)

    def _microbatches(self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> Iterator[Any]:
        if not self._feeds:
            return
        _, sizes = bind_inputs(self.graph, args, kwargs)
        batched = {v.name for v in self.graph.tensor_inputs() if v.shape and not isinstance(v.shape[0], int)}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        values = list(self.graph.inputs)
        for start in range(0, sizes.get("batch", 1), size):
            part = [
                leaf[start : start + size] if value is not None and value.name in batched else leaf
                for leaf, value in zip(leaves, values, strict=True)
            ]
            yield CallInputs(*pytree.tree_unflatten(part, spec))

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        for name, largest in self._deployment.sizes.items():
            if sizes[name] > largest:
                raise UsageError(
                    f"a microbatch with {name} {sizes[name]} is larger than the example's {largest}; "
                    "make the pipeline with an example of the largest microbatch, or send smaller ones"
                )

    def _serve(self) -> None:
        own = self._own
        try:
            self._closed = serve_stream(own.schedule(), own.stages, own.channels, own.observer) == CLOSE
            if not self._closed:
                self._stream_ended()
        except TransportError as error:
            raise self._world.explain(error) from error
        except Exception as error:
            self._world.health.report(error)
            raise

    def _serve_to_end(self) -> None:
        while not self._closed:
            self._serve()

    def _tracer(self) -> FeederTracer | None:
        if self._trace is None:
            return None
        return FeederTracer(self._world, units=self._trace_units, profile=self._trace_profile)

    def _write_trace(self, folder: Path) -> None:
        facts = stream_facts(
            self._deployment, self.last_report, model=self.model_name, cuts=[cut.name for cut in self.cuts],
            threads=self.threads, plan=self._plan,
            units=units_of(self.graph, self._deployment.sizes) if self.cuts else (),
        )  # fmt: skip
        write_run(folder, facts, self._deployment.traces)

    @property
    def last_report(self) -> StreamReport:
        """The times of the last stream, on the process that feeds."""
        return self._deployment.last_report

    def stage_states(self) -> list[StageState]:
        """Say how far each stage is, as of the last heartbeats, which come once a second; for `LiveView`."""
        return self._deployment.stage_states()

    def close(self) -> None:
        """End the stages and the worker processes; nothing is left behind."""
        if self._end_training(wait=True):
            return
        if self._closed and self._feeds:
            return
        self._forget_end()
        try:
            if self._feeds:
                self._deployment.close()
                if self._owns_world and self._world.workers is not None:
                    self._world.dismiss()
            else:
                self._serve_to_end()
        finally:
            self._closed = True
            if self._owns_world:
                self._world.close()

    def _check_streams(self) -> None:
        """A model in training mode that is streamed first was never meant to be trained."""
        if self._trainer is not None or self._captured is not None:
            if self._streaming is None or self._trainer is not None:
                raise UsageError("this pipeline trains; call it for outputs, or stream with a model in evaluation mode")
            start, self._streaming, self._captured = self._streaming, None, None
            start(self._joined)

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, GeneratorExit):
            self.close()
        else:
            if self._owns_world and not self._closed and hasattr(self, "_world"):
                self._world.health.report(error)  # the other processes would wait for the next stream
            self.abandon()

    def abandon(self) -> None:
        """Give everything up at once, without waiting for work under way."""
        if self._end_training(wait=False):
            return
        self._closed = True
        self._forget_end()
        if self._feeds:
            self._deployment.abandon()
        if self._owns_world:
            self._world.transport.abort()
            self._world.close(0.0)


def _example(args: Any, kwargs: Mapping[str, Any] | None) -> tuple[Sequence[Any], Mapping[str, Any] | None]:
    """Read the example call: a lone tensor is its one positional input, a mapping its keyword inputs."""
    if isinstance(args, torch.Tensor):
        return (args,), kwargs
    if isinstance(args, Mapping):
        return (), {**args, **(kwargs or {})}
    return args, kwargs


def threads_per_stage(world: World) -> int:
    """Share this machine's cores among the stages on it; torchrun's default of one thread is not a choice."""
    return world.cores or max(1, available_cores() // len(world.devices))
