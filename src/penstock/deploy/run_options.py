"""Options of a pipeline: a few structs, built once from the caller's options and passed on whole."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from penstock.engine.job import StageOptions
from penstock.engine.stall import STALL_S
from penstock.engine.wiring import check_way
from penstock.errors import UsageError, exclude
from penstock.runtime.registry import EAGER, RuntimeChoice
from penstock.spec.cluster import Cluster, read_cluster
from penstock.spec.plan import Plan
from penstock.spec.profile import Profile, read_profile
from penstock.spec.settings import ON_LOSS
from penstock.wire import DEPTH
from penstock.zoo.weights.weights import Weights


@dataclass(frozen=True, slots=True)
class Bundle:
    """The folder of a bundle, as the model of a pipeline; each process reads its own device's part."""

    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A model, the example call with which it is captured, and the source of its tensors.

    `model` is a module, a function that returns a module, a list of modules, a bundle, or None in a worker.
    `dynamic` and `largest` are those of `capture`.
    """

    model: nn.Module | Sequence[nn.Module] | Callable[[], nn.Module] | Bundle | None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic: Mapping[str, Mapping[str | int, int]] | None = None
    largest: Mapping[str, int] | None = None
    weights: Weights | None = None  # default: the model's own tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOptions:
    """Cuts of a model: a policy's name or the cuts' own, or a plan; None if the model or the world decides.

    Raises `UsageError` for options that contradict each other.
    """

    stages: int | None = None
    cuts: str | Sequence[str] | None = None
    plan: Plan | None = None

    def __post_init__(self) -> None:
        if isinstance(self.cuts, str) and ":" in self.cuts:
            raise UsageError(f"cuts must be a policy or a list of names; got {self.cuts!r}; write [{self.cuts!r}]")
        cut = self.stages is not None or self.cuts is not None
        exclude("stages and cuts", self.plan is not None and cut, "a plan determines the cuts")
        stages = self.count(1)
        if self.names is not None and self.stages not in {None, stages}:
            raise UsageError(
                f"stages must be one more than the cuts, {stages} for {list(self.names)}; got {self.stages}; leave "
                "stages or cuts out, or name every cut"
            )

    @property
    def names(self) -> Sequence[str] | None:
        """Names of the cuts; None if a policy chooses them."""
        return None if self.cuts is None or isinstance(self.cuts, str) or self._is_policy(self.cuts) else self.cuts

    @property
    def policy(self) -> str:
        """The policy that chooses the cuts without names."""
        if isinstance(self.cuts, str):
            return self.cuts
        return self.cuts[0] if self.cuts and self._is_policy(self.cuts) else "balanced"

    @staticmethod
    def _is_policy(cuts: Sequence[str]) -> bool:
        """Return whether a list, as of an option that may be repeated, names a policy: cuts' names have a colon."""
        return len(cuts) == 1 and ":" not in cuts[0]

    def count(self, otherwise: int) -> int:
        """Return the number of stages, which is `otherwise` if no option sets it."""
        if self.names is not None:
            return len(self.names) + 1
        return self.stages or otherwise


class OnLoss:
    """What to do if a device is lost: `stop`, `continue` on the other devices, or `wait` until another device joins.

    `wait_s` is the longest wait for a device that joins. `profile` and `cluster`, or their files, are used to replan;
    without them costs are counted from shapes, and unknown devices are assumed equal. `joins` is the host and port of
    the training run that this process joins. Raises `UsageError` for values that are not allowed, `ProfileError` and
    `ClusterError` for files that cannot be read.

    Example:
        Pipeline(model, (image,), on_loss=OnLoss("wait", wait_s=60))
    """

    def __init__(
        self,
        action: str = "stop",
        *,
        wait_s: float = 300.0,
        profile: Profile | str | Path | None = None,
        cluster: Cluster | str | Path | None = None,
        joins: tuple[str, int] | None = None,
    ) -> None:
        if action not in ON_LOSS:
            raise UsageError(f"on_loss must be one of {', '.join(ON_LOSS)}; got {action!r}")
        if not 0 < wait_s < math.inf:
            raise UsageError(f"wait_s must be a positive number of seconds; got {wait_s}; write it like wait_s=300")
        self.action, self.wait_s, self.joins = action, wait_s, joins
        self.profile = read_profile(profile) if isinstance(profile, (str, Path)) else profile
        self.cluster = read_cluster(cluster) if isinstance(cluster, (str, Path)) else cluster

    @property
    def survives(self) -> bool:
        """True if the run continues after a device is lost."""
        return self.action != "stop"


class Trace:
    """A folder for the timeline of a run; with `units` every operation, with `profiler` also torch.profiler's records.

    `units` costs a few percent. The profiler records operators with their shapes and memory for a few microbatches of
    a stream, or for one step of a training run, which take about twice as long.

    Example:
        Pipeline(model, (image,), trace=Trace("runs/one", profiler=True))
    """

    def __init__(self, folder: str | Path, *, units: bool = False, profiler: bool = False) -> None:
        self.folder, self.units, self.profiler = Path(folder), units, profiler


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """How stages exchange messages.

    Example:
        Pipeline(model, (image,), device="cuda", links=LinkOptions(between_gpus="nccl"))

    Arguments:
        depth: number of microbatches of a stream that may wait at a cut.
        between_gpus: transport of tensors between GPUs: `host`, through the hosts; `nccl`, which needs a GPU for each
            process; or `auto`: NCCL if possible. NCCL is not the default, as it has never run on two GPUs.
        stall_s: longest time without any progress while a result is due and no stage computes (in training, while all
            processes wait), before a message counts as lost; must exceed the time of one message on the slowest link.
    """

    depth: int = DEPTH
    between_gpus: str = "host"
    stall_s: float = STALL_S


class RunOptions(StageOptions, frozen=True, kw_only=True):
    """Options of the driver for computing and tracing a pipeline's stages.

    Raises `UsageError` for options that exclude each other.
    """

    between_gpus: str = "host"
    stall_s: float = STALL_S
    trace: Trace | None = None
    runtime: RuntimeChoice = EAGER  # runtime of every stage that has none in a plan
    on_loss: OnLoss = msgspec.field(default_factory=OnLoss)

    def __post_init__(self) -> None:
        exclude(
            "trace or on_loss",
            self.trace is not None and self.on_loss.survives,
            "a run whose devices may change cannot be traced",
        )
        check_way(self.between_gpus, self.device)

    def of_stages(self) -> StageOptions:
        """Return the options that are sent to all processes."""
        return StageOptions(**{name: getattr(self, name) for name in StageOptions.__struct_fields__})
