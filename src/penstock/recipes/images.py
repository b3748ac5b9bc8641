"""Image classification: folders, archives, CIFAR, digits; models of timm and transformers."""

from collections.abc import Sequence
from typing import Any

from penstock.errors import DataError, UsageError
from penstock.recipes.settings import FitSettings
from penstock.recipes.tasks import Rows, Task, class_accuracy, class_loss, keep_some, load_for, spread
from penstock.zoo.data.image_names import open_images
from penstock.zoo.data.image_set import ImageSet
from penstock.zoo.data.preprocess import Transform


def image_task(settings: FitSettings) -> Task:
    """Prepare to classify images; raises `DataError` for images without labels, `UsageError` for other models."""
    images = open_images(settings.data)
    check_labelled(images, settings.data)
    name = with_classes(settings.model, len(images.classes))
    zoo, weights, new = load_for(settings, name, "images" if name.startswith("hf:") else None)
    if zoo.transform is None or zoo.task != "image":
        raise UsageError(f"{settings.model} takes no images but {settings.data} holds images; name a model that does")
    key = next(iter(zoo.example_kwargs), None)
    make = _Reader(images, zoo.transform, key, None)
    rows, kept = (spread(len(images), settings.num_rows), []) if settings.validation else _parted(images, settings)
    if settings.validation:
        other = open_images(settings.validation)
        check_labelled(other, settings.validation)
        validation = Rows(range(len(other)), _Reader(other, zoo.transform, key, images.classes))
    else:
        validation = Rows(kept, make)
    return Task(
        unit="images", module=zoo.module.train(), weights=weights, example=(zoo.example_args, zoo.example_kwargs),
        training=Rows(rows, make), validation=validation, loss_fn=class_loss, accuracy=class_accuracy, new_tensors=new,
    )  # fmt: skip


def with_classes(name: str, num_classes: int) -> str:
    """Add the number of classes to a model's name, unless it is there.

    >>> with_classes("timm:resnet18", 10), with_classes("hf:vit,num_labels=4", 10)
    ('timm:resnet18,num_classes=10', 'hf:vit,num_labels=4')
    """
    option = {"timm": "num_classes", "hf": "num_labels"}.get(name.partition(":")[0])
    return name if option is None or f",{option}=" in name else f"{name},{option}={num_classes}"


def check_labelled(images: ImageSet, path: str) -> None:
    """Check that every image has a label; raises `DataError`."""
    unlabelled = next((images.name(i) for i in range(len(images)) if images.label(i) is None), None)
    if unlabelled is not None:
        raise DataError(f"{path} has images without a label, first {unlabelled}; put each class into a folder")


def _parted(images: ImageSet, settings: FitSettings) -> tuple[list[int], list[int]]:
    chosen = spread(len(images), settings.num_rows)
    rows, kept = keep_some(len(chosen))
    return [chosen[row] for row in rows], [chosen[row] for row in kept]


class _Reader:
    """Reads an image as the model's input, and its label; of another set by the name of its class."""

    def __init__(self, images: ImageSet, transform: Transform, key: str | None, classes: Sequence[str] | None) -> None:
        self._images, self._transform, self._key = images, transform, key
        unknown = sorted(set(images.classes) - set(classes or images.classes))
        if unknown:
            raise DataError(f"the class {unknown[0]} is in the validation images but not in the training images")
        self._label = [list(classes or images.classes).index(name) for name in images.classes]

    def __call__(self, index: int) -> tuple[Any, int]:
        label = self._images.label(index)
        pixels = self._transform(self._images.read(index))
        return ({self._key: pixels} if self._key else pixels), self._label[label or 0]
