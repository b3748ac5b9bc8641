"""Classification of a set of images with a streamed model, in order; images that cannot be read do not stop it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import DataError, UsageError
from penstock.pipeline import Pipeline
from penstock.zoo.data.image_set import ImageSet
from penstock.zoo.models.models import ZooModel, count_classes


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
                _prediction(images, index), prediction=int(best), class_name=name, confidence=float(confidence),
                top=best_classes(scores[row], names, top) if top else None,
                logits=[x if math.isfinite(x) else None for x in values[row].tolist()] if logits else None,
            )  # fmt: skip
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
