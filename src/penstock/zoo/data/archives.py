"""Images and CIFAR records inside a tar file, read in place."""

import tarfile
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import DataError
from penstock.text import one_line
from penstock.zoo.data import cifar
from penstock.zoo.data.folders import IMAGE_SUFFIXES, is_image_name, label_by_folder
from penstock.zoo.data.image_set import ByteRange, ImageSet


def open_archive(path: Path) -> ImageSet:
    """Open a .tar or .tar.gz of images, or of CIFAR's binary files, without unpacking it.

    >>> open_archive(Path("cifar10-test.tar")).classes[0]  # doctest: +SKIP
    'airplane'

    Raises `DataError` when the archive is damaged or holds no images.
    """
    places = _places(path)
    records = [
        cifar.RecordFile(name=name, source=path, offset=offset, num_bytes=num_bytes)
        for name, (offset, num_bytes) in places.items()
        if cifar.is_record_name(name)
    ]
    if records:
        texts = {name: ByteRange(path).read(*place) for name, place in places.items() if cifar.is_names_file(name)}
        return cifar.open_records(records, texts)
    names, labels, classes = label_by_folder(filter(is_image_name, places), is_archive=True)
    if not names:
        raise DataError(f"{path} holds no images; looked for {', '.join(IMAGE_SUFFIXES)} and CIFAR's .bin")
    return ImageSet(names=names, labels=labels, classes=classes, load=_Members(path, [places[n] for n in names]))


class _Members:
    """Reads members of an archive by index."""

    def __init__(self, path: Path, places: Sequence[tuple[int, int]]) -> None:
        self._bytes = ByteRange(path)
        self._places = places

    def __call__(self, index: int) -> bytes:
        return self._bytes.read(*self._places[index])


def _places(path: Path) -> dict[str, tuple[int, int]]:
    """Return where each file in an archive begins and how long it is."""
    compressed = path.name.lower().endswith("gz")
    try:
        with tarfile.open(path, "r:gz" if compressed else "r:") as archive:
            # sparse members are not stored in one piece
            members = [member for member in archive if member.isreg() and not member.issparse()]
    except (tarfile.TarError, OSError, EOFError) as problem:
        raise DataError(f"{path} is not a whole tar file ({one_line(problem)}); copy it again") from problem
    return {member.name.removeprefix("./"): (member.offset_data, member.size) for member in members}
