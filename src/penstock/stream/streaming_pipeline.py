"""A model in evaluation mode as a pipeline: driven by an ordinary loop, with stages in separate processes."""

import atexit
import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.deploy.deployment import Deployment
from penstock.deploy.modules import runtime_maker
from penstock.deploy.run_options import Bundle, CutOptions, ModelCall, RunOptions
from penstock.engine.driver import Microbatch
from penstock.engine.observer import StreamReport
from penstock.engine.tracers import FeederTracer, environment
from penstock.errors import DeviceLost, OutOfMemory, PenstockError, UsageError
from penstock.graph.call import CallInputs, as_call, bind_inputs, build_output
from penstock.graph.cuts import Cut, Cuts
from penstock.graph.graph import Graph, count_work
from penstock.graph.ops import Ref
from penstock.graph.rows import batch_dim, check_rows, input_dims, take_rows
from penstock.group.entry import join_torchrun, under_torchrun
from penstock.group.world import World, end_when_dropped, failed
from penstock.plan.check import check_purpose
from penstock.resources import available_cores
from penstock.runtime.torch_settings import check_no_autocast, check_unchanged, read_settings
from penstock.spec.plan import Plan
from penstock.stream.division import ServedStages, StreamedModule, divide_model
from penstock.stream.survival import StreamChange, SurvivingDeployment
from penstock.tensors import find_device
from penstock.terminal.progress import working
from penstock.text import note
from penstock.tracing.trace import GenerationFacts, RunFacts, StageTotals, write_run
from penstock.wire import FEEDER

NO_AUTOCAST = "convert the model to the wanted dtype, or use runtime='eager:bfloat16'"


class StreamingPipeline:
    """Implementation of `penstock.Pipeline` for evaluation mode; see there.

    It uses the processes that torchrun started, or starts its own. With `owns_world`, they end with the pipeline.
    """

    def __init__(
        self, call: ModelCall, cut: CutOptions, run: RunOptions, world: World | None = None, *, owns_world: bool = True
    ) -> None:
        self.model_name = type(call.model).__name__
        self.graph: Graph
        self.cuts: Sequence[Cut] = ()
        self.deployment: Deployment  # on the driver
        self._run, self._plan = run, cut.plan
        self._owns_world = owns_world
        self._bundle = call.model.folder if isinstance(call.model, Bundle) else None
        self._dropped: weakref.finalize[..., object] | None = None
        self._stages: ServedStages | None = None  # on the other ranks
        self._closed = False
        self._source: StreamedModule | None = None
        self._changes = False  # the running stream should stop so that the placement can change
        if cut.plan is not None:
            check_purpose(cut.plan, trains=False)
        if world is None and under_torchrun():
            world = join_torchrun(again=run.on_loss.survives)
        elif world is None:
            # before anything is started; other worlds may have GPUs that this process lacks
            run.runtime.place(find_device(run.device))
        if world is not None and world.rank != FEEDER:
            self.world = world
            make = runtime_maker(call.model, None) if isinstance(call.model, Sequence) else None
            self._stages = ServedStages(world, make, self._bundle)
        else:
            self._place(call, cut, world)
        self._look_after_end()

    @property
    def feeds(self) -> bool:
        """True if this process is the driver."""
        return self._stages is None

    def _place(self, call: ModelCall, cut: CutOptions, world: World | None) -> None:
        """Deploy the stages."""
        try:
            check_no_autocast(NO_AUTOCAST)
            self._torch_settings = read_settings()
            with working("capturing the model" if self._bundle is None else "reading the bundle"):
                division = divide_model(call, cut, self._run, world)
            self.graph, self.cuts = division.graph, division.cuts
            if isinstance(call.model, nn.Module):
                self._source = StreamedModule(call.model, self.graph, reads_weights=call.weights is None)
            world = self.world = world or division.start_world()
            if self._run.on_loss.survives and world.membership is None:
                raise UsageError(
                    "on_loss needs processes that survive a lost one, but torchrun ends them all; use penstock hosts "
                    "run or a lab, or leave on_loss out"
                )
            world.between_gpus = self._run.between_gpus
            self.threads = self._run.threads or threads_per_stage(world)
            trace = self._run.trace
            tracer = FeederTracer(world, units=trace.units, profile=trace.profiler) if trace is not None else None
            with working("putting the stages in place"):
                self.deployment = division.deploy(world, self.threads, tracer)
            self._check_idle(world)
        except BaseException as error:
            if world is not None and self._owns_world:
                world.health.report(error)  # the other processes wait for their stages
                world.close(0.0)
            raise

    def _check_idle(self, world: World) -> None:
        """Raise `UsageError` for a process without a stage that would wait for a stage until the end."""
        holders = {rank for pipeline in self.deployment.pipelines for rank in pipeline.job.holders}
        idle = sorted(set(world.devices) - holders)
        if idle and world.workers is None and not world.followed and not self._run.on_loss.survives:
            raise UsageError(
                f"{len(world.devices)} processes were started, but the stages are on {len(holders)} of them: "
                f"{', '.join(f'rank {rank}' for rank in idle)} would have none; start {len(holders)} processes, or ask "
                "for more stages"
            )

    def _look_after_end(self) -> None:
        """Close the pipeline at exit if the caller did not; leaving it open is not an error."""
        if not self._owns_world:
            return
        if self.world.workers is not None:
            self._dropped = end_when_dropped(self, self.world, self.deployment)
        else:
            self._process = os.getpid()
            # the other processes wait for this one, so it ends at exit, not when it is garbage-collected
            atexit.register(self._end_at_exit)

    def _forget_end(self) -> None:
        atexit.unregister(self._end_at_exit)
        if self._dropped is not None:
            self._dropped.detach()

    def _end_at_exit(self) -> None:
        if os.getpid() != self._process:
            return  # a fork of the process that has the pipeline
        if self._closed:
            return
        problem = failed()
        try:
            if problem is not None:
                self.world.health.report(problem)  # the other processes would wait for the next stream
                self.abandon()
            elif self._stages is None:
                self.deployment.leave()
            else:
                self._stages.serve_to_end()
        except PenstockError as error:
            note(f"closing a pipeline left open at exit failed: {error}")
        finally:
            self._closed = True
            self.world.close()

    def stream(self, inputs: Iterable[Any]) -> Iterator[Any]:
        """Return the model's output for every input, in order; on ranks other than the driver, serve the stream."""
        if self._closed:
            raise UsageError("the pipeline is closed; make a new one")
        if self._stages is not None:
            self._stages.serve()
            self._closed = self._stages.closed
            return
        self.check_settings()
        shapes: deque[dict[str, int]] = deque()

        def bound() -> Iterator[Microbatch]:
            for item in inputs:
                tensors, sizes = bind_inputs(self.graph, *as_call(item))
                self.check_sizes(sizes)
                shapes.append(sizes)
                yield tensors, sizes

        try:
            with contextlib.closing(self.deployment.stream(bound())) as results:
                for tensors in results:
                    yield build_output(self.graph, tensors, shapes.popleft())
        finally:
            if self.deployment.traces:
                self.write_trace(self.deployment.last_report)

    def run_over_losses(
        self, stream: Callable[[], None], num_pending: Callable[[], int], begin_again: Callable[[], None]
    ) -> None:
        """Run a stream to its end, and again after each lost device if the stages survive that, else raise the error.

        `num_pending` returns the number of inputs without a result, which `begin_again` queues to be sent again. If
        `wants_change` returns True, the stream must return as soon as nothing is in flight; it is run again after the
        change.
        """
        while True:
            self._changes = False
            try:
                stream()
                if not self._changes:
                    return
                if isinstance(self.deployment, SurvivingDeployment):
                    self.deployment.change()
            except (DeviceLost, OutOfMemory) as error:
                if not isinstance(self.deployment, SurvivingDeployment):
                    raise
                self.deployment.recover(error, num_pending())
            begin_again()

    def wants_change(self, *, by_speed: bool = True) -> bool:
        """Return True if the stages should switch to other devices or another plan."""
        if not self._changes and isinstance(self.deployment, SurvivingDeployment):
            self._changes = self.deployment.wants_change(by_speed=by_speed)
        return self._changes

    @property
    def joins_at(self) -> str | None:
        """Address at which a device can join this run; None if the run admits no devices."""
        membership = self.world.membership
        if membership is None or not self.world.followed:
            return None
        return f"{membership.rendezvous.address}:{membership.rendezvous.port}"

    @property
    def changes(self) -> Sequence[StreamChange]:
        """Placement changes during the last stream; empty unless the stages survive lost devices."""
        return self.deployment.changes if isinstance(self.deployment, SurvivingDeployment) else ()

    def __call__(self, *args: Any, microbatch_size: int = 1, **kwargs: Any) -> Any:
        """Run one batch of any size: split it into microbatches, stream them and concatenate the outputs."""
        if microbatch_size < 1:
            raise UsageError(f"microbatch_size must be at least 1; got {microbatch_size}")
        if not self.feeds:
            return next(iter(self.stream(())), None)
        _, sizes = bind_inputs(self.graph, args, kwargs)
        rows = sizes.get("batch", 1)
        if not rows:
            raise UsageError("the batch is empty; give it at least one row")
        if rows > microbatch_size and self._bundle is not None:
            raise UsageError(
                f"a bundle does not show whether rows of a batch are independent, so {rows} rows cannot be cut into "
                "microbatches; call stream() with inputs of as many rows as the plan has"
            )
        if rows > microbatch_size:
            check_rows(
                self.graph,
                sizes,
                f"run it as one microbatch, with microbatch_size={rows} and an example of {rows} rows, or "
                "call stream() with inputs whose rows belong together; each input is then one microbatch",
            )
        outputs = list(self.stream(self._microbatches(args, kwargs, rows, microbatch_size)))
        if len(outputs) == 1:
            return outputs[0]
        names = [output.name for output in self.graph.outputs if isinstance(output, Ref)]
        dims = [batch_dim(self.graph.values[name]) or 0 for name in names]
        leaves = zip(*map(pytree.tree_leaves, outputs), strict=True)
        joined = [torch.cat(parts, dim) for parts, dim in zip(leaves, dims, strict=True)]
        return pytree.tree_unflatten(joined, pytree.tree_structure(outputs[0]))

    def _microbatches(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, size: int) -> Iterator[Any]:
        dims = input_dims(self.graph) if rows > size else {}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for start in range(0, rows, size):
            part = [
                leaf if value is None else take_rows(leaf, dims.get(value.name), range(start, min(start + size, rows)))
                for leaf, value in zip(leaves, self.graph.inputs, strict=True)
            ]
            yield CallInputs(*pytree.tree_unflatten(part, spec))

    def check_settings(self) -> None:
        """Raise `UsageError` if torch's settings, or the model, differ from those of the stages."""
        if self._source is not None:
            self._source.check_unchanged()
        check_no_autocast(NO_AUTOCAST)
        check_unchanged(self._torch_settings)

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raise `UsageError` for a microbatch that is larger than the example, or than those of a bundle's plan."""
        whose, advice = "example's", "make the pipeline with an example of the largest microbatch"
        if self._bundle is not None:
            whose, advice = "plan's", "plan for larger microbatches and bundle again"
        for name, largest in self.deployment.sizes.items():
            if sizes[name] > largest:
                raise UsageError(
                    f"a microbatch with {name} {sizes[name]} is larger than the {whose} {largest}; {advice}, or send "
                    "smaller ones"
                )

    def write_trace(self, report: StreamReport, generation: GenerationFacts | None = None) -> None:
        """Write the folder of a traced stream that has ended, with the cost of each possible cut for a plain stream."""
        alike = generation is None and list(Cuts(self.graph))
        facts = stream_facts(
            self.deployment,
            report,
            model=self.model_name,
            cuts=[cut.name for cut in self.cuts],
            threads=self.threads,
            plan=self._plan,
            units=units_of(self.graph, self.deployment.sizes) if alike else (),
            generation=generation,
        )
        if self._run.trace is not None:
            write_run(self._run.trace.folder, facts, self.deployment.traces)

    def close(self) -> None:
        """Stop the stages and the worker processes."""
        if self._closed and self.feeds:
            return
        self._forget_end()
        with self.world if self._owns_world else contextlib.nullcontext():
            try:
                if self._stages is None:
                    self.deployment.close()
                elif not self._closed:
                    self._stages.serve_to_end()
            finally:
                self._closed = True

    def end(self, error: BaseException | None) -> None:
        """Close cleanly, or abort because of an error of the caller."""
        if error is None or isinstance(error, GeneratorExit):
            self.close()
            return
        if self._owns_world and not self._closed:
            self.world.health.report(error)  # the other processes would wait for the next stream
        self.abandon()

    def abandon(self) -> None:
        """Abort immediately, without waiting for work in flight."""
        self._closed = True
        self._forget_end()
        if self.feeds:
            self.deployment.abandon()
        if self._owns_world:
            self.world.transport.abort()
            self.world.close(0.0)


def threads_per_stage(world: World) -> int:
    """Divide this machine's cores among its stages; ignores torchrun's default of one thread, which nobody chose."""
    return world.cores or max(1, available_cores() // len(world.devices))


def stream_facts(
    deployment: Deployment,
    report: StreamReport,
    *,
    model: str,
    cuts: Sequence[str],
    threads: int,
    plan: Plan | None = None,
    units: Sequence[tuple[str, float, float]] = (),
    generation: GenerationFacts | None = None,
) -> RunFacts:
    """Describe a stream that has ended, for its run's folder."""
    parts = deployment.pipelines
    world = deployment.world
    return RunFacts(
        kind="stream", model=model, cuts=tuple(cuts), threads=threads, depth=parts[0].job.options.depth,
        ranks=tuple(rank for part in parts for rank in part.job.ranks),
        pipelines=tuple(len(part.job.ranks) for part in parts), turns=deployment.order,
        devices=tuple(world.names), hosts=tuple(world.hosts), bandwidths=tuple(world.bandwidths),
        num_microbatches=report.num_microbatches, num_rows=report.num_rows, total_s=report.total_s,
        results_s=tuple(report.results_s), stages=tuple(StageTotals(**asdict(stage)) for stage in report.stages),
        environment=environment(), plan=msgspec.to_builtins(plan) if plan is not None else None,
        units=tuple(units), generation=generation,
    )  # fmt: skip


def units_of(graph: Graph, sizes: Mapping[str, int]) -> list[tuple[str, float, float]]:
    """Return the units between possible cuts: name of the cut before each, counted work, bytes that cross."""
    work = count_work(graph, sizes)
    cuts = list(Cuts(graph))
    bounds = [0, *(cut.position for cut in cuts), len(work)]
    inputs = float(sum(value.num_bytes(sizes) for value in graph.tensor_inputs()))
    fronts = [("input", inputs), *((cut.name, float(cut.num_bytes(sizes))) for cut in cuts)]
    return [(name, sum(work[a:b]), num) for (name, num), (a, b) in zip(fronts, pairwise(bounds), strict=True)]
