"""Folders of images: which files are images, in what order, and how folders or a text file label them; CIFAR's records.

CIFAR-10 and CIFAR-100 are read in their original binary format.
"""

import csv
import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import DataError
from penstock.units import format_bytes
from penstock.zoo.data.image_set import MAX_FILE_BYTES, SUFFIXES, ByteRange, ImageSet, picture

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
    source: Path,
    files: Iterable[str],
    folders: Iterable[str],
    reader: Callable[[Sequence[str]], Callable[[int], "Image | bytes"]],
    *,
    is_archive: bool = False,
    left_out: Iterable[str] = (),
) -> ImageSet:
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


_IMAGE_BYTES = 3 * 32 * 32
_RECORD_NAMES = re.compile(r"(data_batch_[0-9]+|test_batch|train|test)\.bin")
_NAME_FILES = ("batches.meta.txt", "fine_label_names.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFile:
    """One file of records, with the position of its bytes."""

    name: str
    source: Path
    offset: int
    num_bytes: int

    @property
    def leaf(self) -> str:
        """Name of the file without folders."""
        return self.name.rpartition("/")[2]

    @property
    def num_label_bytes(self) -> int:
        """One for CIFAR-10; two for CIFAR-100, coarse and fine."""
        return 2 if self.leaf in ("train.bin", "test.bin") else 1

    @property
    def record_bytes(self) -> int:
        """Labels and image."""
        return self.num_label_bytes + _IMAGE_BYTES


def is_record_name(name: str) -> bool:
    """Return True if a path is named like a file of CIFAR records.

    >>> is_record_name("cifar-10-batches-bin/test_batch.bin")
    True
    """
    return _RECORD_NAMES.fullmatch(name.rpartition("/")[2]) is not None


def is_names_file(name: str) -> bool:
    """Return True if a path is named like a list of CIFAR class names.

    >>> is_names_file("cifar-10-batches-bin/batches.meta.txt")
    True
    """
    return name.rpartition("/")[2] in _NAME_FILES


def records_in_folder(folder: Path, only: str | None = None) -> list[RecordFile]:
    """Return the record files directly in a folder; with `only`, the one with that name.

    >>> [file.name for file in records_in_folder(Path("cifar-100-binary"))]  # doctest: +SKIP
    ['train.bin', 'test.bin']

    Raises `DataError` if `only` is not named like a file of records.
    """
    if only is not None and not is_record_name(only):
        raise DataError(
            f"{folder / only} is not named like CIFAR's files; "
            "they are data_batch_1.bin to data_batch_5.bin, test_batch.bin, train.bin and test.bin"
        )
    return [
        RecordFile(name=file.name, source=file, offset=0, num_bytes=file.stat().st_size)
        for file in folder.iterdir()
        if is_record_name(file.name) and only in (None, file.name) and file.is_file()
    ]


def open_records(files: Sequence[RecordFile], texts: Mapping[str, bytes] | None = None) -> ImageSet:
    """Open CIFAR records, training files first; the bytes of the images are read on access.

    `texts` holds the lists of class names; without it they are searched next to the files.

    >>> len(open_records(records_in_folder(Path("cifar-10-batches-bin"))))  # doctest: +SKIP
    60000

    Raises `DataError` if a file does not contain a whole number of records, or CIFAR-10 and CIFAR-100 are mixed.
    """
    ordered = sorted(files, key=lambda file: (file.leaf.startswith("test"), natural_key(file.name)))
    if len({file.num_label_bytes for file in ordered}) > 1:
        raise DataError(f"{ordered[0].source.parent} mixes CIFAR-10 and CIFAR-100; give one of the files")
    num_classes = 100 if ordered[0].num_label_bytes == 2 else 10
    if texts is None:
        folder = ordered[0].source.parent
        texts = {name: (folder / name).read_bytes() for name in _NAME_FILES if (folder / name).is_file()}
    names: list[str] = []
    labels: list[int | None] = []
    places: list[tuple[ByteRange, int]] = []
    for file in ordered:
        found = _labels(file, num_classes)
        names += [f"{file.name}#{index}" for index in range(len(found))]
        labels += found
        starts = range(file.offset + file.num_label_bytes, file.offset + file.num_bytes, file.record_bytes)
        places += zip(repeat(ByteRange(file.source)), starts)
    load = partial(_picture, places)
    return ImageSet(names=names, labels=labels, classes=_classes(texts, num_classes), load=load, encoded=False)


def _labels(file: RecordFile, num_classes: int) -> list[int]:
    if file.num_bytes == 0 or file.num_bytes % file.record_bytes:
        raise DataError(
            f"{file.name} must be a multiple of CIFAR's {file.record_bytes} bytes; got {file.num_bytes}; copy it again"
        )
    data = ByteRange(file.source).read(file.offset, file.num_bytes)
    labels: list[int] = np.frombuffer(data, np.uint8)[file.num_label_bytes - 1 :: file.record_bytes].tolist()
    if max(labels) >= num_classes:
        raise DataError(f"{file.name} has the label {max(labels)} of {num_classes} classes; copy it again")
    return labels


def _classes(texts: Mapping[str, bytes], num_classes: int) -> tuple[str, ...]:
    """Return the class names from a list of the right length, otherwise numbers."""
    for text in texts.values():
        names = tuple(text.decode("utf-8", "replace").split())
        if len(names) == num_classes:
            return names
    return tuple(str(index) for index in range(num_classes))


def _picture(places: Sequence[tuple[ByteRange, int]], index: int) -> "Image":
    reader, start = places[index]
    planes = np.frombuffer(reader.read(start, _IMAGE_BYTES), np.uint8).reshape(3, 32, 32)
    return picture(planes.transpose(1, 2, 0)[None], 0)
