"""Archives of images, read without unpacking them."""

import lzma
import os
import posixpath
import stat
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.errors import DataError
from penstock.text import one_line
from penstock.zoo.data.folders import (
    RecordFile,
    is_image_name,
    is_names_file,
    is_record_name,
    label_by_folder,
    natural_key,
    open_records,
)
from penstock.zoo.data.image_set import COMPRESSED, MAX_FILE_BYTES, ByteRange, ImageSet, compression_of

ARCHIVES = (".tar", ".zip", *COMPRESSED)
_MAX_HEADER_BYTES, _MAX_NAMES_BYTES, _MAX_LABEL_BYTES = 2**20, 2**20, 2**10
_MAX_MEMBERS = 10_000_000
_MAX_LINKS = 8  # from one link to the next
_LABEL = ".cls"  # WebDataset's suffix of labels
_DAMAGES = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, OSError, EOFError)


def open_archive(path: Path, *, most: int = _MAX_MEMBERS) -> ImageSet:
    """Open a .tar, compressed or not, or a .zip of images, or a .tar of CIFAR's binary files, without unpacking it.

    Files of WebDataset named .cls are the labels of the images with the same name.

    >>> open_archive(Path("cifar10-test.tar")).classes[0]  # doctest: +SKIP
    'airplane'

    Raises `DataError` if the archive is damaged, contains no images, or has more than `most` files.
    """
    if path.name.lower().endswith(".zip"):
        members = _ZipMembers(path)
        return _labelled(path, members.contents(most), members.reader, members.read)
    found = _contents(path, most)
    places = found.files
    records = [
        RecordFile(name=name, source=path, offset=offset, num_bytes=num_bytes)
        for name, (offset, num_bytes) in places.items()
        if is_record_name(name)
    ]
    if records and not any(map(is_image_name, places)):
        texts = {
            name: ByteRange(path).read(*place)
            for name, place in places.items()
            if is_names_file(name) and place[1] <= _MAX_NAMES_BYTES
        }
        return open_records(records, texts)
    archive = ByteRange(path)
    return _labelled(
        path,
        found,
        lambda names: partial(_read_member, archive, [places[name] for name in names]),
        lambda name: archive.read(*places[name]),
    )


def _read_member(archive: ByteRange, places: Sequence[tuple[int, int]], index: int) -> bytes:
    return archive.read(*places[index])


@dataclass(frozen=True, slots=True)
class _Contents:
    """The offset and the length of each file in an archive, its folders, and why other members are left out."""

    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def _labelled(
    path: Path,
    found: _Contents,
    reader: Callable[[Sequence[str]], Callable[[int], bytes]],
    read: Callable[[str], bytes],
) -> ImageSet:
    """Return the images of an archive, labelled by its .cls files if it has any, and otherwise by its folders."""
    labels = {_sample(name): name for name in found.files if name.endswith(_LABEL)}
    others = [name for name in found.files if not name.endswith(_LABEL)]
    images = label_by_folder(path, others, found.folders, reader, is_archive=True, left_out=found.left_out)
    if not labels:
        return images
    texts = {sample: _label(path, name, found.files[name][1], read) for sample, name in labels.items()}
    given = [texts.get(_sample(name)) for name in images.names]
    classes = tuple(sorted({text for text in given if text is not None}, key=natural_key))
    numbers = {text: index for index, text in enumerate(classes)}
    return replace(
        images, labels=[None if text is None else numbers[text] for text in given], classes=classes, by_folder=False
    )


def _sample(name: str) -> str:
    """Return the name of a file's sample, as in WebDataset: up to the first dot of the file.

    >>> _sample("a.b/0001.left.jpg")
    'a.b/0001'
    """
    folder, slash, leaf = name.rpartition("/")
    return f"{folder}{slash}{leaf.partition('.')[0]}"


def _label(path: Path, name: str, num_bytes: int, read: Callable[[str], bytes]) -> str:
    try:
        text = read(name).decode().strip() if num_bytes <= _MAX_LABEL_BYTES else ""
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise DataError(f"{name} in {path} must hold the number or the name of a class, as text")
    return text


def _contents(path: Path, most: int) -> _Contents:
    """Read the headers of a tar archive; links to files in it are files, too."""
    found, links = _Contents(), {}
    places = found.files
    try:
        with tarfile.open(path, f"r:{compression_of(path)}", tarinfo=_LimitedHeader) as archive:  # type: ignore[call-overload]
            while (member := archive.next()) is not None:
                archive.members = []  # it keeps every header
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
                _check_number(path, len(places) + len(links), most)
    except _DAMAGES as problem:
        raise DataError(f"{path} is not a whole tar file ({one_line(problem)}); copy it again") from problem
    for name, target in links.items():
        for _ in range(_MAX_LINKS):  # a link may lead to another one
            target = links.get(target, target)
        if target in places:
            places[name] = places[target]
        else:
            found.left_out.append("links without a file")
    return found


def _check_number(path: Path, num_members: int, most: int) -> None:
    if num_members > most:
        raise DataError(f"{path} holds more than {most} files; divide it")


class _LimitedHeader(tarfile.TarInfo):
    """A header of an archive with a limit on its length: tarfile would read a name of any length into memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if not (self.isreg() or self.issparse()) and self.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        found: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return found


class _ZipMembers:
    """Reads the files of a zip archive; safe to use from several threads and processes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner = 0
        self._lock = threading.Lock()
        self._archive: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _ZipMembers, (self._path,)

    def contents(self, most: int) -> _Contents:
        """Return the files and folders of the archive; symbolic links are left out."""
        found = _Contents()
        with self._lock:
            members = self._opened().infolist()
        _check_number(self._path, len(members), most)
        for member in members:
            if member.is_dir():
                found.folders.append(member.filename)
            elif stat.S_ISLNK(member.external_attr >> 16):
                found.left_out.append("links")
            else:
                found.files[member.filename] = (member.header_offset, member.file_size)
        return found

    def reader(self, names: Sequence[str]) -> Callable[[int], bytes]:
        """Return a function that reads the n-th of these files."""
        return partial(_read_name, self, names)

    def read(self, name: str) -> bytes:
        """Read a file; raises `DataError` for one that is damaged, encrypted or too large."""
        with self._lock:
            archive = self._opened()
            if archive.getinfo(name).file_size > MAX_FILE_BYTES:
                raise DataError(f"a file in {self._path} has more than the {MAX_FILE_BYTES} bytes of one image")
            try:
                data: bytes = archive.read(name)
            except (*_DAMAGES, RuntimeError, NotImplementedError) as problem:  # a password, another compression
                raise DataError(one_line(problem)) from problem
        return data

    def _opened(self) -> zipfile.ZipFile:
        if self._owner != os.getpid():  # a forked process would share the position in the file
            try:
                self._archive, self._owner = zipfile.ZipFile(self._path), os.getpid()
            except _DAMAGES as problem:
                raise DataError(
                    f"{self._path} is not a whole zip file ({one_line(problem)}); copy it again"
                ) from problem
        found: zipfile.ZipFile = self._archive
        return found


def _read_name(members: _ZipMembers, names: Sequence[str], index: int) -> bytes:
    return members.read(names[index])
