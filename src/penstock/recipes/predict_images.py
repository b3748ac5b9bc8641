"""Predictions for a set of images, written to a file as they are computed."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.deploy.run_options import CutOptions, OnLoss, Trace
from penstock.errors import UsageError
from penstock.files import is_stdout
from penstock.group.world import World
from penstock.pipeline import Pipeline
from penstock.plan.check import read_plan
from penstock.recipes.classify import ImagePrediction, check_head, classify, example_call
from penstock.recipes.labels import Labels, match_labels
from penstock.recipes.predictions import COLUMNS, PredictionFile, PredictionRun, check_replaceable, go_on_with
from penstock.spec.settings import PredictSettings
from penstock.terminal.live import LiveView
from penstock.terminal.progress import how_far, progress_console, telling, working
from penstock.text import counted, note, say
from penstock.zoo.data.folders import read_labels
from penstock.zoo.data.image_names import name_of, open_images
from penstock.zoo.data.image_set import ImageSet
from penstock.zoo.models.models import ZooModel, load_model
from penstock.zoo.weights.weights import fingerprint_of


def predict_images(asked: PredictSettings, world: World | None = None) -> tuple[dict[str, Any], str | None]:
    """Write a row for every image, in order; return counts and times, and a line about failed images, if any.

    Example:
        predict_images(PredictSettings(model="timm:deit_small_patch16_224", images=["photos"], output="out.csv"))

    Raises `UsageError` for names and files that do not match, and `KeyboardInterrupt` with the number of rows on disk.
    """
    cut = CutOptions(stages=asked.stages, cuts=asked.cuts)
    output = Path(asked.output)
    if asked.resume and is_stdout(output):
        raise UsageError(f"--resume continues a file; got the standard output {output}; give a file as --output")
    with world if world is not None else contextlib.nullcontext():
        survival = OnLoss(
            asked.on_loss or "stop", wait_s=asked.wait_for, profile=asked.costs, cluster=asked.from_cluster
        )
        zoo, labels, source = _load(asked)
        chosen = labels.images
        plan = read_plan(asked.plan) if asked.plan else None
        microbatch_size = asked.microbatch_size if plan is None else plan.microbatch_rows
        about = PredictionRun(
            model=asked.model, weights=fingerprint_of(zoo.weights), images=source,
            runtimes=[asked.runtime] if plan is None else plan.runtimes, num_images=len(chosen), top=asked.top,
            logits=asked.logits, preprocess=zoo.preprocess or "",
        )  # fmt: skip
        if not asked.resume:
            check_replaceable(output)
        more = [name for name, on in (("top", asked.top), ("logits", asked.logits)) if on]
        with PredictionFile(output, resume=asked.resume, columns=(*COLUMNS, *more)) as file:
            _check_done(file, chosen)
            go_on_with(file, about)
            if len(file.done) == len(chosen):
                say(f"already finished: the predictions of all {len(chosen)} images are in {file.path}")
                return _summary(num_resumed=len(chosen)), None
            args, kwargs = example_call(zoo, microbatch_size)
            with working("deploying the stages"):
                pipe = Pipeline(
                    zoo.module, args, kwargs,
                    stages=asked.stages if plan else cut.count(len(world.devices) if world else 2),
                    cuts=asked.cuts, plan=plan, weights=zoo.weights, threads=asked.threads,
                    world=world, device=asked.device, runtime=asked.runtime,
                    trace=None if asked.trace is None else Trace(asked.trace, profiler=asked.torch_profiler),
                    on_loss=survival,
                )  # fmt: skip
            pipe.model_name = zoo.name
            if world is not None and (place := pipe.joins_at) is not None:
                note(f"to add a device, run penstock worker --join {place}")
            tally = _run(pipe, zoo, labels, file, microbatch_size, asked)
    summary = tally.summary(pipe)
    if labels.reason is not None:
        note(f"no accuracy: {labels.reason}")
    if not zoo.is_random and not labels.names:
        note(
            "classes are numbers, as the model has no class names; put id2label into a config.json next to the weights"
        )
    say(_sentence(summary, file.path), err=is_stdout(file.path))
    if not tally.failed:
        return summary, None
    return summary, f"{len(tally.failed)} of {len(chosen)} images failed, the first one: {tally.failed[0].error}"


def _load(asked: PredictSettings) -> tuple[ZooModel, Labels, str]:
    """Return the model, the images with their labels as classes of the model, and the name of the images."""
    with working("loading the model"):
        zoo = load_model(
            asked.model, weights=asked.weights, pretrained=asked.pretrained, seed=asked.seed,
            preprocess=asked.preprocess,
        )  # fmt: skip
        chosen, source = _open_set(asked)
    zoo.pictures()
    check_head(zoo)
    labels = match_labels(zoo, chosen, asked.class_order)
    if asked.labels is not None and labels.reason is not None:
        raise UsageError(f"the labels of {asked.labels} cannot be compared: {labels.reason}")
    if zoo.is_random:
        note(f"{asked.model} has random weights (seed {asked.seed}); give --pretrained or --weights")
    return zoo, labels, source


def _open_set(asked: PredictSettings) -> tuple[ImageSet, str]:
    """Return the images, with the labels of their file, and their name."""
    found, source = open_images(asked.images), name_of(asked.images)
    if found.left_out:
        note(f"{source}: left out {found.left_out}")
    chosen = found.take(asked.num_images) if asked.num_images else found
    if asked.labels is not None:
        chosen = read_labels(Path(asked.labels), chosen)
        if absent := chosen.labels.count(None):
            note(f"{absent} of {len(chosen)} images have no label in {asked.labels}")
    return chosen, source


def _check_done(file: PredictionFile, images: ImageSet) -> None:
    """Check that the rows of the earlier run are for the first images of this run."""
    for index, row in enumerate(file.done):
        if index >= len(images) or row.get("image") != images.name(index):
            raise UsageError(
                f"row {index + 1} of {file.path} is for {row.get('image')!r}, which is not image {index + 1} "
                "of this set; resume with the same images, or leave --resume out"
            )


def _run(
    pipe: Pipeline, zoo: ZooModel, labels: Labels, file: PredictionFile, microbatch_size: int, asked: PredictSettings
) -> "_Tally":
    """Write a row for every image; return the tally."""
    images = labels.images
    tally = _Tally(labels.classes, file)
    console = progress_console()
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f} images/s"), TimeRemainingColumn(),
        console=console, disable=asked.live or console.quiet or not console.is_terminal, transient=True,
    )  # fmt: skip
    start = len(file.done)
    left = len(images) - start
    view = LiveView(console, pipe.stage_states, total=len(images), unit="images", done=start, shown=asked.live)
    try:
        with progress, pipe, view, telling(lambda: how_far(tally.num_rows, left, "images", tally.seconds), console):
            task = progress.add_task("infer", total=len(images), completed=start, rate=0.0)
            for prediction in classify(
                pipe, zoo, images, names=labels.names, microbatch_size=microbatch_size, start=start, top=asked.top,
                logits=asked.logits,
            ):  # fmt: skip
                file.write(prediction.row())
                tally.add(prediction)
                progress.update(task, advance=1, rate=pipe.last_report.rows_per_s)
                view.advance()
    except KeyboardInterrupt:
        pipe.abandon()
        raise KeyboardInterrupt(
            f"interrupted: {start + tally.num_rows} of {len(images)} images are in {file.path}; continue with --resume"
        ) from None
    return tally


class _Tally:
    """Counts of the written rows."""

    def __init__(self, classes: Mapping[int, int], file: PredictionFile) -> None:
        self._classes = classes  # the model's class of each label
        self.num_rows = 0
        self._began_s = time.monotonic()
        self.failed: list[ImagePrediction] = []
        self._labelled = self._right = 0
        self._start = len(file.done)

    def add(self, prediction: ImagePrediction) -> None:
        """Count one row."""
        self.num_rows += 1
        if prediction.error is not None:
            self.failed.append(prediction)
            return
        if prediction.label is not None and prediction.label in self._classes:
            self._labelled += 1
            self._right += self._classes[prediction.label] == prediction.prediction

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began_s

    def summary(self, pipe: Pipeline) -> dict[str, Any]:
        """Return the counts, and the times of the stream."""
        report = pipe.last_report
        shown = ("stage", "device", "compute_s", "wait_s", "send_s", "memory_bytes")
        return _summary(
            num_images=self.num_rows, num_resumed=self._start, num_failed=len(self.failed),
            accuracy=self._right / self._labelled if self._labelled else None,
            images_per_second=report.rows_per_s, fill_s=report.fill_s,
            stages=[{name: getattr(stage, name) for name in shown} for stage in report.stages],
            cuts=[cut.name for cut in pipe.cuts], changes=[asdict(change) for change in pipe.changes],
        )  # fmt: skip


def _summary(**found: Any) -> dict[str, Any]:
    """Return the counts and times of a run; missing values are those of a run without images."""
    nothing: dict[str, Any] = {
        "num_images": 0, "num_resumed": 0, "num_failed": 0, "accuracy": None, "images_per_second": 0.0, "fill_s": 0.0,
        "stages": [], "cuts": [], "changes": [],
    }  # fmt: skip
    return nothing | found


def _sentence(summary: dict[str, Any], path: Path) -> str:
    stages = len(summary["cuts"]) + 1
    devices = len({stage["device"] for stage in summary["stages"]})
    text = f"{counted(summary['num_images'], 'image')} at {summary['images_per_second']:.2f} images/s"
    text += f" through {counted(stages, 'stage')}"
    text += f" on {devices} devices" if devices > 1 else ""
    if summary["accuracy"] is not None:
        text += f", accuracy {summary['accuracy']:.2%}"
    return f"{text}; predictions in {path}"
