"""Labels of a flat set of images, from a text file."""

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path

from penstock.errors import DataError
from penstock.zoo.data.folders import natural_key
from penstock.zoo.data.image_set import ImageSet


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
