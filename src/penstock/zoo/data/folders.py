"""Folders of images: which files are images, in what order, and how folders label them."""

import os
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from penstock.errors import DataError
from penstock.zoo.data.image_set import ImageSet

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def open_folder(root: Path) -> ImageSet:
    """Open a folder of images, labelled by sub-folder if it has any.

    >>> open_folder(Path("photos")).classes  # doctest: +SKIP
    ('cats', 'dogs')

    Raises `DataError` if it contains no image at any depth.
    """
    names, labels, classes = label_by_folder(filter(is_image_name, _walk(root)), is_archive=False)
    if not names:
        raise DataError(
            f"{root} holds no images; looked for {', '.join(IMAGE_SUFFIXES)} and CIFAR's .bin in it and below"
        )
    read = partial(read_file, [root / name for name in names])
    return ImageSet(names=names, labels=labels, classes=classes, load=read, by_folder=True)


def label_by_folder(names: Iterable[str], is_archive: bool) -> tuple[list[str], list[int | None], tuple[str, ...]]:
    """Sort image paths in natural order and label them by the first folder in which they differ.

    >>> label_by_folder(["a/b/cat/10.jpg", "a/b/cat/9.jpg", "a/b/dog/1.jpg"], is_archive=True)
    (['a/b/cat/9.jpg', 'a/b/cat/10.jpg', 'a/b/dog/1.jpg'], [0, 0, 1], ('cat', 'dog'))

    An archive of one folder of images has no labels; a folder with one sub-folder has one class.
    """
    ordered = sorted(names, key=natural_key)
    folders = [name.split("/")[:-1] for name in ordered]
    depth = 0
    while folders and all(len(parts) > depth and parts[depth] == folders[0][depth] for parts in folders):
        depth += 1
    if all(len(parts) == depth for parts in folders) and not is_archive:
        depth = 0  # all images are in one folder: its first part below the opened folder is the class
    found = [parts[depth] if len(parts) > depth else None for parts in folders]
    classes = tuple(sorted({name for name in found if name is not None}, key=natural_key))
    index = {name: position for position, name in enumerate(classes)}
    return ordered, [None if name is None else index[name] for name in found], classes


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sorting key that puts 9 before 10.

    >>> sorted(["img10.png", "img9.png"], key=natural_key)
    ['img9.png', 'img10.png']
    """
    parts = re.split(r"([0-9]+)", name.lower())
    return [*(_part_key(part) for part in parts if part), (2, 0, name)]


def _part_key(part: str) -> tuple[int, int, str]:
    """Order numbers by their digits, since a name may have more digits than `int` accepts."""
    if not part.isdecimal():
        return 1, 0, part
    digits = part.lstrip("0")
    return 0, len(digits), digits


def is_image_name(name: str) -> bool:
    """Return True if a path looks like an image that is not hidden.

    >>> is_image_name("cats/1.JPG"), is_image_name("cats/._1.jpg")
    (True, False)
    """
    leaf = name.rpartition("/")[2]
    return leaf.lower().endswith(IMAGE_SUFFIXES) and not leaf.startswith(".")


def read_file(paths: Sequence[Path], index: int) -> bytes:
    """Read one of these files; raises `OSError` as `open` does."""
    return paths[index].read_bytes()


def _walk(root: Path) -> Iterable[str]:
    """Return every file below a folder; links are followed, and each folder is visited once."""
    seen: set[tuple[int, int]] = set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (Path(folder, file).relative_to(root).as_posix() for file in files)
