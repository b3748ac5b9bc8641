"""Throughput of single devices that run the whole model; the sum is the limit for pipelines."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from penstock.deploy.bundle import LoadState
from penstock.deploy.jobs import ask_baseline, collect_baseline, load_programs, release_baselines, run_baseline
from penstock.graph.program import StageProgram
from penstock.group.world import World
from penstock.tensors import find_device
from penstock.wire import FEEDER


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
        self, world: World, program: StageProgram, load: LoadState, *,
        inputs: Sequence[Sequence[Tensor]], sizes: Mapping[str, int], threads: int, computes_on: str = "cpu",
    ) -> None:  # fmt: skip
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
                transport, rank, self.program, self.load, inputs=self.inputs, sizes=self.sizes,
                num_microbatches=count, threads=self.threads, computes_on=self._computes_on,
            )  # fmt: skip
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
