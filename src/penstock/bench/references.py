"""References for pipelines on the same devices: single devices with the whole model, and torch's own pipelining.

The throughput of single devices, summed, is the limit. The peer, torch.distributed.pipelining, is cut with `pipeline()`
at the given modules, and ScheduleGPipe runs one microbatch for each image, all in one step. Unlike with Penstock's
stages, every process builds the whole model itself, from the name on its own command line: no message can make a
process load a model.
"""

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.deploy.bundle import LoadState
from penstock.deploy.jobs import (
    DoMore,
    ask_baseline,
    check_settings,
    collect_baseline,
    load_programs,
    release_baselines,
    run_baseline,
)
from penstock.deploy.worker import Job, main
from penstock.graph.cuts import Cut
from penstock.graph.program import StageProgram
from penstock.group.entry import start_local
from penstock.group.world import World
from penstock.tensors import find_device
from penstock.wire import FEEDER
from penstock.zoo.models.models import load_model


class Baseline(Protocol):
    """Interface of a baseline that runs the whole model on single devices."""

    @property
    def beside(self) -> bool:
        """True if the baseline can run while stages are deployed."""

    def run(self, ranks: Sequence[int], count: int) -> tuple[list[list[Tensor]], list[float]]:
        """Run `count` microbatches on each of these ranks in parallel; return outputs, and the seconds of each rank."""


class WholeModel:
    """Runs the whole model on single devices of a world, with inputs and outputs in memory.

    Example:
        outputs, seconds = WholeModel(world, program, load, inputs=inputs, sizes=sizes, threads=1).run([0, 1], 50)
    """

    beside = False

    def __init__(
        self,
        world: World,
        program: StageProgram,
        load: LoadState,
        *,
        inputs: Sequence[Sequence[Tensor]],
        sizes: Mapping[str, int],
        threads: int,
        computes_on: str = "cpu",
    ) -> None:
        self._world, self._computes_on = world, computes_on
        self.program, self.load, self.inputs, self.sizes, self.threads = program, load, inputs, sizes, threads

    def run(self, ranks: Sequence[int], count: int) -> tuple[list[list[Tensor]], list[float]]:
        """Run `count` microbatches on each of these ranks in parallel.

        Returns the first rank's outputs, one list for each distinct input, and the seconds of each rank.
        """
        others = [rank for rank in ranks if rank != FEEDER]
        transport = self._world.transport
        for rank in others:
            ask_baseline(
                transport,
                rank,
                self.program,
                self.load,
                inputs=self.inputs,
                sizes=self.sizes,
                num_microbatches=count,
                threads=self.threads,
                computes_on=self._computes_on,
            )
        release_baselines(transport, others)
        results: list[tuple[list[list[Tensor]], float]] = []
        if FEEDER in ranks:
            torch.set_num_threads(self.threads)
            device = find_device(self._computes_on, self._world.position)
            runtime = load_programs([self.program], self.load, device)[0]
            results.append(run_baseline(runtime, self.sizes, self.inputs, count))
        results += [collect_baseline(transport, rank, self.program, self.sizes, len(self.inputs)) for rank in others]
        return results[0][0], [seconds for _, seconds in results]


class Ceilings:
    """Rows per second of single devices, running in parallel, measured before and after each compared run.

    A machine's speed drifts by more than the effects to be measured, so the limit of a run is the mean of two
    measurements, immediately before and after it. The measurement after a run is also used as the one before the next
    run.

    Example:
        ceilings = Ceilings(whole, world.devices, num_microbatches=50, rows=1)
        with ceilings.around(4) as rates:
            ...  # the run
        limit = sum(rates)
    """

    def __init__(self, whole: Baseline, devices: Sequence[int], *, num_microbatches: int, rows: int) -> None:
        self._whole, self._devices = whole, devices
        self._num_microbatches, self._rows = num_microbatches, rows
        self._last: dict[int, list[float]] = {}

    @property
    def beside(self) -> bool:
        """True if single devices can be measured while stages are deployed."""
        return self._whole.beside

    def before(self, num_devices: int) -> list[float]:
        """Return the rate of each of the first devices, reusing the measurement at the end of the previous run."""
        if num_devices not in self._last:
            self._last = {num_devices: self._measure(num_devices)}
        return self._last[num_devices]

    def typical(self, num_devices: int, times: int) -> list[float]:
        """Return each device's mean rate over `times` measurements: a single measurement may overestimate a device."""
        measured = [self.before(num_devices)]
        while len(measured) < times:
            self.forget()
            measured.append(self.before(num_devices))
        return [sum(rates) / len(rates) for rates in zip(*measured, strict=True)]

    @contextmanager
    def around(self, num_devices: int) -> Iterator[list[float]]:
        """Measure before and after the block; the yielded list then has each device's mean rate."""
        before = self.before(num_devices)
        rates: list[float] = []
        yield rates
        after = self._measure(num_devices)
        self._last = {num_devices: after}
        rates += [(first + second) / 2 for first, second in zip(before, after, strict=True)]

    def forget(self) -> None:
        """Discard the last measurement; call this if something else has run since."""
        self._last.clear()

    def _measure(self, num_devices: int) -> list[float]:
        _, seconds = self._whole.run(self._devices[:num_devices], self._num_microbatches)
        return [self._num_microbatches * self._rows / taken for taken in seconds]


PEER = "peer"
_TIMEOUT = datetime.timedelta(minutes=30)


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of the peer: the first modules of later stages, such as `("blocks.3", "blocks.6")`, ranks, microbatches."""

    modules: tuple[str, ...]
    ranks: tuple[int, ...]
    num_microbatches: int
    threads: int
    number: int

    def document(self) -> DoMore:
        """Return the job for the other processes, which read the model's name from their command line."""
        return DoMore(name=PEER, settings=msgspec.to_builtins(self))


def run_peer(world: World, settings: PeerSettings, model: nn.Module, example: Tensor) -> float:
    """Run the peer's pipeline on the participating ranks; each returns the seconds of the slowest rank.

    `example` is one microbatch. Raises torch's exceptions if torch cannot cut the model.
    """
    # imported only if the peer runs: it imports torch.export, which takes a good part of a second
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    torch.set_num_threads(settings.threads)
    ranks, num_microbatches = settings.ranks, settings.num_microbatches
    store = dist.PrefixStore(f"peer/{settings.number}", world.store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=ranks.index(world.rank), world_size=len(ranks), timeout=_TIMEOUT)
    try:
        with torch.no_grad():
            split = dict.fromkeys(settings.modules, SplitPoint.BEGINNING)
            pipe = pipeline(model, mb_args=(example,), split_spec=split)
            stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
            inputs = torch.cat([example] * num_microbatches)
            # the first step also sets up connections and buffers
            _step(ScheduleGPipe(stage, n_microbatches=2), inputs[: 2 * len(example)])
            schedule = ScheduleGPipe(stage, n_microbatches=num_microbatches)
            dist.barrier()
            begin = time.perf_counter()
            _step(schedule, inputs)
            seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            return float(seconds)
    finally:
        dist.destroy_process_group()


def _step(schedule: Any, inputs: Tensor) -> None:
    if dist.get_rank() == 0:
        schedule.step(inputs)
    else:
        schedule.step()


def block_after(cut: Cut) -> str:
    """Return the name of the module that begins at a cut between blocks, as the peer expects it."""
    names = [name.removesuffix(":before") for name in (cut.name, *cut.aliases) if name.endswith(":before")]
    return min((name for name in names if "/" not in name), key=len)


def do_peer(world: World, settings: PeerSettings, model: str, seed: int) -> float | None:
    """Take part in a run of the model on this process's own command line."""
    if world.rank not in settings.ranks:
        return None
    zoo = load_model(model, seed=seed, whole=True)
    inputs = [x for x in [*zoo.example_args, *zoo.example_kwargs.values()] if isinstance(x, Tensor)]
    return run_peer(world, settings, zoo.module, inputs[0][:1])


def peer_job(model: str, seed: int) -> dict[str, Job]:
    """Return the job of a process of `penstock bench --set peer=true`; see `deploy.worker.work`."""
    return {PEER: lambda world, settings: do_peer(world, check_settings(settings, PeerSettings), model, seed)}


def start_peers(num_workers: int, model: str, seed: int) -> World:
    """Start workers on this machine that can also run the peer of this model."""
    return start_local(
        num_workers, module="penstock.bench.references", arguments=["--model", model, "--seed", str(seed)]
    )


def _prepare(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], Mapping[str, Job]]:
    parser.add_argument("--model", required=True)
    parser.add_argument("--seed", type=int, required=True)
    return lambda given: peer_job(given.model, given.seed)


if __name__ == "__main__":
    sys.exit(main(_prepare))
