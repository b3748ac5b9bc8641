"""What a training run is asked to do, as one value that a file can hold."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.elastic.options import Stored
from penstock.errors import UsageError
from penstock.files import write_whole
from penstock.plan.schedule.picture import find_schedule
from penstock.spec.check import check_purpose, read_plan
from penstock.spec.cluster import read_cluster
from penstock.spec.plan import Plan
from penstock.spec.profile import read_profile

if TYPE_CHECKING:
    from penstock.deploy.run_options import SurvivalOptions
    from penstock.elastic.options import ElasticOptions

Positive = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(ge=0.0)]
# paths, which are text in a file: one kind as it was given, and one that is the same in every folder
PathText = Annotated[str, Meta(extra={"path": "as given"})]
WholePath = Annotated[str, Meta(extra={"path": "whole"})]
DEFAULT_SCHEDULE = "1f1b"
DEFAULT_FREEZE = "gradient-norms"
# settings that a resumed run must keep: others would change its place in the data or what its state means
_KEPT = (
    "model", "data", "validation", "batch_size", "length", "num_rows", "hold_out", "seed", "optimizer", "lr_schedule",
    "weights", "pretrained", "teacher", "elastic",
)  # fmt: skip
# settings that may change on resuming, which is then noted
_CHANGEABLE = ("lr", "weight_decay", "clip", "autocast", "epochs", "steps", "freeze")
# what only an elastic training is asked
_ELASTIC = (
    "freeze", "pack", "replicate", "cache", "cache_dir", "cache_limit", "cache_dtype", "cache_views", "keep_cache",
)  # fmt: skip


class FitSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model, data, how processes work together, and how to learn.

    Example:
        FitSettings(model="timm:vit_tiny_patch16_224,img_size=32", data="cifar10-train.tar", stages=2, replicas=2)

    `data` is images (see `open_images`), a text file, or a folder or file of sentiment trees. `batch_size`
    counts the rows of all replicas together. Without `validation` every tenth row is kept for it, or of a
    text the last tenth. `output` is the folder of the run. `plan` is a plan file, in place of stages, replicas,
    devices, schedule, microbatches and cuts. A field with a description is an option of `penstock train`.
    """

    model: str
    data: Annotated[str, Meta(description="Images (folder, tar, CIFAR, 'digits'), a text file, or sentiment trees.")]
    validation: Annotated[str | None, Meta(description="Data of the same kind; a tenth is kept if not given.")] = None
    output: Annotated[PathText, Meta(description="The run's folder.", extra={"flags": ["--output", "-o"]})] = (
        "runs/train"
    )
    stages: Annotated[Positive | None, Meta(description="Parts of the model, each in a process.")] = None
    replicas: Annotated[Positive | None, Meta(description="Data-parallel copies of the pipeline.")] = None
    devices: Annotated[Positive | None, Meta(description="Processes; stages times replicas if not given.")] = None
    schedule: Annotated[str, Meta(description="gpipe, 1f1b, interleaved, zero-bubble, or a file.")] = DEFAULT_SCHEDULE
    microbatches: Annotated[Positive | None, Meta(description="Parts of each replica's batch.")] = None
    policy: str = "balanced"
    cuts: list[str] | None = None
    plan: Annotated[
        WholePath | None,
        Meta(description="Stages, replicas and batch as planned.", extra={"metavar": "plan.json"}),
    ] = None
    batch_size: Annotated[Positive, Meta(description="Rows of all replicas together; 32.", extra={"default": None})] = (
        32
    )
    epochs: Annotated[Positive, Meta(description="Passes over the data.")] = 1
    steps: Annotated[Positive | None, Meta(description="Stop after this many optimizer steps.")] = None
    optimizer: Annotated[Literal["adamw", "sgd"], Meta(description="adamw, or sgd with momentum 0.9.")] = "adamw"
    lr: Annotated[Rate, Meta(description="Learning rate.")] = 1e-3
    lr_schedule: Annotated[Literal["constant", "cosine"], Meta(description="constant or cosine.")] = "constant"
    weight_decay: Annotated[Rate, Meta(description="Weight decay of the optimizer.")] = 0.0
    clip: Annotated[Rate | None, Meta(description="Clip gradients to this norm.")] = None
    autocast: Annotated[bool, Meta(description="Compute in bfloat16 where that is safe.")] = False
    checkpointing: Annotated[bool, Meta(description="Recompute forwards in the backward to save memory.")] = False
    seed: Annotated[int, Meta(description="Of weights, dropout and the order of data.")] = 0
    weights: PathText | None = None
    pretrained: bool = False
    threads: Positive | None = None
    device: str = "cpu"
    length: Annotated[int, Meta(ge=2, description="Tokens of a row of text; of a sentence at most.")] = 128
    num_rows: Annotated[Positive | None, Meta(description="Use only this many rows of the data.")] = None
    num_workers: Annotated[int, Meta(ge=0, description="Processes that load data for each one that trains.")] = 0
    checkpoint_every: Annotated[
        Positive | None,
        Meta(
            description="Steps from checkpoint to checkpoint; each epoch has one anyway. Hosts must share the "
            "folder --output."
        ),
    ] = None
    resume: Annotated[bool, Meta(description="Go on from the last whole checkpoint.")] = False
    keep_best: Annotated[bool, Meta(description="Keep the model of the most accurate epoch as best.safetensors.")] = (
        True
    )
    teacher: Annotated[
        PathText | None,
        Meta(
            description="Weights of the model whose outputs are learned beside the labels.", extra={"metavar": "FILE"}
        ),
    ] = None
    hold_out: Annotated[
        Annotated[int, Meta(ge=2)] | None, Meta(description="Leave every so many-th row out, for a test afterwards.")
    ] = None
    save: bool = True
    validate: bool = True
    track: Annotated[
        list[Literal["tensorboard", "wandb"]], Meta(description="tensorboard or wandb; may be repeated.")
    ] = msgspec.field(default_factory=list)
    elastic: Annotated[
        bool, Meta(description="Freeze layers that have converged, and plan again with what that frees.")
    ] = False
    freeze: Annotated[
        str,
        Meta(description="gradient-norms[:ALPHA], schedule[:ALPHA], plateau, layers by epoch as 0,4,7, or none; "
             "+after[:EPOCHS] begins later, +guard[:DROP] stops where accuracy drops."),
    ] = DEFAULT_FREEZE  # fmt: skip
    pack: Annotated[bool, Meta(description="Elastic: change stages.", extra={"flags": []})] = True
    replicate: Annotated[bool, Meta(description="Elastic: change the number of replicas.", extra={"flags": []})] = True
    cache: Annotated[
        bool, Meta(description="Elastic: keep what frozen layers put out on disk.", extra={"flags": []})
    ] = True
    cache_dir: Annotated[PathText | None, Meta(description="Each machine's folder for that.")] = None
    cache_limit: Annotated[str | None, Meta(description="What it may take there, as in 4GiB.")] = None
    cache_dtype: Annotated[Stored, Meta(description="float32 or bfloat16.")] = "float32"
    cache_views: Annotated[Positive, Meta(description="Variants of a sample that is drawn anew each time.")] = 1
    keep_cache: Annotated[bool, Meta(description="Leave it there after the run.")] = False
    costs: Annotated[
        WholePath | None,
        Meta(
            description="Of `penstock profile --data`, for --elastic, which else measures, and --on-loss.",
            extra={"metavar": "profile.json"},
        ),
    ] = None
    on_loss: Annotated[
        Literal["stop", "continue", "wait"],
        Meta(description="When a process is lost: stop, go on with the others, or first wait for another."),
    ] = "stop"
    from_cluster: Annotated[
        WholePath | None,
        Meta(
            description="The devices that the planner arranges the training for: with --elastic, which else measures, "
            "or with --on-loss and --costs.",
            extra={"metavar": "cluster.toml"},
        ),
    ] = None
    wait_for: Annotated[float, Meta(ge=1.0, description="Seconds that --on-loss wait waits for another.")] = 300.0
    join: Annotated[
        str | None,
        Meta(
            description="Join such a training that is under way, with the same command; it says where.",
            extra={"metavar": "HOST:PORT"},
        ),
    ] = None
    trace: WholePath | None = None
    profile: bool = False
    live: bool = False

    @property
    def num_processes(self) -> int:
        """The number of processes that this takes, started by itself."""
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
    from penstock.group.regroup import read_place

    try:
        settings = msgspec.convert(fields, FitSettings)
    except msgspec.ValidationError as error:
        raise UsageError(f"a training run cannot have these settings: {error}") from None
    settings = msgspec.structs.replace(settings, schedule=find_schedule(settings.schedule))
    defaults = {field.name: field.default for field in msgspec.structs.fields(FitSettings)}
    given = [name for name in _ELASTIC if getattr(settings, name) != defaults[name]]
    if given and not settings.elastic:
        raise UsageError(f"{given[0]} is for an elastic training; add elastic=True (--elastic), or leave it out")
    survives = settings.on_loss != "stop"
    if settings.costs is not None and not settings.elastic and not survives:
        raise UsageError("costs are for an elastic training, or one that goes on after a loss; leave --costs out")
    if settings.from_cluster is not None and not (settings.elastic or (survives and settings.costs is not None)):
        raise UsageError(
            "devices are planned for in an elastic training, or by costs after a loss; add --elastic, or --on-loss and "
            "--costs, or leave --from-cluster out"
        )
    if survives and (settings.elastic or settings.trace is not None):
        raise UsageError("an elastic training, or one with a trace, does not go on after a loss; leave --on-loss out")
    if settings.join is not None:
        read_place(settings.join)
    if settings.elastic:
        elastic_options(settings)
        if settings.trace is not None:
            raise UsageError("a trace is of one plan, and an elastic training changes its plan; leave the trace out")
    return settings


def elastic_options(settings: FitSettings) -> "ElasticOptions":
    """Return how a run is elastic; raises `UsageError` for what cannot be.

    Raises `ProfileError` and `ClusterError` for files that cannot be read.
    """
    from penstock.elastic.options import ElasticOptions

    return ElasticOptions(
        freeze=settings.freeze, epochs=settings.epochs, pack=settings.pack, replicate=settings.replicate,
        cache=settings.cache, cache_dir=settings.cache_dir, cache_limit=settings.cache_limit,
        cache_dtype=settings.cache_dtype, cache_views=settings.cache_views, keep_cache=settings.keep_cache,
        profile=read_profile(settings.costs) if settings.costs is not None else None,
        cluster=read_cluster(settings.from_cluster) if settings.from_cluster is not None else None,
    )  # fmt: skip


def survival_options(settings: FitSettings, *, first: bool) -> "SurvivalOptions":
    """Return what a run does after a loss; the `first` process reads the files that the planner goes by, and has them.

    Raises `ProfileError` and `ClusterError` for files that cannot be read.
    """
    from penstock.deploy.run_options import SurvivalOptions
    from penstock.group.regroup import read_place

    plans = first and settings.from_cluster is not None
    return SurvivalOptions(
        on_loss=settings.on_loss, wait_s=settings.wait_for,
        joins=read_place(settings.join) if settings.join is not None else None,
        profile=read_profile(settings.costs) if plans and settings.costs is not None else None,
        cluster=read_cluster(settings.from_cluster) if plans and settings.from_cluster is not None else None,
    )  # fmt: skip


def write_settings(settings: FitSettings, path: Path) -> None:
    """Write settings as JSON, whole or not at all; raises `OSError` where they cannot be."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(settings)) + b"\n")


def read_settings(path: Path) -> FitSettings:
    """Read what `write_settings` wrote; raises `UsageError` for anything else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=FitSettings)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path} holds no settings of a training run ({error})") from None


def check_resumed(settings: FitSettings, before: FitSettings) -> list[str]:
    """Compare a resumed run's settings with those it began with; returns what changes.

    Example:
        check_resumed(settings.replace(lr=1e-4), settings)      # ["lr 0.0001 instead of 0.001"]

    Raises `UsageError` for a setting that must not change.
    """
    for name in _KEPT:
        now, was = getattr(settings, name), getattr(before, name)
        if not _means_same(now, was):
            option = name.replace("_", "-")
            way = f"give --{option} {was}" if was not in (None, True, False) else f"leave --{option} out"
            raise UsageError(
                f"a resumed run keeps its {name}, which was {was}, not {now}; {way}, or start another run with another "
                "--output"
            )
    pairs = ((name, getattr(settings, name), getattr(before, name)) for name in _CHANGEABLE)
    return [f"{name} {now} instead of {was}" for name, now, was in pairs if now != was]


def _means_same(now: Any, was: Any) -> bool:
    """Return whether two settings are equal, or name the same file."""
    if now == was or not (isinstance(now, str) and isinstance(was, str)):
        return bool(now == was)
    return Path(now).exists() and Path(now).resolve() == Path(was).resolve()


def plan_of(settings: FitSettings) -> Plan | None:
    """Read the plan that a run follows, or return None for a run without one.

    Raises `PlanError` for a plan for inference, `UsageError` where the settings say something else than the plan.
    """
    from penstock.train.arrangement import check_given_once

    if settings.plan is None:
        return None
    plan = read_plan(settings.plan)
    check_purpose(plan, trains=True)
    check_given_once(
        plan, stages=settings.stages, replicas=settings.replicas, devices=settings.devices,
        microbatches=settings.microbatches, cuts=settings.cuts,
    )  # fmt: skip
    if settings.schedule not in {DEFAULT_SCHEDULE, plan.schedule}:
        raise UsageError(f"the plan's schedule is {plan.schedule}, not {settings.schedule}; leave --schedule out")
    if settings.batch_size != plan.batch_rows:
        raise UsageError(
            f"the plan is for batches of {plan.batch_rows} rows, not {settings.batch_size}; leave --batch-size out, or "
            f"plan again with --batch-size {settings.batch_size}"
        )
    return plan


def num_processes(settings: FitSettings, plan: Plan | None) -> int:
    """Count the processes that a run takes, started by itself."""
    return settings.num_processes if plan is None else len(plan.devices)
