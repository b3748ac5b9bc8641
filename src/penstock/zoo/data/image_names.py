"""Open a set of images by name: folders, files, archives, CIFAR and digits."""

import posixpath
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from penstock.errors import DataError
from penstock.text import one_line
from penstock.zoo.data.cifar import RecordFile, is_names_file, is_record_name, open_records, records_in_folder
from penstock.zoo.data.folders import IMAGE_SUFFIXES, is_image_name, label_by_folder, open_folder, read_file, walk
from penstock.zoo.data.image_set import ByteRange, ImageSet, picture
from penstock.zoo.optional import optional_import

_MAX_HEADER_BYTES, _MAX_NAMES_BYTES = 2**20, 2**20
_MAX_MEMBERS = 10_000_000
_MAX_LINKS = 8  # from one link to the next


def open_images(path: str | Path) -> ImageSet:
    """Open a set of images without reading the images.

    `path` is a folder of images, labelled by sub-folder if it has any; one image; a .tar or .tar.gz of such a folder;
    CIFAR-10 or CIFAR-100 in their original binary format, as one file, or as a folder or an archive (all records,
    training data first); or the word `digits`.

    >>> open_images("photos").name(0)  # doctest: +SKIP
    'cats/1.jpg'

    Raises `DataError` if the path does not exist or holds no images.
    """
    if str(path) == "digits":
        return _digits()
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} not found; give a folder, an image, a .tar or .tar.gz, or the word digits")
    if path.is_dir():
        files = records_in_folder(path)
        pictures = any(map(is_image_name, walk(path))) if files else True
        return open_folder(path) if pictures else open_records(files)
    if path.suffix == ".bin":
        return open_records(records_in_folder(path.parent, only=path.name) or [])
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return ImageSet(names=(path.name,), labels=(None,), classes=(), load=partial(read_file, (path,)))
    if path.name.lower().endswith((".tar", ".tar.gz", ".tgz")):
        return open_archive(path)
    known = ", ".join(IMAGE_SUFFIXES)
    raise DataError(f"{path} is not a set of images; give a folder, {known}, .tar, .tar.gz or CIFAR's .bin")


def _digits() -> ImageSet:
    digits = optional_import("sklearn.datasets", "data", DataError).load_digits()
    values = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    names = tuple(f"digits/{index:04}" for index in range(len(values)))
    labels = tuple(int(label) for label in digits.target)
    return ImageSet(names=names, labels=labels, classes=tuple("0123456789"), load=partial(picture, values))


def open_archive(path: Path) -> ImageSet:
    """Open a .tar or .tar.gz of images, or of CIFAR's binary files, without unpacking it.

    >>> open_archive(Path("cifar10-test.tar")).classes[0]  # doctest: +SKIP
    'airplane'

    Raises `DataError` if the archive is damaged or contains no images.
    """
    found = _contents(path)
    places = found.files
    records = [
        RecordFile(name=name, source=path, offset=offset, num_bytes=num_bytes)
        for name, (offset, num_bytes) in places.items()
        if is_record_name(name)
    ]
    if records and not any(map(is_image_name, places)):
        texts = {
            name: ByteRange(path).read(*place) for name, place in places.items()
            if is_names_file(name) and place[1] <= _MAX_NAMES_BYTES
        }  # fmt: skip
        return open_records(records, texts)
    return label_by_folder(
        path, places, found.folders, lambda names: partial(_read_member, ByteRange(path), [places[n] for n in names]),
        is_archive=True, left_out=found.left_out,
    )  # fmt: skip


def _read_member(archive: ByteRange, places: Sequence[tuple[int, int]], index: int) -> bytes:
    return archive.read(*places[index])


@dataclass(frozen=True, slots=True)
class _Contents:
    """The offset and the length of each file in an archive, its folders, and why other members are left out."""

    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def _contents(path: Path) -> _Contents:
    """Read the headers of an archive; links to files in it are files, too."""
    compressed = path.name.lower().endswith("gz")
    found, links = _Contents(), {}
    places = found.files
    try:
        with tarfile.open(path, "r:gz" if compressed else "r:", tarinfo=_Member) as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it keeps every header
                name = member.name.removeprefix("./")
                if member.issparse():  # not stored contiguously
                    found.left_out.append("sparse files")
                elif member.isreg():
                    places[name] = (member.offset_data, member.size)
                elif member.isdir():
                    found.folders.append(name)
                elif member.islnk():
                    links[name] = posixpath.normpath(member.linkname)
                elif member.issym():
                    links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
                if len(places) + len(links) > _MAX_MEMBERS:
                    raise DataError(f"{path} holds more than {_MAX_MEMBERS} files; divide it")
    except (tarfile.TarError, OSError, EOFError) as problem:
        raise DataError(f"{path} is not a whole tar file ({one_line(problem)}); copy it again") from problem
    for name, target in links.items():
        for _ in range(_MAX_LINKS):  # a link may lead to another one
            target = links.get(target, target)
        if target in places:
            places[name] = places[target]
        else:
            found.left_out.append("links without a file")
    return found


class _Member(tarfile.TarInfo):
    """A header of an archive with a limit on its length: tarfile would read a name of any length into memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if not (self.isreg() or self.issparse()) and self.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        found: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return found
