"""Images of a run: their labels as classes of a model, and damaged images, found before the first epoch or later.

Folders are matched by name, or by number if the model has no names.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from penstock.errors import DataError, PenstockError, UsageError, exclude
from penstock.files import write_whole
from penstock.group.world import World
from penstock.recipes.settings import FitSettings
from penstock.terminal.progress import working
from penstock.text import note
from penstock.transport.collectives import all_gather
from penstock.wire import FEEDER
from penstock.zoo.data.image_set import ImageSet
from penstock.zoo.data.preprocess import check_resized
from penstock.zoo.models.models import ZooModel
from penstock.zoo.models.timm_models import imagenet_synsets

_SYNSET = re.compile(r"n[0-9]{8}")
_NAMES = "put a config.json with label_names, a list in the order of the model's outputs, next to the weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Images, the model's class of each of their labels, and the names of the model's classes.

    `reason` tells why labels have no classes, so that no accuracy can be measured.
    """

    images: ImageSet
    names: Sequence[str] = ()
    classes: Mapping[int, int] = field(default_factory=dict)
    reason: str | None = None


def match_labels(model: ZooModel, images: ImageSet, order: str | None = None) -> Labels:
    """Match the folders of images with the classes of a model.

    Names are compared as they are; folders named by ImageNet's synsets match the models of these classes. Without names
    a folder's number is its class, if there are as many; `order` numbers folders as torchvision (sorted) or natural (9
    before 10), or is a file with the folder of each class in a line, as timm's class_map.txt.

    Raises `UsageError` if the two orders differ and none was chosen, and for folders that are parts of a data set.
    """
    named, num_classes = tuple(model.class_names or ()), model.num_classes
    if order not in (None, "torchvision", "natural"):
        return _by_map(model, images, Path(order))
    chosen = named and order is not None
    exclude("class_order", chosen, f"{model.name} has class names, by which folders are matched")
    if images.is_parts and not set(images.classes) <= set(named):
        parts = " and ".join(images.classes)
        raise UsageError(f"the folders {parts} are parts of a data set, not classes; give one of them")
    if not images.classes:
        return Labels(images=images, names=named)
    by_number = len(images.classes) == num_classes
    if not named and by_number:
        images = _ordered(model, images, order)
    places = {name: index for index, name in enumerate(named)}
    if set(images.classes) <= set(places):
        return _checked(images, named, places, num_classes)
    if not images.by_folder and all(name.isdecimal() and int(name) < num_classes for name in images.classes):
        return _checked(images, named, {name: int(name) for name in images.classes}, num_classes)
    if by_number and (not named or images.classes == tuple(map(str, range(num_classes)))):
        numbers = {name: index for index, name in enumerate(images.classes)}
        return _checked(images, named or images.classes, numbers, num_classes)
    if all(_SYNSET.fullmatch(name) for name in images.classes):
        synsets = {name: index for index, name in enumerate(imagenet_synsets(num_classes))}
        if set(images.classes) <= set(synsets):
            return _checked(images, named, synsets, num_classes)
    if not named:
        last = images.classes[-1]
        reason = (
            f"the model has {num_classes} classes without names, and the images {len(images.classes)}, the last one "
            f"{last}; {_NAMES}"
        )
    else:
        unknown = next(name for name in images.classes if name not in places)
        reason = (
            f"the label {unknown} is not one of the model's {len(named)} classes ({', '.join(named[:3])} ...); rename "
            f"it, or {_NAMES}"
        )
    return Labels(images=images, names=named, reason=reason)


def _by_map(model: ZooModel, images: ImageSet, path: Path) -> Labels:
    """Match folders by a file of their names, in the order of the model's outputs."""
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError):
        raise UsageError(
            f"class_order must be torchvision, natural or a text file with a folder's name in each line; got {path}"
        ) from None
    places = {name: index for index, name in enumerate(names)}
    unknown = next((name for name in images.classes if name not in places), None)
    if len(places) != len(names) or len(names) != model.num_classes or unknown is not None:
        problem = f"not {unknown}" if unknown is not None else f"{len(places)} different names"
        raise UsageError(
            f"{path} must have the folder of each of the model's {model.num_classes} classes, in their order, in a "
            f"line; it has {problem}"
        )
    return _checked(images, tuple(model.class_names or names), places, model.num_classes)


def check_order(model: ZooModel, images: ImageSet) -> None:
    """Raise `UsageError` if given weights have a class for each folder, but the order of the folders is unknown."""
    if not model.class_names and len(images.classes) == model.num_classes:
        _ordered(model, images, None, "")


def _ordered(
    model: ZooModel, images: ImageSet, order: str | None, option: str = "give --set class_order=ORDER, or "
) -> ImageSet:
    """Return the images with their classes in the chosen order; random weights have no order."""
    by_code = tuple(sorted(images.classes))
    if not images.by_folder or by_code == images.classes:
        return images
    if order is None and not model.is_random:
        here = next(place for place, pair in enumerate(zip(by_code, images.classes, strict=True)) if len(set(pair)) > 1)
        raise UsageError(
            f"class {here} is the folder {by_code[here]} in the order of torchvision (sorted), and "
            f"{images.classes[here]} in natural order, as in timm; the weights have no class names: {option}{_NAMES}"
            + ("" if model.name.startswith(("timm:", "hf:")) else ", or return class_names from the function")
        )
    return images.reordered(by_code) if order == "torchvision" else images


def _checked(images: ImageSet, names: Sequence[str], places: Mapping[str, int], num_classes: int) -> Labels:
    if num_classes == 1:
        return Labels(images=images, names=names, reason="the model has one output, which is every image's class")
    classes = {label: places[name] for label, name in enumerate(images.classes)}
    return Labels(images=images, names=names, classes=classes)


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
