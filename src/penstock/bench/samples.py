"""Inputs with known results, measurements of streaming them through a row's pipeline, and the row's bottleneck."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.driver import Microbatch
from penstock.engine.observer import StreamReport
from penstock.graph.graph import Graph
from penstock.group.world import World
from penstock.measure.costs import random_input
from penstock.units import format_bytes, format_rate, format_seconds
from penstock.zoo.models.models import ZooModel

_NUM_DISTINCT = 8
_DRIFT, _MOST_EFFICIENT = 0.1, 1.05  # beyond these a row's figures are not believed


class Samples:
    """A few distinct inputs of a model, which a stream takes round-robin, and their expected results.

    Example:
        samples = Samples(zoo, graph, {"batch": 1})
        samples.expect(outputs)                    # outputs of one process: a list for each of samples.inputs
        difference = samples.difference()
        for index, outputs in enumerate(deployment.stream(samples.feed(200))):
            difference.add(index, outputs)
    """

    def __init__(self, zoo: ZooModel, graph: Graph, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        generator = torch.Generator().manual_seed(0)
        self.inputs = [
            [_example_input(zoo, graph, i, sizes, generator) for i in range(len(graph.tensor_inputs()))]
            for _ in range(_NUM_DISTINCT)
        ]
        self._expected: Sequence[Sequence[Tensor]] = ()

    def expect(self, outputs: Sequence[Sequence[Tensor]]) -> None:
        """Set the expected outputs, unless already set."""
        self._expected = self._expected or outputs

    def feed(self, count: int) -> Iterator[Microbatch]:
        """Yield this many microbatches."""
        for index in range(count):
            yield self.inputs[index % _NUM_DISTINCT], self._sizes

    def difference(self) -> "Difference":
        """Return a new comparison for the results of a stream."""
        return Difference(self._expected)


class Difference:
    """Difference between actual and expected results: equality, largest distance, top-1 agreement."""

    def __init__(self, expected: Sequence[Sequence[Tensor]]) -> None:
        self._expected = expected
        self.equal = True
        self.largest = 0.0
        self._alike = self._rows = 0

    def add(self, index: int, outputs: Sequence[Tensor]) -> None:
        """Compare the result of one microbatch."""
        for expected, given in zip(self._expected[index % _NUM_DISTINCT], outputs, strict=True):
            if not torch.equal(expected, given):
                self.equal = False
                self.largest = max(self.largest, float((expected - given).abs().max()))
            if given.dim() == 2 and given.is_floating_point():
                self._alike += int((expected.argmax(1) == given.argmax(1)).sum())
                self._rows += len(given)

    @property
    def top1_agreement(self) -> float | None:
        """Fraction of rows whose largest output has the same index; None if outputs are not scores of rows."""
        return self._alike / self._rows if self._rows else None


def _example_input(
    zoo: ZooModel, graph: Graph, index: int, sizes: Mapping[str, int], generator: torch.Generator
) -> Tensor:
    """Make an input like the example, with other values."""
    value = graph.tensor_inputs()[index]
    if value.dtype.is_floating_point:
        return random_input(value, dict(sizes), generator)
    examples = [x for x in [*zoo.example_args, *zoo.example_kwargs.values()] if isinstance(x, Tensor)]
    example = examples[index]
    shape = value.evaluate(sizes)
    if example.dtype == torch.bool or int(example.max()) <= 1:
        return example[:1].expand(shape).clone() if example.dim() else example.clone()
    return torch.randint(0, int(example.max()) + 1, shape, generator=generator, dtype=value.dtype)


@dataclass(frozen=True, slots=True)
class Measured:
    """The report of each pass, the comparison of results, and the rates of single devices and of the serial run."""

    reports: list[StreamReport]
    difference: Difference
    rates: Sequence[Sequence[float]]  # measured around all passes, or around each pass
    serial_images_per_s: float  # around this row
    serial_at_first: float  # in the serial row

    @property
    def baseline_rows_per_s(self) -> tuple[float, ...]:
        """Return each device's mean rate with the whole model."""
        return tuple(sum(each) / len(each) for each in zip(*self.rates, strict=True))

    def row(self, mode: str, stages: int, policy: str, cuts: list[str], runtime: str) -> dict[str, Any]:
        """Return a row of the comparison."""
        reports, difference = self.reports, self.difference
        seconds = sum(report.total_s for report in reports)
        rate = sum(report.num_rows for report in reports) / seconds
        steady = sum(report.steady_rows_per_s for report in reports) / len(reports)
        ceiling = sum(self.baseline_rows_per_s)
        limits = [sum(rates) for rates in self.rates]
        return {
            "mode": mode, "stages": stages, "policy": policy, "runtime": runtime, "cuts": cuts,
            "images_per_second": rate, "steady_images_per_second": steady,
            "speedup": rate / self.serial_images_per_s, "serial_images_per_second": self.serial_images_per_s,
            "drift": self.serial_images_per_s / self.serial_at_first - 1, "bit_equal": difference.equal,
            "max_abs_difference": difference.largest, "top1_agreement": difference.top1_agreement,
            "fill_s": sum(report.fill_s for report in reports) / len(reports),
            "efficiency": steady / ceiling, "ceiling_images_per_second": ceiling,
            "alone_images_per_second": self.baseline_rows_per_s,
            "pass_efficiencies": [
                report.steady_rows_per_s / limit for report, limit in zip(reports, limits, strict=False)
            ] if len(limits) == len(reports) else [],
            "per_stage": [
                {
                    "stage": s.stage, "device": s.device,
                    **{
                        name: sum(getattr(report.stages[i], name) for report in reports) / len(reports)
                        for name in ("compute_s", "wait_s", "send_s")
                    },
                }
                for i, s in enumerate(reports[0].stages)
            ],
        }  # fmt: skip


def doubt_of(row: Mapping[str, Any], runtime: str) -> str:
    """Return why a row's figures cannot be believed, or ""; `runtime` is that of the references.

    >>> doubt_of({"runtime": "eager", "drift": 0.0, "efficiency": 0.97}, "eager")
    ''
    """
    drift, efficiency = row.get("drift", 0.0), row.get("efficiency") or 0.0
    if abs(drift) > _DRIFT:
        changed = f"{abs(drift):.0%} {'faster' if drift > 0 else 'slower'}"
        return (
            f"one process was {changed} around this row than in the first; other work had the cores, or the processor "
            "changed its speed: measure again on an idle machine"
        )
    if row["runtime"] == runtime and efficiency > _MOST_EFFICIENT:
        return (
            f"an efficiency of {efficiency:.2f} is more than its devices can do; other work had the cores while single "
            "devices were measured: measure again on an idle machine"
        )
    return ""


def limit_of(world: World, ranks: Sequence[int], crossing_bytes: Sequence[int], reports: Sequence[StreamReport]) -> str:
    """Describe the bottleneck with the calculation: the slowest stage, or a link that takes longer.

    `crossing_bytes` are the bytes sent after each stage except the last, per microbatch.
    """
    stages = reports[0].stages
    compute_s = [
        sum(r.stages[i].compute_s for r in reports) / sum(r.stages[i].num_microbatches for r in reports)
        for i in range(len(stages))
    ]
    slowest = max(range(len(stages)), key=compute_s.__getitem__)
    stage = f"stage {slowest} computes {format_seconds(compute_s[slowest])} per microbatch"
    links = []
    for index, num_bytes in enumerate(crossing_bytes):
        known = [rate for rank in ranks[index : index + 2] if (rate := world.bandwidths[rank]) is not None]
        if known and ranks[index] != ranks[index + 1]:
            links.append((num_bytes / min(known), num_bytes, min(known), index))
    if links and max(links)[0] > compute_s[slowest]:
        seconds, num_bytes, rate, index = max(links)
        return (
            f"the link after stage {index}: {format_bytes(num_bytes)} per microbatch at {format_rate(rate)} take "
            f"{format_seconds(seconds)}, so at most {1 / seconds:.2f} microbatches/s; {stage}"
        )
    return f"{stage}, so at most {1 / compute_s[slowest]:.2f} microbatches/s"
