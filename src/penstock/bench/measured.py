"""What came of streaming through one row's pipeline, and what limited it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.bench.samples import Difference
from penstock.engine.observer import StreamReport
from penstock.group.world import World
from penstock.units import format_bytes, format_rate, format_seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """A report per pass, the comparison of results, and the rates of single devices and of the serial run."""

    reports: list[StreamReport]
    difference: Difference
    rates: Sequence[Sequence[float]]  # around all passes, or around each
    serial_images_per_s: float

    @property
    def baseline_rows_per_s(self) -> tuple[float, ...]:
        """Return each device's mean with the whole model."""
        return tuple(sum(each) / len(each) for each in zip(*self.rates, strict=True))

    def row(self, mode: str, stages: int, policy: str, cuts: list[str]) -> dict[str, Any]:
        """Return a row of the comparison."""
        reports, difference = self.reports, self.difference
        seconds = sum(report.total_s for report in reports)
        rate = sum(report.num_rows for report in reports) / seconds
        steady = sum(report.steady_rows_per_s for report in reports) / len(reports)
        ceiling = sum(self.baseline_rows_per_s)
        limits = [sum(rates) for rates in self.rates]
        return {
            "mode": mode, "stages": stages, "policy": policy, "cuts": cuts,
            "images_per_second": rate, "steady_images_per_second": steady,
            "speedup": rate / self.serial_images_per_s, "bit_equal": difference.equal,
            "max_abs_difference": difference.largest,
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


def limit_of(world: World, ranks: Sequence[int], crossing_bytes: Sequence[int], reports: Sequence[StreamReport]) -> str:
    """Name the bottleneck, with the arithmetic: the slowest stage, or a link that takes longer than it.

    `crossing_bytes` is what crosses after each stage but the last, per microbatch.
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
