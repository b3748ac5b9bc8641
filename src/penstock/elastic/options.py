"""What is asked of an elastic training, as one value."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from penstock.elastic.freezing.by_hand import ByHand
from penstock.elastic.freezing.history import FreezePolicy
from penstock.elastic.freezing.named import read_policy
from penstock.errors import UsageError
from penstock.spec.cluster import Cluster
from penstock.spec.profile import Profile
from penstock.units import parse_bytes

if TYPE_CHECKING:
    import torch

Stored = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """How a training freezes layers, and what it makes of that.

    - `freeze`: a policy, its name as `read_policy` takes it, or the frozen layers of each epoch;
    - `epochs`: how many there will be, which a move has to pay in; one more each time where not given;
    - `pack`: plan again, for as few devices as are fastest; `replicate`: also with other numbers of replicas;
    - `cache`: keep what frozen layers put out on disk; `cache_dir` is the folder on each machine, `cache_limit` what it
      may take there, `cache_dtype` how floats are kept, `cache_views` how many variants of a sample that is
      drawn anew each time; `keep_cache` leaves it there after the run;
    - `profile`, `cluster`: what `penstock profile --training` and `hosts measure` say; measured where not given.

    Example:
        ElasticOptions(freeze="schedule:1/3", epochs=10, cache_limit="2 GiB")

    Raises `UsageError` for values that cannot be.
    """

    freeze: FreezePolicy | str | Sequence[int] = "gradient-norms"
    epochs: int | None = None
    pack: bool = True
    replicate: bool = True
    cache: bool = True
    cache_dir: str | Path | None = None
    cache_limit: str | int | None = None
    cache_dtype: Stored = "float32"
    cache_views: int = 1
    keep_cache: bool = False
    profile: Profile | None = None
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        if self.cache_dtype not in get_args(Stored):
            raise UsageError(f"the cache holds float32 or bfloat16, not {self.cache_dtype}; use one of them")
        if self.cache_views < 1:
            raise UsageError(f"cache_views is at least 1, not {self.cache_views}; use 1 for data that stays as it is")
        if self.epochs is not None and self.epochs < 1:
            raise UsageError(f"epochs is at least 1, not {self.epochs}")
        self.policy()
        self.limit_bytes()

    def policy(self) -> FreezePolicy:
        """Return the freezing policy."""
        freeze = self.freeze
        if isinstance(freeze, str):
            return read_policy(freeze)
        return freeze if hasattr(freeze, "frozen_layers") else ByHand(freeze)

    def limit_bytes(self) -> int | None:
        """Return what the cache may take on each machine; None where only the disk limits it."""
        return parse_bytes(self.cache_limit) if isinstance(self.cache_limit, str) else self.cache_limit

    def stored(self) -> "torch.dtype":
        """Return the dtype of what is cached."""
        import torch  # imported late: reading options needs no torch

        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.cache_dtype]
