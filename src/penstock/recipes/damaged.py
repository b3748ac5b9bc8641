"""Damaged images of a run: found before the first epoch, and one line if found later."""

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from penstock.errors import DataError, PenstockError, UsageError
from penstock.files import write_whole
from penstock.group.world import World
from penstock.recipes.settings import FitSettings
from penstock.terminal.progress import working
from penstock.text import note
from penstock.transport.collectives import all_gather
from penstock.wire import FEEDER
from penstock.zoo.data.image_set import ImageSet
from penstock.zoo.data.preprocess import check_resized

_CHUNK = 1024  # images that are handed to the threads at a time
_WORKER = re.compile(r"Caught \w+ in DataLoader worker process")
LISTING = "damaged.txt"


def check_images(
    sets: Iterable[tuple[str, ImageSet, Sequence[int]]], folder: Path, length: int, *, skip: bool | None = None
) -> list[str]:
    """Decode the rows of image sets, each with its path, and return the paths of damaged ones.

    Images that are too narrow for inputs of this length are damaged too. Decoding takes a small part of an epoch. The
    paths are written to a file in `folder`. Raises `DataError` with the number of damaged images unless they are to be
    skipped, which None excludes.
    """
    damaged: list[str] = []
    reasons: list[str] = []
    total = 0
    with working("checking the images"), ThreadPoolExecutor() as pool:
        for path, images, rows in sets:
            if not images.encoded:
                continue
            total += len(rows)
            for start in range(0, len(rows), _CHUNK):
                chunk = rows[start : start + _CHUNK]
                reasons_of = pool.map(lambda row, of=images: _problem(of, row, length), chunk)
                for row, reason in zip(chunk, reasons_of, strict=True):
                    if reason is not None:
                        damaged.append(path_of(path, images, row))
                        reasons.append(reason)
    listing = folder / LISTING
    if damaged or skip:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(listing, "".join(f"{name}\n" for name in damaged))
    if damaged:
        found = f"{len(damaged)} of {total} images cannot be read, the first one: {reasons[0]}"
        if not skip:
            way = "" if skip is None else ", or train without them with --skip-damaged"
            raise DataError(f"{found}; remove those in {listing}{way}")
        note(f"{found}; training without those in {listing}")
    return damaged


def on_every_rank(settings: FitSettings, world: World | None, find: Callable[[], list[str]]) -> list[str]:
    """Return the damaged images that rank 0 finds, or those of the run that is resumed or joined."""
    if settings.resume or settings.join is not None:
        find = partial(_listed, settings.folder) if settings.skip_damaged else list
    if world is None:
        return find()
    mine = {"damaged": find() if world.rank == FEEDER else []}
    with world.explained():
        found: list[str] = all_gather(world.transport, mine)[FEEDER]["damaged"]
    return found


def _listed(folder: Path) -> list[str]:
    listing = folder / LISTING
    try:
        return listing.read_text(encoding="utf-8").split("\n")[:-1]
    except OSError as problem:
        raise UsageError(
            f"{listing} cannot be read ({problem.strerror}), which names the damaged images of the run; give the run's "
            "folder as --output"
        ) from None


def path_of(path: str, images: ImageSet, row: int) -> str:
    """Return the path of a row of an image set, which is in a folder or an archive."""
    return str(Path(path, images.name(row)))


def _problem(images: ImageSet, row: int, length: int) -> str | None:
    try:
        check_resized(images.read(row).size, length)
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
