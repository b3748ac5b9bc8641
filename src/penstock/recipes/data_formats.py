"""Formats of training data, and the task of each format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import UsageError
from penstock.files import check_stored
from penstock.zoo.data.texts import is_trees

if TYPE_CHECKING:  # the settings read the help texts without importing torch
    from penstock.recipes.settings import FitSettings
    from penstock.recipes.tasks import Agree, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFormat:
    """A data format: its help text, a test for paths, its task, and the settings that only this format has."""

    help: str
    holds: Callable[[Path], bool]
    task: Callable[["FitSettings", "Agree"], "Task"]
    options: tuple[str, ...] = ()


def _sentences(settings: "FitSettings", _agree: "Agree") -> "Task":
    from penstock.recipes.data_tasks import sentence_task

    return sentence_task(settings)


def _text(settings: "FitSettings", _agree: "Agree") -> "Task":
    from penstock.recipes.data_tasks import language_task

    return language_task(settings)


def _images(settings: "FitSettings", agree: "Agree") -> "Task":
    from penstock.recipes.data_tasks import image_task

    return image_task(settings, agree)


# the first format whose test a path passes is used
FORMATS: Mapping[str, DataFormat] = {
    "sentences": DataFormat(
        help="a sentiment treebank (SST)",
        holds=lambda path: is_trees(path) or is_trees(path / "train.txt"),
        task=_sentences,
        options=("length",),
    ),
    "text": DataFormat(
        help="a text file", holds=lambda path: path.suffix == ".txt" and path.is_file(), task=_text, options=("length",)
    ),
    "images": DataFormat(
        help="images (folder, tar, CIFAR, 'digits')",
        holds=lambda _path: True,
        task=_images,
        options=("teacher", "hold_out", "skip_damaged", "preprocess"),
    ),
}
FORMATS_HELP = ", ".join(known.help for known in FORMATS.values())


def make_task(settings: "FitSettings", agree: "Agree" = lambda _find: []) -> "Task":
    """Determine the training task from the data, and prepare it; `agree` finds damaged rows, by default none.

    Raises `ModelError` and `DataError` if the model or data cannot be loaded, `UsageError` if they do not match.
    """
    from penstock.recipes.tasks import metadata_of

    path = Path(settings.data)
    check_stored(path)
    found = next(known for known in FORMATS.values() if known.holds(path))
    defaults = {field.name: field.default for field in msgspec.structs.fields(settings)}
    options = {option for known in FORMATS.values() for option in known.options}
    for option in options - set(found.options):
        if getattr(settings, option) != defaults[option]:
            kinds = " and ".join(name for name, known in FORMATS.items() if option in known.options)
            raise UsageError(f"--{option.replace('_', '-')} is for {kinds}, not for {settings.data}; leave it out")
    made = found.task(settings, agree)
    return replace(made, metadata={**metadata_of(settings), **made.metadata})
