"""CIFAR-10 and CIFAR-100 in their original binary format."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import DataError
from penstock.zoo.data.folders import natural_key
from penstock.zoo.data.image_set import ByteRange, ImageSet, picture

if TYPE_CHECKING:
    from PIL.Image import Image

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
