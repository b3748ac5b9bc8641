"""Classification of a set of images with a streamed model, in order; predictions are written as they are computed."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.deploy.run_options import CutOptions, OnLoss, Trace
from penstock.errors import DataError, UsageError
from penstock.files import is_stdout
from penstock.group.world import World
from penstock.pipeline import Pipeline
from penstock.plan.check import read_plan
from penstock.recipes.images import Labels, match_labels
from penstock.recipes.predictions import COLUMNS, PredictionFile, PredictionRun, check_replaceable, go_on_with
from penstock.spec.settings import PredictSettings
from penstock.terminal.live import LiveView
from penstock.terminal.progress import how_far, progress_console, telling, working
from penstock.text import counted, note, say
from penstock.zoo.data.folders import read_labels
from penstock.zoo.data.image_names import name_of, open_images
from penstock.zoo.data.image_set import ImageSet
from penstock.zoo.models.models import ZooModel, count_classes, load_model
from penstock.zoo.weights.weights import fingerprint_of


@dataclass(frozen=True, slots=True)
class ImagePrediction:
    """The result for one image: a class, or the `error` that prevented it.

    `label_name` is the image's folder; `class_name` is None if the classes have no names.
    """

    index: int
    image: str
    label: int | None
    label_name: str | None = None
    prediction: int | None = None
    class_name: str | None = None
    confidence: float | None = None
    error: str | None = None
    top: Sequence[Mapping[str, Any]] | None = None
    logits: Sequence[float | None] | None = None  # None for one that JSON cannot represent

    def row(self) -> dict[str, Any]:
        """Return the prediction as a row of a prediction file, without empty fields."""
        values = {
            "image": self.image, "label": self.label_name, "prediction": self.prediction, "class": self.class_name,
            "confidence": None if self.confidence is None else round(self.confidence, 6), "error": self.error,
            "top": self.top, "logits": self.logits,
        }  # fmt: skip
        return {name: value for name, value in values.items() if value is not None}


def classify(
    pipe: Pipeline, model: ZooModel, images: ImageSet, *, names: Sequence[str] = (), microbatch_size: int = 1,
    start: int = 0, top: int = 0, logits: bool = False,
) -> Iterator[ImagePrediction]:  # fmt: skip
    """Return a prediction for every image from `start` on, in order, or the error of its image or of its scores.

    `names` are those of the model's classes. Each prediction has the `top` best classes, and with `logits` the model's
    outputs. Raises `UsageError` if the model does not take images or returns no class scores.
    """
    feed = _Feed(model, images, microbatch_size, start)
    outputs = pipe.stream(feed)
    for output in outputs:
        values = class_scores(output)
        scores = confidences(model, values)
        for item in feed.groups.pop(0):
            if isinstance(item, ImagePrediction):
                yield item
                continue
            index, row = item
            confidence, best = scores[row].max(dim=-1)
            if not confidence.isfinite():  # the maximum of a row with a NaN is NaN
                yield replace(
                    _prediction(images, index), error="the model returned NaN or infinite scores for this image"
                )
                continue
            name = names[int(best)] if int(best) < len(names) else None
            yield replace(
                _prediction(images, index),
                prediction=int(best),
                class_name=name,
                confidence=float(confidence),
                top=best_classes(scores[row], names, top) if top else None,
                logits=[x if math.isfinite(x) else None for x in values[row].tolist()] if logits else None,
            )
    for group in feed.groups:  # images after the last readable image
        for item in group:
            if isinstance(item, ImagePrediction):
                yield item


def _prediction(images: ImageSet, index: int) -> ImagePrediction:
    label = images.label(index)
    return ImagePrediction(index, images.name(index), label, None if label is None else images.classes[label])


class _Feed:
    """Gathers images into microbatches, and records which images each has and which could not be read."""

    def __init__(self, model: ZooModel, images: ImageSet, microbatch_size: int, start: int) -> None:
        self._model, self._images, self._transform = model, images, model.pictures()
        self._size, self._start = microbatch_size, start
        self.groups: list[list[ImagePrediction | tuple[int, int]]] = []

    def __iter__(self) -> Iterator[Any]:
        group: list[ImagePrediction | tuple[int, int]] = []
        rows: list[Tensor] = []
        for index in range(self._start, len(self._images)):
            try:
                rows.append(self._transform(self._images.read(index)))
                group.append((index, len(rows) - 1))
            except DataError as error:
                group.append(replace(_prediction(self._images, index), error=str(error)))
            if len(rows) == self._size:
                self.groups.append(group)
                yield self._batch(rows)
                group, rows = [], []
        if group:
            self.groups.append(group)
        if rows:
            yield self._batch(rows)

    def _batch(self, rows: Sequence[Tensor]) -> Any:
        return as_input(self._model, rows)


def as_input(model: ZooModel, rows: Sequence[Tensor]) -> Any:
    """Return images as an input of a model, in the form that the model takes."""
    batch, name = torch.stack(list(rows)), next(iter(model.example_kwargs), None)
    return batch if name is None else {name: batch}


def best_classes(scores: Tensor, names: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Return the classes with the best scores of a row, best first."""
    found = scores.topk(min(count, len(scores)))
    return [
        {"class": index, "name": names[index] if index < len(names) else None, "score": score}
        for index, score in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]


def example_call(model: ZooModel, rows: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the arguments of an example call with n images."""
    given = model.example_args[0] if model.example_args else next(iter(model.example_kwargs.values()))
    example = given[:1].repeat(rows, *[1] * (given.dim() - 1))
    return (example,) if model.example_args else (), dict.fromkeys(model.example_kwargs, example)


def class_scores(output: Any) -> Tensor:
    """Find the class scores in a model's output: its `logits`, or its first two-dimensional tensor.

    Raises `UsageError` if there are none.
    """
    logits = getattr(output, "logits", None)
    leaves = [logits] if isinstance(logits, Tensor) else pytree.tree_leaves(output)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.is_floating_point():
            return leaf
    raise UsageError("the model returns no class scores (a tensor of rows and classes); use a classification model")


def check_head(model: ZooModel) -> None:
    """Raise `UsageError` for a model whose output has no class scores, such as the features of a model without head."""
    module, config = model.module, getattr(model.module, "config", None)
    kind = type(module).__name__
    if config is not None and "Classification" not in kind:
        raise UsageError(
            f"{model.name} is a {kind}, which has no classification head; give a checkpoint of an image classifier"
        )
    if getattr(config, "problem_type", None) == "regression":
        raise UsageError(
            f"{model.name} has the problem_type regression, so its outputs are values, not classes; give a classifier"
        )
    if config is None and hasattr(module, "num_classes") and not count_classes(module):
        raise UsageError(
            f"{model.name} has no classification head (num_classes is 0); give num_classes=N, and weights with a head"
        )


def confidences(model: ZooModel, logits: Tensor) -> Tensor:
    """Return the score of each class: softmax, or sigmoid for one logit and for several labels, as in transformers."""
    problem = getattr(getattr(model.module, "config", None), "problem_type", None)
    if problem == "multi_label_classification" or logits.shape[-1] == 1:
        return logits.float().masked_fill(logits.isposinf(), torch.nan).sigmoid()
    return logits.float().softmax(dim=-1)


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
            asked.model,
            weights=asked.weights,
            pretrained=asked.pretrained,
            seed=asked.seed,
            preprocess=asked.preprocess,
        )
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
            num_images=self.num_rows,
            num_resumed=self._start,
            num_failed=len(self.failed),
            accuracy=self._right / self._labelled if self._labelled else None,
            images_per_second=report.rows_per_s,
            fill_s=report.fill_s,
            stages=[{name: getattr(stage, name) for name in shown} for stage in report.stages],
            cuts=[cut.name for cut in pipe.cuts],
            changes=[asdict(change) for change in pipe.changes],
        )


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
