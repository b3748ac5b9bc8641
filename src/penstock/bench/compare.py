"""Compare pipelines with one process on the same devices, in one run."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.bench.references import Baseline, Ceilings, PeerSettings, WholeModel, block_after, do_peer
from penstock.bench.samples import Difference, Measured, Samples, limit_of
from penstock.deploy.deployment import Deployment, deploy_pipeline, place, ranks_of
from penstock.deploy.jobs import FromWeights, write_document
from penstock.deploy.policies import best_blocks, choose_cuts, divide_by_sets
from penstock.deploy.run_options import RunOptions
from penstock.deploy.state import load_state
from penstock.engine.driver import DeployedPipeline
from penstock.engine.tracers import FeederTracer
from penstock.errors import RunError
from penstock.graph.capture import capture
from penstock.graph.cuts import Cut, Cuts, divide
from penstock.graph.graph import count_work
from penstock.graph.ops import State
from penstock.group.world import World, assign_stages
from penstock.plan.search.partition import stage_sums
from penstock.resources import available_cores
from penstock.runtime.registry import EAGER, parse_runtime
from penstock.spec.plan import Plan
from penstock.spec.settings import BenchSettings
from penstock.stream.streaming_pipeline import stream_facts
from penstock.tracing.trace import Run, make_run
from penstock.transport.base import WORD_BYTES, receive_bytes, send_bytes
from penstock.zoo.models.models import ZooModel

_EXPECTED = 0.8  # assumed fraction of the devices' limit


class Comparison:
    """One model on the processes of one world; each method measures one row of the table.

    All rows have the same inputs and are compared with the outputs of the serial run.
    """

    def __init__(self, zoo: ZooModel, world: World, options: BenchSettings, *, max_stages: int) -> None:
        self.last_run: Run | None = None  # run recorded in the last row's last pass
        self._zoo, self._world, self._options = zoo, world, options
        self._number = 0
        self.graph = capture(zoo.module, zoo.example_args, zoo.example_kwargs)
        self._rows = self.graph.fixed_batch or options.microbatch_size
        self._sizes = self.graph.sizes(self._rows)
        self._num_microbatches = max(1, options.num_images // self._rows)
        threads = self._threads = options.threads or world.cores or max(1, available_cores() // max_stages)
        self._run = RunOptions(
            threads=threads, depth=options.depth, device=options.device, runtime=parse_runtime(options.runtime)
        )
        self._samples = Samples(zoo, self.graph, self._sizes)
        self._whole = WholeModel(
            world,
            divide(self.graph, [])[0],
            self._load,
            inputs=self._samples.inputs,
            sizes=self._sizes,
            threads=self._threads,
            computes_on=options.device,
        )
        self._ceilings = self._limited_by(self._whole)
        # one device before and after each row: the machine's speed drifts, and other work comes and goes
        self._alone = Ceilings(
            self._whole, world.devices[:1], num_microbatches=max(4, self._num_microbatches // 8), rows=self._rows
        )
        self._serial_images_per_s = self._alone_at_first = 0.0
        self._peers: dict[int, float] = {}
        self._num_serial = max(1, (options.serial_images or options.num_images * options.passes) // self._rows)

    def take_limit_from(self, make: Callable[[WholeModel], Baseline]) -> None:
        """Replace the single-device baseline by another baseline, made from the whole model."""
        self._ceilings = self._limited_by(make(self._whole))

    def _limited_by(self, baseline: Baseline) -> Ceilings:
        count = max(8, self._num_microbatches // 4)
        return Ceilings(baseline, self._world.devices, num_microbatches=count, rows=self._rows)

    @property
    def world(self) -> World:
        """The processes that are measured."""
        return self._world

    def settings(self) -> dict[str, Any]:
        """Return the settings common to all rows."""
        return {
            "num_images": self._num_microbatches * self._rows,
            "passes": self._options.passes,
            "microbatch_size": self._rows,
            "threads": self._threads,
            "depth": self._options.depth,
            "computes_on": self._options.device,
            "runtime": self._options.runtime,
            "devices": [self._world.names[rank] for rank in self._world.devices],
            "torch": torch.__version__,
        }

    def serial(self) -> dict[str, Any]:
        """Run the whole model on each device in sequence, and report the mean."""
        # workers on this machine are identical, so one represents all
        devices = self._world.devices[:1] if self._world.workers else self._world.devices
        rates = []
        for rank in devices:
            outputs, seconds = self._whole.run([rank], self._num_serial)
            self._samples.expect(outputs)
            rates.append(self._num_serial * self._rows / seconds[0])
        self._serial_images_per_s = sum(rates) / len(rates)
        (self._alone_at_first,) = self._alone.before(1)
        return {
            "mode": "serial", "stages": 1, "policy": None, "runtime": EAGER.name, "cuts": [],
            "images_per_second": self._serial_images_per_s, "speedup": 1.0, "bit_equal": True,
            "max_abs_difference": 0.0, "fill_s": 0.0, "efficiency": None,
            "ceiling_images_per_second": None, "per_stage": [], "peer_images_per_second": None,
        }  # fmt: skip

    def expected_s(self, num_devices: int) -> float:
        """Estimate the seconds of a row on a number of devices, from the rate of the serial run."""
        count = min(num_devices, len(self._world.devices))
        images = self._num_microbatches * self._rows * self._options.passes
        # the baseline of one device runs before and after
        alone = 2 * max(8, self._num_microbatches // 4) * self._rows
        return (images / (_EXPECTED * count) + alone) / self._serial_images_per_s

    def pipeline(self, stages: int, *, policy: str | None = None, cuts: Sequence[str] | None = None) -> dict[str, Any]:
        """Stream through a number of stages."""
        world = dataclasses.replace(self._world, devices=self._world.devices[:stages])
        ranks = assign_stages(world, stages)
        chosen = choose_cuts(
            self.graph,
            Cuts(self.graph),
            names=cuts,
            stages=stages,
            policy=policy or "balanced",
            sizes=self._sizes,
            places=ranks,
        )
        measured = self._stream(
            lambda: Deployment(world, [self._pipeline(world, chosen)]), len(world.devices), stages, chosen
        )
        names = [cut.name for cut in chosen]
        row = measured.row("pipeline", stages, policy or "by hand", names, self._options.runtime)
        sums = stage_sums(count_work(self.graph, self._sizes), [cut.position for cut in chosen])
        row["shares"] = [work / sum(sums) for work in sums]
        row["crossing_bytes"] = [cut.num_bytes(self._sizes) for cut in chosen]
        limit = limit_of(world, ranks, row["crossing_bytes"], measured.reports)
        return row | {"peer_images_per_second": self._peers.get(stages), "limit": limit}

    def replicas(self, count: int) -> dict[str, Any]:
        """Stream through the whole model on `count` devices, round-robin."""
        ranks = self._world.devices[:count]

        def deploy() -> Deployment:
            return Deployment(self._world, [self._pipeline(self._world, [], [rank]) for rank in ranks])

        return self._stream(deploy, len(ranks), len(ranks)).row("replicas", 1, "replicas", [], self._options.runtime)

    def _pipeline(self, world: World, cuts: Sequence[Cut], ranks: Sequence[int] | None = None) -> DeployedPipeline:
        self._number += 1
        return deploy_pipeline(
            world,
            divide_by_sets(self.graph, [cuts]),
            FromWeights(self._load),
            self._run,
            sizes=self._sizes,
            ranks=ranks,
            number=self._number,
            tracer=FeederTracer(world) if self._options.report else None,
        )

    def baseline(self, times: int) -> list[float]:
        """Return the rows per second of every device with the whole model, in parallel: the mean of `times` runs."""
        return self._ceilings.typical(len(self._world.devices), times)

    def planned(self, plan: Plan) -> dict[str, Any]:
        """Stream by a plan, on its devices."""
        ranks = ranks_of(self._world, plan.devices)

        def deploy() -> Deployment:
            number, self._number = self._number + 1, self._number + len(plan.pipelines)
            return place(self._world, self.graph, plan, self._load, self._run, number=number)

        measured = self._stream(deploy, len(self._world.devices), len(ranks))
        cuts = [", ".join(cut_set.cuts) for pipeline in plan.pipelines for cut_set in pipeline.cut_sets]
        row = measured.row("pipeline", len(ranks), "plan", cuts, ", ".join(plan.runtimes))
        return row | {"predicted_images_per_second": plan.prediction.rows_per_s}

    def peer(self, stages: int) -> dict[str, Any]:
        """Run torch.distributed.pipelining with the same number of stages and its best cuts between blocks.

        Rows of pipelines measured later in this run have the figure as `peer_images_per_second`.
        """
        possible = Cuts(self.graph)
        chosen = best_blocks(self.graph, possible, stages=stages, sizes=self._sizes)
        modules = [block_after(cut) for cut in chosen]
        ranks = self._world.devices[:stages]
        self._number += 1
        count = self._num_microbatches
        settings = PeerSettings(
            modules=tuple(modules),
            ranks=tuple(ranks),
            num_microbatches=count,
            threads=self._threads,
            number=self._number,
        )
        transport = self._world.transport
        others = [rank for rank in ranks if rank != self._world.rank]
        with self._alone.around(1) as alone:
            for rank in others:
                send_bytes(transport, write_document(settings.document()), rank)
            seconds = do_peer(self._world, settings, self._zoo.name, self._options.seed)
            for rank in others:
                seconds = float(json.loads(receive_bytes(transport, rank, limit=WORD_BYTES)))
        if seconds is None:
            raise RunError("no device took part in the peer's run")
        self._ceilings.forget()
        self._peers[stages] = rate = count * self._rows / seconds
        return {
            "mode": "peer", "stages": stages, "policy": "best blocks", "runtime": EAGER.name,
            "cuts": [f"{name}:before" for name in modules],
            "images_per_second": rate, "speedup": rate / self._serial_around(alone), "bit_equal": None,
            "max_abs_difference": None, "fill_s": None, "efficiency": None, "ceiling_images_per_second": None,
            "per_stage": [], "peer_images_per_second": rate,
        }  # fmt: skip

    def _stream(
        self, deploy: Callable[[], Deployment], num_devices: int, stages: int, cuts: Sequence[Cut] = ()
    ) -> Measured:
        """Warm up, then stream all passes and compare every result.

        The single-device baseline is measured before and after all passes, or around each if it can run next to the
        stages.
        """
        difference = self._samples.difference()
        reports = []
        rates: list[Sequence[float]] = []
        with self._alone.around(1) as alone, self._limit(num_devices, rates, beside=False):
            deployment = deploy()
            self._pass(deployment, min(self._num_microbatches, 10 * stages), difference)
            for _ in range(self._options.passes):
                with self._limit(num_devices, rates, beside=True):
                    self._pass(deployment, self._num_microbatches, difference)
                reports.append(deployment.last_report)
            self.last_run = self._recorded(deployment, cuts) if deployment.traces else None
            deployment.close()
        return Measured(reports, difference, rates, self._serial_around(alone), self._serial_images_per_s)

    def _serial_around(self, alone: Sequence[float]) -> float:
        """Return the serial rate as it would have been around a row, from one device's rate then and at first."""
        return self._serial_images_per_s * alone[0] / self._alone_at_first

    def _pass(self, deployment: Deployment, length: int, difference: Difference) -> None:
        for index, outputs in enumerate(deployment.stream(self._samples.feed(length))):
            difference.add(index, outputs)

    @contextlib.contextmanager
    def _limit(self, num_devices: int, rates: list[Sequence[float]], *, beside: bool) -> Iterator[None]:
        """Measure the limit before and after the block, if the ceilings match `beside`."""
        if beside != self._ceilings.beside:
            yield
            return
        with self._ceilings.around(num_devices) as measured:
            yield
        rates.append(measured)

    def _recorded(self, deployment: Deployment, cuts: Sequence[Cut]) -> Run:
        """Return the traces of the last stream as a run."""
        facts = stream_facts(
            deployment,
            deployment.last_report,
            model=self._zoo.name,
            cuts=[cut.name for cut in cuts],
            threads=self._threads,
        )
        return make_run(facts, deployment.traces)

    def _load(self, state: State) -> Tensor:
        return load_state(self.graph, state, self._zoo.weights)
