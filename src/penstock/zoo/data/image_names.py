"""Open a set of images by name: folders, files, lists of files, archives, CIFAR and digits."""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import DataError
from penstock.files import check_stored
from penstock.zoo.data.archives import ARCHIVES, open_archive
from penstock.zoo.data.folders import (
    IMAGE_SUFFIXES,
    is_image_name,
    label_names,
    natural_key,
    open_folder,
    open_records,
    read_file,
    records_in_folder,
    walk,
)
from penstock.zoo.data.image_set import ImageSet, picture
from penstock.zoo.optional import optional_import

if TYPE_CHECKING:
    from PIL.Image import Image

_LIST = ".txt"


def open_images(path: str | Path | Sequence[str]) -> ImageSet:
    """Open a set of images without reading the images.

    `path` is a folder of images, labelled by sub-folder if it has any; one image; an archive (.tar, .tar.gz, .tar.xz,
    .zip) of such a folder, or of WebDataset; a .txt list of images, folders or archives; CIFAR-10 or CIFAR-100 in their
    original binary format, as one file, or as a folder or an archive (all records, training data first); or the word
    `digits`. Several paths are one set.

    >>> open_images("photos").name(0)  # doctest: +SKIP
    'cats/1.jpg'

    Raises `DataError` if the path does not exist or holds no images.
    """
    if not isinstance(path, (str, Path)):
        return open_images(path[0]) if len(path) == 1 else _joined(path, [open_images(each) for each in path])
    if str(path) == "digits":
        return _digits()
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} not found; give a folder, an image, an archive, a {_LIST} list, or the word digits")
    check_stored(path)
    if path.is_dir():
        files = records_in_folder(path)
        pictures = any(map(is_image_name, walk(path))) if files else True
        return open_folder(path) if pictures else open_records(files)
    if path.suffix == ".bin":
        return open_records(records_in_folder(path.parent, only=path.name) or [])
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return ImageSet(names=(path.name,), labels=(None,), classes=(), load=partial(read_file, (path,)))
    if path.name.lower().endswith(ARCHIVES):
        return open_archive(path)
    if path.suffix.lower() == _LIST:
        return _listed(path)
    known = ", ".join((*IMAGE_SUFFIXES, *ARCHIVES, _LIST))
    raise DataError(f"{path} is not a set of images; give a folder, {known} or CIFAR's .bin")


def name_of(path: str | Path | Sequence[str]) -> str:
    """Return the name of a set of images: its paths.

    >>> name_of(["a.tar", "b.tar"])
    'a.tar, b.tar'
    """
    return str(path) if isinstance(path, (str, Path)) else ", ".join(path)


def _listed(path: Path) -> ImageSet:
    """Open a list of paths, one in each line, in its order; they start at the current folder, or at the list's."""
    try:
        lines = [line.rstrip("\r") for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"the list {path} cannot be read ({problem}); give a text file of paths") from None
    if not lines:
        raise DataError(f"the list {path} has no lines; give a text file of paths")
    base = next((base for base in (Path(), path.parent) if (base / lines[0]).exists()), None)
    if base is None:
        raise DataError(
            f"{lines[0]}, line 1 of {path}, not found in {Path.cwd()} or {path.parent}; each line must be the path of "
            "an image, a folder or an archive, and labels are given with --set labels=FILE"
        )
    paths = [base / line for line in lines]
    if any(each.is_dir() or each.name.lower().endswith(ARCHIVES) for each in paths):
        return _joined(lines, [open_images(each) for each in paths])
    ordered, numbers, classes = label_names(lines, is_archive=True)
    labels = dict(zip(ordered, numbers, strict=True))
    return ImageSet(
        names=lines,
        labels=[labels[line] for line in lines],
        classes=classes,
        load=partial(read_file, paths),
        by_folder=True,
    )


def _joined(paths: Sequence[str], sets: Sequence[ImageSet]) -> ImageSet:
    """Return several sets as one; names begin with the paths, and classes of one name are one."""
    classes = tuple(sorted({name for each in sets for name in each.classes}, key=natural_key))
    numbers = {name: number for number, name in enumerate(classes)}
    return ImageSet(
        names=[
            path if each.names == (Path(path).name,) else f"{path.rstrip('/')}/{name}"
            for path, each in zip(paths, sets, strict=True)
            for name in each.names
        ],
        labels=[None if label is None else numbers[each.classes[label]] for each in sets for label in each.labels],
        classes=classes,
        load=partial(_load_joined, sets, list(itertools.accumulate(map(len, sets)))),
        by_folder=any(each.by_folder and each.classes for each in sets),
        left_out=", ".join(each.left_out for each in sets if each.left_out),
        encoded=any(each.encoded for each in sets),
    )


def _load_joined(sets: Sequence[ImageSet], ends: Sequence[int], index: int) -> "Image | bytes":
    place = bisect_right(ends, index)
    return sets[place].load(index - (ends[place - 1] if place else 0))


def _digits() -> ImageSet:
    digits = optional_import("sklearn.datasets", "data", DataError).load_digits()
    values = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    names = tuple(f"digits/{index:04}" for index in range(len(values)))
    labels = tuple(int(label) for label in digits.target)
    return ImageSet(
        names=names, labels=labels, classes=tuple("0123456789"), load=partial(picture, values), encoded=False
    )
