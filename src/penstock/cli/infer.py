"""`penstock infer`: predictions for a set of images, written as they come."""

import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.cli import options as opt
from penstock.cli.cluster import Cluster
from penstock.deploy.worker import follow
from penstock.errors import RunError, UsageError
from penstock.group.entry import join_torchrun, under_torchrun
from penstock.pipeline import Pipeline
from penstock.recipes.classify import Prediction, classify, labels_comparable
from penstock.recipes.predictions import PredictionFile
from penstock.runtime.registry import parse_runtime
from penstock.spec.check import read_plan
from penstock.spec.cluster import read_cluster
from penstock.spec.profile import read_profile
from penstock.terminal.console import PlainConsole
from penstock.terminal.live import LiveView
from penstock.terminal.notes import note, say
from penstock.terminal.progress import how_far, telling, working
from penstock.transport.base import FEEDER
from penstock.zoo.data.image_names import open_images
from penstock.zoo.data.image_set import ImageSet
from penstock.zoo.models.models import ZooModel, load_model


def infer(
    model: opt.Model,
    images: Annotated[str, typer.Option(help="A folder, a tar, an image, CIFAR in its binary form, or 'digits'.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where predictions go: .csv, or JSON lines.")] = Path(
        "predictions.csv"
    ),
    stages: Annotated[
        int | None, typer.Option(min=1, help="How many; 2 on one machine, under torchrun one per process.")
    ] = None,
    policy: opt.Policy = "balanced",
    cut: opt.CutNames = None,
    plan: Annotated[Path | None, typer.Option(metavar="plan.json", help="Run this plan; it says how to cut.")] = None,
    microbatch_size: opt.MicrobatchSize = 1,
    num_images: Annotated[int | None, typer.Option(min=1, help="Use only the first N images.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue after the rows that are there.")] = False,
    trace: opt.Trace = None,
    profile: opt.Profiled = False,
    live: opt.Live = False,
    weights: opt.WeightsFile = None,
    pretrained: opt.Pretrained = False,
    seed: opt.Seed = 0,
    threads: opt.Threads = None,
    device: opt.ComputesOn = "cpu",
    runtime: opt.Runtime = "eager",
    on_loss: opt.OnLoss = None,
    wait_for: opt.WaitFor = 300.0,
    profiled: Annotated[
        Path | None, typer.Option("--from-profile", metavar="profile.json", help="What --plan was made from.")
    ] = None,
    planned_for: Annotated[
        Path | None, typer.Option("--from-cluster", metavar="cluster.toml", help="What --plan was made for.")
    ] = None,
    bind: opt.Bind = None,
    cluster: Cluster = None,
    json: opt.JsonFile = None,
) -> None:
    """Classify images through a pipeline: predictions in order, throughput, and accuracy where there are labels."""
    opt.check_profiled(profile=profile, trace=trace)
    opt.bind_to(bind, cluster)
    parse_runtime(runtime)  # before the model is loaded
    asked, on_loss = on_loss, opt.choose_on_loss(on_loss, trace=trace)
    known = read_profile(profiled) if profiled else None
    machines = read_cluster(planned_for) if planned_for else None
    world = join_torchrun(followed=True, again=on_loss != "stop") if under_torchrun() else None
    if world is not None and world.membership is None and asked is None:
        on_loss = "stop"  # torchrun's agents end all processes
    if world is not None and world.rank != FEEDER:
        follow(world)
        return
    with world if world is not None else contextlib.nullcontext():
        with working("loading the model"):
            zoo = load_model(model, weights=weights, pretrained=pretrained, seed=seed)
            found = open_images(images)
        chosen = found.take(num_images) if num_images else found
        if zoo.transform is None or zoo.task != "image":
            raise UsageError(f"{model} does not classify images; name an image classification model")
        chosen_plan = read_plan(plan) if plan else None
        if chosen_plan is not None:
            microbatch_size = chosen_plan.microbatch_rows
        with PredictionFile(output, resume=resume) as file:
            _check_done(file, chosen)
            example = _example(zoo, microbatch_size)
            with working("putting the stages in place"):
                pipe = Pipeline(
                    zoo.module, zoo.example_args and (example,), dict.fromkeys(zoo.example_kwargs, example),
                    stages=stages or (len(world.devices) if world else 2),
                    policy=policy, cuts=cut, plan=chosen_plan, weights=zoo.weights, threads=threads, world=world,
                    device=device, runtime=runtime, trace=trace, trace_profile=profile, on_loss=on_loss,
                    wait_s=wait_for, profile=known, cluster=machines,
                )  # fmt: skip
            pipe.model_name = zoo.name
            if world is not None and (place := pipe.joins_at) is not None:
                note(f"another device joins with: penstock worker --join {place}")
            failed = _run(pipe, zoo, chosen, file, microbatch_size, json, live=live)
    if failed:
        raise RunError(f"{len(failed)} of {len(chosen)} images failed, the first one: {failed[0].error}")


def _example(zoo: ZooModel, rows: int) -> torch.Tensor:
    given = zoo.example_args[0] if zoo.example_args else next(iter(zoo.example_kwargs.values()))
    example: torch.Tensor = given[:1].repeat(rows, *[1] * (given.dim() - 1))
    return example


def _check_done(file: PredictionFile, images: ImageSet) -> None:
    """The rows of the earlier run must be the first images of this one."""
    for index, row in enumerate(file.done):
        if index >= len(images) or row.get("image") != images.name(index):
            raise UsageError(
                f"row {index + 1} of {file.path} is for {row.get('image')!r}, which is not image {index + 1} "
                "of this set; resume with the same images, or leave --resume out"
            )


def _run(
    pipe: Pipeline, zoo: ZooModel, images: ImageSet, file: PredictionFile, microbatch_size: int, json: Path | None, *,
    live: bool,
) -> list[Prediction]:  # fmt: skip
    """Write a row for every image; returns those that failed."""
    tally = _Tally(zoo, images, file)
    console = PlainConsole(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f} images/s"), TimeRemainingColumn(),
        console=console, disable=live or not console.is_terminal, transient=True,
    )  # fmt: skip
    start = len(file.done)
    left = len(images) - start
    view = LiveView(console, pipe.stage_states, total=len(images), unit="images", done=start, shown=live)
    try:
        with progress, pipe, view, telling(lambda: how_far(tally.num_rows, left, "images", tally.seconds), console):
            task = progress.add_task("infer", total=len(images), completed=start, rate=0.0)
            for prediction in classify(pipe, zoo, images, microbatch_size=microbatch_size, start=start):
                file.write(prediction.row())
                tally.add(prediction)
                progress.update(task, advance=1, rate=pipe.last_report.rows_per_s)
                view.advance()
    except KeyboardInterrupt:
        pipe.abandon()
        say(f"interrupted: {start + tally.num_rows} of {len(images)} images are in {file.path}; "
                   "go on with --resume", err=True)  # fmt: skip
        raise typer.Exit(130) from None
    summary = tally.summary(pipe)
    opt.write_json(json, summary)
    say(_sentence(summary, file.path))
    return tally.failed


class _Tally:
    """Counts what came out."""

    def __init__(self, zoo: ZooModel, images: ImageSet, file: PredictionFile) -> None:
        self._zoo, self._images = zoo, images
        self._classes: dict[int, int] | None = None
        self.num_rows = 0
        self._began_s = time.monotonic()
        self.failed: list[Prediction] = []
        self._labelled = self._right = 0
        self._start = len(file.done)

    def add(self, prediction: Prediction) -> None:
        """Count one row."""
        self.num_rows += 1
        if prediction.error is not None:
            self.failed.append(prediction)
            return
        if self._classes is None:
            self._classes = labels_comparable(self._zoo, self._images, _num_classes(self._zoo)) or {}
        if prediction.label in self._classes:
            self._labelled += 1
            self._right += self._classes[prediction.label] == prediction.prediction

    @property
    def seconds(self) -> float:
        """Return how long it has taken so far."""
        return time.monotonic() - self._began_s

    def summary(self, pipe: Pipeline) -> dict[str, Any]:
        """Return the counts and the stream's times."""
        report = pipe.last_report
        shown = ("stage", "device", "compute_s", "wait_s", "send_s", "memory_bytes")
        return {
            "num_images": self.num_rows, "num_resumed": self._start, "num_failed": len(self.failed),
            "accuracy": self._right / self._labelled if self._labelled else None,
            "images_per_second": report.rows_per_s, "fill_s": report.fill_s,
            "stages": [{name: getattr(stage, name) for name in shown} for stage in report.stages],
            "cuts": [cut.name for cut in pipe.cuts],
            "changes": [asdict(change) for change in pipe.changes],
        }  # fmt: skip


def _num_classes(zoo: ZooModel) -> int:
    config = getattr(zoo.module, "config", None)
    return int(getattr(zoo.module, "num_classes", getattr(config, "num_labels", 0)) or 0)


def _sentence(summary: dict[str, Any], path: Path) -> str:
    stages = len(summary["cuts"]) + 1
    devices = len({stage["device"] for stage in summary["stages"]})
    text = f"{summary['num_images']} images at {summary['images_per_second']:.2f} images/s"
    text += " through one stage" if stages == 1 else f" through {stages} stages"
    text += f" on {devices} devices" if devices > 1 else ""
    if summary["accuracy"] is not None:
        text += f", accuracy {summary['accuracy']:.2%}"
    return f"{text}; predictions in {path}"
