"""Options of an elastic training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from penstock.elastic.epochs import FreezePolicy
from penstock.elastic.freezing import ByHand, read_policy
from penstock.errors import UsageError
from penstock.spec.cluster import Cluster
from penstock.spec.profile import Profile
from penstock.units import parse_bytes

if TYPE_CHECKING:
    import torch

Stored = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """Options of freezing layers, replanning and caching.

    - `freeze`: a policy, its name for `read_policy`, or the frozen layers of each epoch;
    - `epochs`: the total number of epochs, within which a migration must pay off; default: the coming epoch alone;
    - `pack`: replan, for as few devices as are fastest; `replicate`: also with other numbers of replicas;
    - `cache`: keep outputs of frozen layers on disk; `cache_dir` is the folder on each machine, `cache_limit` its size
      limit there, `cache_dtype` the dtype of stored floats, `cache_views` the number of variants of a sample that is
      drawn again each time; `keep_cache` keeps it after the run;
    - `profile`, `cluster`: written by `penstock profile --training` and `hosts measure`; measured if not given.

    Example:
        ElasticOptions(freeze="schedule:1/3", epochs=10, cache_limit="2 GiB")

    Raises `UsageError` for invalid values.
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
            raise UsageError(f"cache_dtype must be float32 or bfloat16; got {self.cache_dtype}")
        if self.cache_views < 1:
            raise UsageError(f"cache_views must be at least 1; got {self.cache_views}; use 1 for constant data")
        if self.epochs is not None and self.epochs < 1:
            raise UsageError(f"epochs must be at least 1; got {self.epochs}")
        self.policy()
        self.limit_bytes()

    def policy(self) -> FreezePolicy:
        """Return the freezing policy."""
        freeze = self.freeze
        if isinstance(freeze, str):
            return read_policy(freeze)
        return freeze if hasattr(freeze, "frozen_layers") else ByHand(freeze)

    def limit_bytes(self) -> int | None:
        """Return the limit of the cache on each machine in bytes; None if only the disk limits it."""
        return parse_bytes(self.cache_limit) if isinstance(self.cache_limit, str) else self.cache_limit

    def stored(self) -> "torch.dtype":
        """Return the dtype of cached floats."""
        import torch  # imported late: reading options needs no torch

        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.cache_dtype]
