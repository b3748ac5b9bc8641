"""The name of a set of images to the set: folders, files, archives, CIFAR and digits."""

from pathlib import Path

import numpy as np

from penstock.errors import DataError
from penstock.zoo.data.archives import open_archive
from penstock.zoo.data.cifar import open_records, records_in_folder
from penstock.zoo.data.folders import IMAGE_SUFFIXES, Files, open_folder
from penstock.zoo.data.image_set import Arrays, ImageSet
from penstock.zoo.optional import optional_import


def open_images(path: str | Path) -> ImageSet:
    """Open a set of images without reading the images.

    `path` is a folder of images, labelled by sub-folder if it has any; one image; a .tar or .tar.gz of
    such a folder; CIFAR-10 or CIFAR-100 in their original binary form, as one file, a folder or an
    archive (all records, training first: give one file for a part); or the word `digits`.

    >>> open_images("photos").name(0)  # doctest: +SKIP
    'cats/1.jpg'

    Raises `DataError` when there is no such path, or it holds no images.
    """
    if str(path) == "digits":
        return _digits()
    path = Path(path)
    if not path.exists():
        raise DataError(f"there is no {path}; give a folder, an image, a .tar or .tar.gz, or the word digits")
    if path.is_dir():
        files = records_in_folder(path)
        return open_records(files) if files else open_folder(path)
    if path.suffix == ".bin":
        return open_records(records_in_folder(path.parent, only=path.name) or [])
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return ImageSet(names=(path.name,), labels=(None,), classes=(), load=Files((path,)))
    if path.name.lower().endswith((".tar", ".tar.gz", ".tgz")):
        return open_archive(path)
    known = ", ".join(IMAGE_SUFFIXES)
    raise DataError(f"{path} is no set of images; give a folder, {known}, .tar, .tar.gz or CIFAR's .bin")


def _digits() -> ImageSet:
    digits = optional_import("sklearn.datasets", "data", DataError).load_digits()
    values = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    names = tuple(f"digits/{index:04}" for index in range(len(values)))
    labels = tuple(int(label) for label in digits.target)
    return ImageSet(names=names, labels=labels, classes=tuple("0123456789"), load=Arrays(values))
