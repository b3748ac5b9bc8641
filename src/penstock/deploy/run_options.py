"""What a caller asks of a pipeline: a few values, built once where the options are given and passed on whole."""

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
from penstock.spec.plan import Plan
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

    def __post_init__(self) -> None:
        if self.trace is None and (self.trace_units or self.trace_profile):
            raise UsageError("what is recorded of each operation goes into the trace; give trace= a folder")
        check_way(self.between_gpus, self.device)
