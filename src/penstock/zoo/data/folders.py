"""Folders of images: which files are images, in what order, and how folders or a text file label them."""

import csv
import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import DataError
from penstock.units import format_bytes
from penstock.zoo.data.image_set import MAX_FILE_BYTES, SUFFIXES, ImageSet

if TYPE_CHECKING:
    from PIL.Image import Image


IMAGE_SUFFIXES = tuple(suffix for known in SUFFIXES.values() for suffix in known)


def open_folder(root: Path) -> ImageSet:
    """Open a folder of images, labelled by sub-folder if it has any.

    >>> open_folder(Path("photos")).classes  # doctest: +SKIP
    ('cats', 'dogs')

    Raises `DataError` if it contains no image at any depth.
    """
    files: list[str] = []
    folders: list[str] = []
    for name in walk(root):
        (folders if name.endswith("/") else files).append(name)
    return label_by_folder(root, files, folders, lambda names: partial(read_file, [root / name for name in names]))


def label_by_folder(
    source: Path, files: Iterable[str], folders: Iterable[str],
    reader: Callable[[Sequence[str]], Callable[[int], "Image | bytes"]], *, is_archive: bool = False,
    left_out: Iterable[str] = (),
) -> ImageSet:  # fmt: skip
    """Return the images among the files of a folder or an archive; others are counted, with the reasons `left_out`.

    A folder without images, next to those that are classes, is a class, too: the numbers of the others depend on it.

    Raises `DataError` if there are no images.
    """
    reasons, names = Counter(left_out), []
    for name in files:
        leaf = name.rpartition("/")[2]
        if is_image_name(name):
            names.append(name)
        elif not leaf.startswith("."):
            reasons[f"{Path(leaf).suffix.lower() or leaf} files"] += 1
    text = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    if not names:
        found = f"; it has {text}" if text else ""
        raise DataError(f"{source} holds no images{found}; looked for {', '.join(IMAGE_SUFFIXES)} and CIFAR's .bin")
    ordered, labels, classes = label_names(names, folders, is_archive=is_archive)
    return ImageSet(names=ordered, labels=labels, classes=classes, load=reader(ordered), by_folder=True, left_out=text)


def label_names(
    names: Iterable[str], others: Iterable[str] = (), *, is_archive: bool
) -> tuple[list[str], list[int | None], tuple[str, ...]]:
    """Sort image paths in natural order and label them by the first folder in which they differ.

    >>> label_names(["a/b/cat/10.jpg", "a/b/cat/9.jpg", "a/b/dog/1.jpg"], is_archive=True)
    (['a/b/cat/9.jpg', 'a/b/cat/10.jpg', 'a/b/dog/1.jpg'], [0, 0, 1], ('cat', 'dog'))

    An archive of one folder of images has no labels; a folder with one sub-folder has one class. `others` are folders,
    which are classes if they are next to one.
    """
    ordered = sorted(names, key=natural_key)
    folders = [name.split("/")[:-1] for name in ordered]
    depth = 0
    while folders and all(len(parts) > depth and parts[depth] == folders[0][depth] for parts in folders):
        depth += 1
    if all(len(parts) == depth for parts in folders) and not is_archive:
        depth = 0  # all images are in one folder: its first part below the opened folder is the class
    found = [parts[depth] if len(parts) > depth else None for parts in folders]
    present = {name for name in found if name is not None}
    if present:
        outer = folders[0][:depth]
        beside = (name.rstrip("/").split("/") for name in others)
        present |= {parts[depth] for parts in beside if parts[:depth] == outer and len(parts) == depth + 1}
        present = {name for name in present if not name.startswith((".", "__MACOSX"))}
    classes = tuple(sorted(present, key=natural_key))
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
    """Read one of these files; raises `OSError` as `open` does, for a pipe, and for a file that is too large."""
    found = paths[index].stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "a pipe or device, not a file")
    if found.st_size > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"{format_bytes(found.st_size)} are more than {format_bytes(MAX_FILE_BYTES)}")
    return paths[index].read_bytes()


def walk(root: Path, folder: Path | None = None, above: frozenset[tuple[int, int]] = frozenset()) -> Iterable[str]:
    """Return every file below a folder, and every folder with a slash at its end; links are followed.

    Two links to one folder are two folders; a link to a folder that it is in is not followed.
    """
    folder = folder or root
    try:
        status = folder.stat()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as problem:
        raise DataError(
            f"the folder {folder} cannot be read ({problem.strerror}), so its images would be missing; change its "
            "permissions, or move it away"
        ) from None
    key = (status.st_dev, status.st_ino)
    if key in above:
        return
    if folder != root:
        yield f"{folder.relative_to(root).as_posix()}/"
    for entry in entries:
        if not entry.is_dir():  # a link without a target is a file that cannot be read
            yield Path(entry.path).relative_to(root).as_posix()
        elif not entry.name.startswith("."):
            yield from walk(root, Path(entry.path), above | {key})


def read_labels(path: Path, images: ImageSet) -> ImageSet:
    """Return images with the labels of a file: a line for each image with its name and its label, as text or CSV.

    The name is that of the image, with or without folders or suffix; the label a class's number from 0, its name or its
    synset. Lines of other images, such as a header, are ignored, and so is what follows a synset in Kaggle's files.

    Example:
        ILSVRC2012_val_00000001.JPEG 65
        ILSVRC2012_val_00000002,n03982430

    Raises `DataError` if the file cannot be read, has no label for any image, or two labels for one.
    """
    rows = _places(images)
    found: dict[int, str] = {}
    for number, (name, label) in _lines(path):
        row = rows.get(name)
        if row is not None and found.setdefault(row, label) != label:
            raise DataError(
                f"{path} has two labels for {name}: {found[row]} and, in line {number}, {label}; remove one"
            )
    if not found:
        raise DataError(
            f"{path} has no label for any of the {len(images)} images, such as {images.names[0]}; its lines must begin "
            "with their names"
        )
    classes = tuple(sorted(set(found.values()), key=natural_key))
    index = {label: place for place, label in enumerate(classes)}
    labels = [index[found[row]] if row in found else None for row in range(len(images))]
    return replace(images, labels=labels, classes=classes, by_folder=False)


def _places(images: ImageSet) -> dict[str, int]:
    """Return the row of each image by its name and, if only one image has them, by its leaf and its stem."""
    short = [(name.rpartition("/")[2], Path(name).stem) for name in images.names]
    counts = Counter(key for keys in short for key in set(keys))
    places = {key: row for row, keys in enumerate(short) for key in keys if counts[key] == 1}
    return {**places, **{name: row for row, name in enumerate(images.names)}}


def _lines(path: Path) -> list[tuple[int, tuple[str, str]]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8 text"
        raise DataError(f"the labels {path} cannot be read ({reason}); give a text file") from None
    found = []
    for number, line in enumerate(lines, 1):
        mark = next((mark for mark in ",\t;" if mark in line), None)
        parts = [part.strip() for part in (next(csv.reader([line], delimiter=mark)) if mark else line.rsplit(None, 1))]
        if not any(parts):
            continue
        if len(parts) < 2 or not parts[1]:
            raise DataError(f"line {number} of {path} must be an image and its label; got {line.strip()!r}")
        label = parts[1].split()[0] if parts[1][:1] == "n" and parts[1][1:9].isdecimal() else parts[1]
        found.append((number, (parts[0].removeprefix("./"), label)))
    return found
