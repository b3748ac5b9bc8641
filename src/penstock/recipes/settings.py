"""What a training run is asked to do, as one value that a file can hold."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.errors import UsageError

Positive = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(ge=0.0)]
DEFAULT_SCHEDULE = "1f1b"


class FitSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model, data, how processes work together, and how to learn.

    Example:
        FitSettings(model="timm:vit_tiny_patch16_224,img_size=32", data="cifar10-train.tar", stages=2, replicas=2)

    `data` is images (see `open_images`), a text file, or a folder or file of sentiment trees. `batch_size`
    counts the rows of all replicas together. Without `validation` every tenth row is kept for it, or of a
    text the last tenth. `output` is the folder of the run. `plan` is a plan file, in place of stages, replicas,
    devices, schedule, microbatches and cuts.
    """

    model: str
    data: str
    validation: str | None = None
    output: str = "runs/train"
    stages: Positive | None = None
    replicas: Positive | None = None
    devices: Positive | None = None
    schedule: str = DEFAULT_SCHEDULE
    microbatches: Positive | None = None
    policy: str = "balanced"
    cuts: list[str] | None = None
    plan: str | None = None
    batch_size: Positive = 32
    epochs: Positive = 1
    steps: Positive | None = None
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: Rate = 1e-3
    lr_schedule: Literal["constant", "cosine"] = "constant"
    weight_decay: Rate = 0.0
    clip: Rate | None = None
    autocast: bool = False
    checkpointing: bool = False
    seed: int = 0
    weights: str | None = None
    pretrained: bool = False
    threads: Positive | None = None
    device: str = "cpu"
    length: Annotated[int, Meta(ge=2)] = 128
    num_rows: Positive | None = None
    num_workers: Annotated[int, Meta(ge=0)] = 0
    checkpoint_every: Positive | None = None
    resume: bool = False
    save: bool = True
    validate: bool = True
    trace: str | None = None
    live: bool = False
    profile: bool = False
    track: list[Literal["tensorboard", "wandb"]] = msgspec.field(default_factory=list)

    @property
    def num_processes(self) -> int:
        """How many processes this takes, started by itself."""
        return self.devices or (self.stages or 1) * (self.replicas or 1)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output)

    def replace(self, **changes: Any) -> "FitSettings":
        """Return the same settings with some changed; raises `UsageError` for what cannot be.

        >>> FitSettings(model="timm:vit_tiny_patch16_224", data="digits").replace(stages=2).num_processes
        2
        """
        return make_settings({**msgspec.to_builtins(self), **changes})


def make_settings(fields: dict[str, Any]) -> FitSettings:
    """Make settings of named values; raises `UsageError` naming the one that is wrong."""
    try:
        return msgspec.convert(fields, FitSettings)
    except msgspec.ValidationError as error:
        raise UsageError(f"a training run cannot have these settings: {error}") from None


def write_settings(settings: FitSettings, path: Path) -> None:
    """Write settings as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(settings)) + b"\n")


def read_settings(path: Path) -> FitSettings:
    """Read what `write_settings` wrote; raises `UsageError` for anything else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=FitSettings)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path} holds no settings of a training run ({error})") from None
