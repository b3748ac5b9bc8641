"""The job of serving stages: a document that the driver writes and the deployment, executor and tracer read."""

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.plan.schedule.schedules import Action, forward_only
from penstock.runtime.registry import EAGER, RuntimeChoice
from penstock.wire import DEPTH

Count = Annotated[int, Meta(ge=1, le=2**31)]
Few = Annotated[int, Meta(ge=1, le=4096)]
Number = Annotated[int, Meta(ge=0, le=2**31)]
Rank = Annotated[int, Meta(ge=0, le=2**20)]
Short = Annotated[str, Meta(max_length=256)]


class StageOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for computing stages, sent to all processes of a job; `RunOptions` adds the driver's own options.

    `device` is a name that each process resolves on its own machine (see `find_device`).
    """

    threads: Few | None = None
    depth: Few = DEPTH
    device: Short = "cpu"


class Tracing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Spans of a trace in addition to messages and actions: of each operation, or of torch's profiler."""

    units: bool = False
    profile: bool = False


class StagesJob(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="stages", forbid_unknown_fields=True):
    """A job to serve some stages of a pipeline until CLOSE.

    `source` is the origin of the programs' tensors: messages that follow, the device's part in the bundle of `plan`, or
    modules of the process. `programs` are texts by stage, one for each of `num_programs`.
    """

    number: Number
    ranks: tuple[Rank, ...]  # of each stage
    sizes: dict[Short, Count]
    device_names: tuple[str, ...]
    options: StageOptions = StageOptions()
    runtimes: tuple[RuntimeChoice, ...] = ()  # runtime of every stage; empty: eager
    trace: Tracing | None = None
    torch_settings: dict[Short, bool | Short] = {}  # the driver's settings
    source: Literal["weights", "bundle", "modules"] = "weights"
    programs: dict[int, list[str]] = {}
    num_programs: Few = 1
    plan: Short = ""
    part: Short = ""
    compare: bool = False  # first report which tensors this worker still holds

    @property
    def threads(self) -> int:
        """Number of threads of a process."""
        return self.options.threads or 1

    @property
    def holders(self) -> frozenset[int]:
        """Ranks that hold a stage."""
        return frozenset(self.ranks)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank holds, in order."""
        return [index for index, holder in enumerate(self.ranks) if holder == rank]

    def runtime_of(self, stage: int) -> RuntimeChoice:
        """Return the runtime of a stage."""
        return self.runtimes[stage] if self.runtimes else EAGER

    def schedule(self, rank: int) -> Iterator[Action]:
        """Yield endless forwards of this rank's stages."""
        yield from forward_only(self.stages_of(rank))
