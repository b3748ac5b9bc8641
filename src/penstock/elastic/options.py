"""Options of an elastic training run, declared once for scripts, the command line and the settings of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from penstock.elastic.freezing import ByHand, policy_help, read_policy
from penstock.errors import UsageError
from penstock.spec.cluster import Cluster, read_cluster
from penstock.spec.profile import Profile, read_profile
from penstock.units import parse_bytes

Stored = Literal["float32", "bfloat16"]
if TYPE_CHECKING:
    import torch

    from penstock.elastic.epochs import FreezePolicy

    Freeze: TypeAlias = FreezePolicy | str | Sequence[int]
    Folder: TypeAlias = str | Path
    Size: TypeAlias = str | int
else:  # a script may pass more types than a settings file
    Freeze = Folder = Size = str


class ElasticChoices(msgspec.Struct, frozen=True, kw_only=True):
    """Options of freezing and caching, with their defaults and help; `cli/config.py` describes `extra`."""

    freeze: Annotated[
        Freeze,
        Meta(
            description=f"{policy_help()}; +after[:EPOCHS] begins later, +guard[:DROP] stops if accuracy drops, "
            "+take-back[:DROP] unfreezes again."
        ),
    ] = "gradient-norms"
    pack: Annotated[bool, Meta(description="Change stages and replicas between epochs.")] = True
    replicate: Annotated[bool, Meta(description="Consider plans with several replicas.")] = True
    cache: Annotated[bool, Meta(description="Keep outputs of frozen layers on disk.")] = True
    cache_dir: Annotated[
        Folder | None,
        Meta(description="Folder of the cache on each machine.", extra={"path": "as given", "written": "kept folder"}),
    ] = None
    cache_limit: Annotated[Size | None, Meta(description="Size limit of the cache on a machine, as in 4GiB.")] = None
    cache_dtype: Annotated[Stored, Meta(description="Cached floats: float32 or bfloat16.")] = "float32"
    cache_views: Annotated[int, Meta(ge=1, description="Cached variants of an augmented sample.")] = 1


class ElasticOptions(ElasticChoices, frozen=True, kw_only=True):
    """All options of an elastic training run.

    `freeze` may also be a policy object, or the number of frozen layers of each epoch. `epochs` is the total number of
    epochs, within which a migration must pay off; by default, it must pay off within the coming epoch. `profile` and
    `cluster` are results or files of `penstock profile --training` and `hosts measure`; they are measured if not given.

    Example:
        ElasticOptions(freeze="schedule:1/3", epochs=10, cache_limit="2 GiB")

    Raises `UsageError` for invalid values, `ProfileError` and `ClusterError` for files that cannot be read.
    """

    epochs: int | None = None
    profile: Profile | str | Path | None = None
    cluster: Cluster | str | Path | None = None

    def __post_init__(self) -> None:
        if self.cache_dtype not in get_args(Stored):
            raise UsageError(f"cache_dtype must be float32 or bfloat16; got {self.cache_dtype}")
        if self.cache_views < 1:
            raise UsageError(f"cache_views must be at least 1; got {self.cache_views}; use 1 for constant data")
        if self.epochs is not None and self.epochs < 1:
            raise UsageError(f"epochs must be at least 1; got {self.epochs}")
        self.policy()
        self.limit_bytes()
        for name, given in (("profile", self.read_profile()), ("cluster", self.read_cluster())):
            msgspec.structs.force_setattr(self, name, given)

    def policy(self) -> "FreezePolicy":
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
        import torch  # imported late: parsing options needs no torch

        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.cache_dtype]

    def read_profile(self) -> Profile | None:
        """Return the profile, read if it is a file."""
        return read_profile(self.profile) if isinstance(self.profile, (str, Path)) else self.profile

    def read_cluster(self) -> Cluster | None:
        """Return the cluster, read if it is a file."""
        return read_cluster(self.cluster) if isinstance(self.cluster, (str, Path)) else self.cluster
