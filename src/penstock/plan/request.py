"""What is wanted of a plan."""

from dataclasses import dataclass
from typing import Literal

from penstock.errors import PlanError
from penstock.plan.cost.stage_cost import Setting
from penstock.spec.plan import Schedule

PlanAim = Literal["throughput", "latency", "devices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is wanted of a plan.

    `aim` is throughput, latency or the fewest devices for `target_rows_per_s`. `rows` are the microbatch sizes
    to choose from, those of the profile where none are given. `num_rows` is the stream that is predicted.
    `replicas` allows whole pipelines side by side, `shared` stages that devices share round-robin. A training step has
    `num_microbatches`, or as many as make up `batch_rows`, over all replicas. `recording_bytes` stay free on every
    device for a trace.

    >>> Request(aim="latency").depth
    2
    """

    aim: PlanAim = "throughput"
    target_rows_per_s: float | None = None
    rows: tuple[int, ...] = ()
    num_rows: int = 500
    depth: int = 2
    schedule: Schedule = "forward-only"
    num_microbatches: int | None = None
    batch_rows: int | None = None
    optimizer_state_factor: float = 0.0
    alternate: bool = True
    replicas: bool = True
    shared: bool = False
    recording_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.aim == "devices" and not (self.target_rows_per_s and self.target_rows_per_s > 0):
            raise PlanError("the aim devices needs the throughput to reach; give --target in rows per second")
        if self.schedule == "forward-only":
            if self.num_microbatches is not None or self.batch_rows is not None:
                raise PlanError("microbatches of a step are for training; add --schedule 1f1b or another")
        elif (self.num_microbatches is None) == (self.batch_rows is None):
            raise PlanError(
                f"the schedule {self.schedule} needs the size of a step; give one of --batch-size and --microbatches"
            )

    def settings(self, measured: tuple[int, ...]) -> list[Setting]:
        """Return how stages may be run: a setting for each microbatch size, of those measured where none are given.

        Raises `PlanError` where no size divides the batch.
        """
        sizes = self.rows or measured
        batch = self.batch_rows
        fitting = [rows for rows in sizes if batch is None or batch % rows == 0]
        if not fitting:
            raise PlanError(
                f"microbatches divide a batch, but a batch of {batch} rows has none of {', '.join(map(str, sizes))} "
                "rows; give other --rows"
            )
        return [self._setting(rows) for rows in fitting]

    def _setting(self, rows: int) -> Setting:
        count = self.num_microbatches if self.batch_rows is None else self.batch_rows // rows
        return Setting(
            rows=rows, depth=self.depth, schedule=self.schedule, num_microbatches=count,
            optimizer_state_factor=self.optimizer_state_factor, recording_bytes=self.recording_bytes,
        )  # fmt: skip
