"""Damaged images of a training: found before the first epoch, and one line if found later."""

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.errors import DataError, PenstockError
from penstock.files import write_whole
from penstock.terminal.progress import working
from penstock.zoo.data.image_set import ImageSet

_CHUNK = 1024  # images that are handed to the threads at a time
_WORKER = re.compile(r"Caught \w+ in DataLoader worker process")
LISTING = "damaged.txt"


def check_images(sets: Iterable[tuple[str, ImageSet, Sequence[int]]], folder: Path) -> None:
    """Decode the rows of image sets, each with its path; decoding takes a small part of an epoch.

    Raises `DataError` with the number of damaged images; their names are in a file in `folder`.
    """
    damaged: list[str] = []
    reasons: list[str] = []
    total = 0
    with working("checking the images"), ThreadPoolExecutor() as pool:
        for path, images, rows in sets:
            total += len(rows)
            for start in range(0, len(rows), _CHUNK):
                chunk = rows[start : start + _CHUNK]
                for row, reason in zip(chunk, pool.map(lambda row, of=images: _problem(of, row), chunk), strict=True):
                    if reason is not None:
                        damaged.append(str(Path(path, images.name(row))))
                        reasons.append(reason)
    if damaged:
        listing = folder / LISTING
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(listing, "".join(f"{name}\n" for name in damaged))
        raise DataError(
            f"{len(damaged)} of {total} images cannot be read, the first one: {reasons[0]}; remove those in {listing}"
        )


def _problem(images: ImageSet, row: int) -> str | None:
    try:
        images.read(row)
    except DataError as problem:
        return str(problem)
    return None


def without_traceback(error: PenstockError) -> PenstockError:
    """Return an error of a loading process without the traceback that torch puts into its message."""
    if not _WORKER.match(str(error)):
        return error
    lines = str(error).replace("\\n", "\n").splitlines()  # an error writes line ends out
    said = [line for line in lines if line.strip()][-1]
    return type(error)(said.removeprefix(f"{type(error).__module__}.{type(error).__qualname__}: "))
