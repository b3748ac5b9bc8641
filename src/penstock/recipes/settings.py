"""Settings of a training run, storable in a file."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.elastic.options import ElasticChoices, ElasticOptions
from penstock.errors import UsageError, exclude
from penstock.files import write_whole
from penstock.plan.check import check_purpose, read_plan
from penstock.plan.schedule.custom import find_schedule
from penstock.plan.schedule.schedules import DEFAULT_SCHEDULE, SCHEDULES
from penstock.recipes.data_formats import FORMATS_HELP
from penstock.spec.cluster import read_cluster
from penstock.spec.fields import make_struct
from penstock.spec.plan import Plan
from penstock.spec.profile import read_profile
from penstock.spec.settings import (
    MODEL,
    TRACE,
    VISION,
    Cuts,
    Device,
    Live,
    PathText,
    Positive,
    Preprocess,
    Pretrained,
    Rate,
    Runtime,
    Threads,
    TorchProfiler,
    WaitFor,
    WeightsFile,
    WholePath,
)
from penstock.text import counted

if TYPE_CHECKING:
    from penstock.deploy.run_options import CutOptions, OnLoss

SETTINGS = "settings.json"  # file in a run's folder
# settings that a resumed run must keep: changes would invalidate its position in the data or its state
_KEPT = (
    "model", "data", "validation", "batch_size", "length", "num_rows", "hold_out", "skip_damaged", "preprocess", "seed",
    "optimizer", "lr_schedule", "weights", "pretrained", "teacher", "elastic",
)  # fmt: skip
# settings that may change on resuming; changes are reported
_CHANGEABLE = ("lr", "weight_decay", "clip", "autocast", "epochs", "steps", "freeze", "runtime")


class FitSettings(ElasticChoices, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a training run: model, data, distribution over processes, and optimization.

    Example:
        FitSettings(model="timm:vit_tiny_patch16_224,img_size=32", data="cifar10-train.tar", stages=2, replicas=2)

    `data` is images (see `open_images`), a text file, or a folder or file of sentiment trees. `batch_size` counts the
    rows of all replicas together. Without `validation`, every tenth row is kept for validation, or the last tenth of a
    text. `output` is the folder of the run. `plan` is a plan file, instead of stages, replicas, processes, schedule,
    microbatches and cuts. A field with a description, including those of `ElasticChoices`, is an option of
    `penstock train`, or only a key of its --config (`rare`).
    """

    rare = (
        "cache", "cache_dir", "cache_dtype", "cache_limit", "cache_views", "checkpoint_every", "checkpointing", "clip",
        "costs", "from_cluster", "hold_out", "keep_best", "length", "lr_schedule", "num_rows", "num_workers",
        "pack", "preprocess", "replicate", "runtime", "teacher", "torch_profiler", "wait_for", "weight_decay",
    )  # fmt: skip

    model: Annotated[str, Meta(description=VISION, extra=MODEL)]  # on the command line: that of the run with --resume
    data: Annotated[str, Meta(description=f"{FORMATS_HELP}.", extra={"default": None})]
    validation: Annotated[str | None, Meta(description="Validation data. Default: every tenth row of --data.")] = None
    output: Annotated[
        PathText, Meta(description="Folder of the run.", extra={"flags": ["--output", "-o"], "written": "folder"})
    ] = "runs/train"
    stages: Annotated[Positive | None, Meta(description="Number of stages, one per process.")] = None
    replicas: Annotated[Positive | None, Meta(description="Number of data-parallel pipelines.")] = None
    processes: Annotated[Positive | None, Meta(description="Number of processes. Default: stages times replicas.")] = (
        None
    )
    schedule: Annotated[str, Meta(description=f"{', '.join(SCHEDULES)}, or a file.")] = DEFAULT_SCHEDULE
    microbatches: Annotated[Positive | None, Meta(description="Number of microbatches of each replica's batch.")] = None
    cuts: Cuts = None
    plan: Annotated[
        WholePath | None, Meta(description="Plan for stages, replicas and batch.", extra={"metavar": "FILE"})
    ] = None
    batch_size: Annotated[
        Positive, Meta(description="Rows of a batch over all replicas. Default: 32.", extra={"default": None})
    ] = 32
    epochs: Annotated[Positive, Meta(description="Number of passes over the data, in all.")] = 1
    steps: Annotated[Positive | None, Meta(description="Largest number of optimizer steps.")] = None
    optimizer: Annotated[Literal["adamw", "sgd"], Meta(description="adamw, or sgd with momentum 0.9.")] = "adamw"
    lr: Annotated[Rate, Meta(description="Learning rate.")] = 1e-3
    lr_schedule: Annotated[
        Literal["constant", "cosine"], Meta(description="Learning rate over time: constant, cosine.")
    ] = "constant"
    weight_decay: Annotated[Rate, Meta(description="Weight decay of the optimizer.")] = 0.0
    clip: Annotated[Rate | None, Meta(description="Largest gradient norm, for clipping.")] = None
    autocast: Annotated[bool, Meta(description="Automatic mixed precision in bfloat16.")] = False
    checkpointing: Annotated[bool, Meta(description="Recompute forwards in the backward to save memory.")] = False
    seed: Annotated[int, Meta(description="Seed of weights, dropout and order of data.")] = 0
    weights: WeightsFile = None
    pretrained: Pretrained = False
    threads: Threads = None
    device: Device = "cpu"
    runtime: Runtime = "eager"
    length: Annotated[int, Meta(ge=2, description="Tokens per row of text, or most per sentence.")] = 128
    num_rows: Annotated[Positive | None, Meta(description="Number of rows to use. Default: all.")] = None
    num_workers: Annotated[int, Meta(ge=0, description="Loading processes of each training process.")] = 0
    checkpoint_every: Annotated[
        Positive | None,
        Meta(description="Steps between checkpoints, in addition to every epoch. Hosts must share --output."),
    ] = None
    resume: Annotated[bool, Meta(description="Continue from the last complete checkpoint.")] = False
    keep_best: Annotated[bool, Meta(description="Keep the most accurate epoch's model.")] = True
    teacher: Annotated[PathText | None, Meta(description="Weights of a teacher, for distillation.")] = None
    hold_out: Annotated[
        Annotated[int, Meta(ge=2)] | None, Meta(description="Leave out every n-th row, for a later test.")
    ] = None
    skip_damaged: Annotated[bool, Meta(description="Train without the images that cannot be read.")] = False
    save: bool = True
    validate: bool = True
    track: Annotated[
        list[Literal["tensorboard", "wandb"]], Meta(description="tensorboard or wandb; may be repeated.")
    ] = msgspec.field(default_factory=list)
    elastic: Annotated[bool, Meta(description="Freeze converged layers, and use the freed devices.")] = False
    costs: Annotated[
        WholePath | None,
        Meta(description="Profile of `penstock profile --data`, for --elastic (default: measured) and --on-loss."),
    ] = None
    on_loss: Annotated[
        Literal["stop", "continue", "wait"],
        Meta(description="If a process is lost: stop, continue, or wait for another."),
    ] = "stop"
    from_cluster: Annotated[
        WholePath | None,
        Meta(description="Cluster to plan for with --elastic (default: measured), or --on-loss with costs."),
    ] = None
    wait_for: WaitFor = 300.0
    join: Annotated[
        str | None,
        Meta(description="Join a training run, at the address that it printed.", extra={"metavar": "HOST:PORT"}),
    ] = None
    preprocess: Preprocess = None
    trace: Annotated[WholePath | None, TRACE] = None
    torch_profiler: TorchProfiler = False
    live: Live = False

    @property
    def num_processes(self) -> int:
        """Number of processes that the run starts."""
        return self.processes or self.cut_options.count(1) * (self.replicas or 1)

    @property
    def cut_options(self) -> "CutOptions":
        """The options of cuts; raises `UsageError` if they contradict each other."""
        from penstock.deploy.run_options import CutOptions

        return CutOptions(stages=self.stages, cuts=self.cuts)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output)

    def replace(self, **changes: Any) -> "FitSettings":
        """Return the settings with changes; raises `UsageError` for invalid settings.

        >>> FitSettings(model="timm:vit_tiny_patch16_224", data="digits").replace(stages=2).num_processes
        2
        """
        return make_settings({**msgspec.to_builtins(self), **changes})


def make_settings(fields: dict[str, Any]) -> FitSettings:
    """Make settings from named values; raises `UsageError` naming an invalid one."""
    from penstock.group.regroup import read_place

    settings = make_struct(fields, FitSettings, "settings of a training run")
    settings = msgspec.structs.replace(settings, schedule=find_schedule(settings.schedule))
    _ = settings.cut_options  # raises if they contradict each other
    defaults = {field.name: field.default for field in msgspec.structs.fields(FitSettings)}
    given = [name for name in ElasticChoices.__struct_fields__ if getattr(settings, name) != defaults[name]]
    if given and not settings.elastic:
        raise UsageError(f"{given[0]} is for elastic training; add elastic=True (--elastic), or leave it out")
    if settings.torch_profiler and settings.trace is None:
        raise UsageError("torch_profiler needs a trace to write into; give --trace DIR too")
    survives = settings.on_loss != "stop"
    unused = settings.costs is not None and not settings.elastic and not survives
    exclude("costs", unused, "costs are for elastic training and for surviving lost processes")
    if settings.from_cluster is not None and not (settings.elastic or (survives and settings.costs is not None)):
        raise UsageError(
            "from_cluster is for elastic training, or with costs for a lost process; add --elastic, or --on-loss and "
            "--set costs=FILE, or leave from_cluster out"
        )
    single = settings.elastic or settings.trace is not None
    exclude("--on-loss", survives and single, "elastic training and traced training cannot survive lost processes")
    if settings.join is not None:
        read_place(settings.join)
    if settings.elastic:
        elastic_options(settings)
        exclude("the trace", settings.trace is not None, "a trace needs one plan, and elastic training changes it")
    return settings


def elastic_options(settings: FitSettings) -> ElasticOptions:
    """Return the options of an elastic run; raises `UsageError` for invalid options.

    Raises `ProfileError` and `ClusterError` for files that cannot be read.
    """

    choices: dict[str, Any] = {name: getattr(settings, name) for name in ElasticChoices.__struct_fields__}
    return ElasticOptions(**choices, epochs=settings.epochs, profile=settings.costs, cluster=settings.from_cluster)


def survival_options(settings: FitSettings, *, first: bool) -> "OnLoss":
    """Return the options for lost devices; only the `first` process reads the planner's files.

    Raises `ProfileError` and `ClusterError` for files that cannot be read.
    """
    from penstock.deploy.run_options import OnLoss
    from penstock.group.regroup import read_place

    plans = first and settings.from_cluster is not None
    return OnLoss(
        settings.on_loss,
        wait_s=settings.wait_for,
        joins=read_place(settings.join) if settings.join is not None else None,
        profile=read_profile(settings.costs) if plans and settings.costs is not None else None,
        cluster=read_cluster(settings.from_cluster) if plans and settings.from_cluster is not None else None,
    )


def write_settings(settings: FitSettings, path: Path) -> None:
    """Write settings as JSON atomically; raises `OSError` if this fails."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(settings)) + b"\n")


def read_settings(path: Path) -> FitSettings:
    """Read settings that `write_settings` wrote; raises `UsageError` for any other file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=FitSettings)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"{path} holds no settings of a training run ({error})") from None


def keep_settings(fields: dict[str, Any], named: Collection[str], before: FitSettings) -> dict[str, Any]:
    """Return the fields of a resumed run: the original run's values, except for settings that are `named`.

    If `epochs` or `steps` is named, only that one determines the length of the run.

    Example:
        keep_settings({"model": "m", "data": "d", "epochs": 1}, {"model", "data"}, before)    # before's epochs
    """
    kept = {name: getattr(before, name) for name in (*_KEPT, *_CHANGEABLE) if name not in named}
    if "epochs" in named and "steps" not in named:
        kept["steps"] = None
    return fields | kept


def check_resumed(settings: FitSettings, before: FitSettings) -> list[str]:
    """Compare a resumed run's settings with the original settings; return the changes.

    Example:
        check_resumed(settings.replace(lr=1e-4), settings)      # ["lr 0.0001 instead of 0.001"]

    Raises `UsageError` if a setting that must not change was changed.
    """
    for name in _KEPT:
        now, was = getattr(settings, name), getattr(before, name)
        if not _means_same(now, was):
            way = f"leave {option_of(name)} out" if was in (None, True, False) else f"give {option_of(name, was)}"
            expected = f"run without {name}" if was is None else f"run with {name} {was}"
            raise UsageError(
                f"a resumed run must keep its {name}: expected a {expected}; got {'none' if now is None else now}; "
                f"{way}, or start another run with another --output"
            )
    pairs = ((name, getattr(settings, name), getattr(before, name)) for name in _CHANGEABLE)
    changes = [_change(name, now, was) for name, now, was in pairs if now != was]
    given = settings.stages, settings.replicas, settings.processes, settings.cuts, settings.plan, before.plan
    if settings.num_processes != before.num_processes and not any(given):
        had, has = counted(before.num_processes, "process"), counted(settings.num_processes, "process")
        changes.append(f"{has} instead of {had} (--stages and --replicas are not kept)")
    return changes


def option_of(name: str, value: Any = "") -> str:
    """Return how a setting is given on the command line of `penstock train`.

    >>> option_of("batch_size", 8), option_of("clip", 1.0), option_of("clip")
    ('--batch-size 8', '--set clip=1.0', '--set clip')
    """
    mark = "=" if value != "" else ""
    return f"--set {name}{mark}{value}" if name in FitSettings.rare else f"--{name.replace('_', '-')} {value}".rstrip()


def _change(name: str, now: Any, was: Any) -> str:
    """Describe a changed setting.

    >>> _change("lr", 0.1, 0.01), _change("steps", 60, None), _change("clip", None, 1.0)
    ('lr 0.1 instead of 0.01', 'steps 60 (not set before)', 'no clip (1.0 before)')
    """
    if was is None:
        return f"{name} {now} (not set before)"
    return f"no {name} ({was} before)" if now is None else f"{name} {now} instead of {was}"


def _means_same(now: Any, was: Any) -> bool:
    """Return True if two settings are equal or refer to the same file."""
    if now == was or not (isinstance(now, str) and isinstance(was, str)):
        return bool(now == was)
    return Path(now).exists() and Path(now).resolve() == Path(was).resolve()


def plan_of(settings: FitSettings) -> Plan | None:
    """Read the plan of a run; None for a run without a plan.

    Raises `PlanError` if the plan is for inference, `UsageError` if the settings contradict the plan.
    """
    from penstock.train.arrangement import check_given_once

    if settings.plan is None:
        return None
    plan = read_plan(settings.plan)
    check_purpose(plan, trains=True)
    check_given_once(
        plan,
        stages=settings.stages,
        replicas=settings.replicas,
        processes=settings.processes,
        microbatches=settings.microbatches,
        cuts=settings.cuts,
    )
    other = settings.schedule not in {DEFAULT_SCHEDULE, plan.schedule}
    exclude("--schedule", other, f"the schedule must be the plan's, {plan.schedule}; got {settings.schedule}")
    if settings.batch_size != plan.batch_rows:
        raise UsageError(
            f"the batch size must be the plan's, {plan.batch_rows} rows; got {settings.batch_size}; leave "
            f"--batch-size out, or replan with --batch-size {settings.batch_size}"
        )
    return plan


def num_processes(settings: FitSettings, plan: Plan | None) -> int:
    """Return the number of processes that a run starts."""
    return settings.num_processes if plan is None else len(plan.devices)
