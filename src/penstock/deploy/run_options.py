"""What a caller asks of a pipeline: a few values, built once where the options are given and passed on whole."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from penstock.engine.stall import STALL_S
from penstock.engine.wiring import DEPTH
from penstock.errors import UsageError
from penstock.group.direct import check_way
from penstock.runtime.registry import EAGER, RuntimeChoice
from penstock.spec.cluster import Cluster
from penstock.spec.on_loss import ON_LOSS
from penstock.spec.plan import Plan
from penstock.spec.profile import Profile
from penstock.zoo.weights.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A model with an example call, which is captured, and where its tensors are read from.

    `model` is a module, a function that makes one, a list of modules, or None in a process that does not feed.
    """

    model: nn.Module | Sequence[nn.Module] | Callable[[], nn.Module] | None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic: Mapping[str, Mapping[str | int, int]] | None = None
    weights: Weights | None = None  # the model's own where not given


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOptions:
    """Where a model is cut: by a policy, by names, or as a plan says; None where the model or the world decides."""

    stages: int | None = None
    policy: str = "balanced"
    cuts: Sequence[str] | None = None
    plan: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalOptions:
    """What a run does when a device is lost: it stops, goes on with the others, or waits until another joins.

    `profile` and `cluster` are what its plan was made from; without them the parts' cost is counted from shapes, and
    devices of which nothing is known are equal. `joins` is the host and port of the training under way that this
    process comes to. Raises `UsageError` for what does not go together.
    """

    on_loss: str = "stop"
    wait_s: float = 300.0
    profile: Profile | None = None
    cluster: Cluster | None = None
    joins: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        if self.on_loss not in ON_LOSS:
            raise UsageError(f"on a loss a run can {', '.join(ON_LOSS)}, not {self.on_loss!r}; give one of these")
        if not 0 < self.wait_s < math.inf:
            raise UsageError(f"waiting takes some seconds, not {self.wait_s}; write it like wait_s=300")

    @property
    def survives(self) -> bool:
        """Whether the stream outlives the loss of a device."""
        return self.on_loss != "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How processes compute their stages, and what they record of it.

    Raises `UsageError` for options that do not go together.
    """

    threads: int | None = None
    depth: int = DEPTH
    device: str = "cpu"
    between_gpus: str = "gloo"
    stall_s: float = STALL_S
    trace: Path | None = None
    trace_units: bool = False
    trace_profile: bool = False
    runtime: RuntimeChoice = EAGER  # of every stage, where no plan says more
    survival: SurvivalOptions = SurvivalOptions()

    def __post_init__(self) -> None:
        if self.trace is None and (self.trace_units or self.trace_profile):
            raise UsageError("what is recorded of each operation goes into the trace; give trace= a folder")
        if self.trace is not None and self.survival.survives:
            raise UsageError("a stream whose devices may change is not recorded; leave trace or on_loss out")
        check_way(self.between_gpus, self.device)
