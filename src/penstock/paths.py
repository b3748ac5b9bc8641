"""Paths that a command reads and writes: no output replaces an input, or another output."""

import os
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

from penstock.errors import UsageError
from penstock.files import is_stdout

_LONGEST_LIST_BYTES = 2**24  # a longer text file is no list of images
_Named = tuple[str, Path]  # an option and its path


def check_paths(read: Sequence[_Named], written: Sequence[_Named]) -> None:
    """Raise `UsageError` if an output is an input by any name, a folder that contains one, or another output.

    Files are compared by device and inode, so links do not matter. Devices and pipes may be used more than once.

    Example:
        check_paths(read=[("--weights", Path("w.safetensors"))], written=[("--output", Path("out.csv"))])
    """
    outputs = [(option, path) for option, path in written if not is_stdout(path) and _is_kept(path)]
    for option, path in outputs:
        for other, source in read:
            if _identity(source) and (why := _replaces(path, source)):  # others are words, such as `digits`
                raise UsageError(f"{option} {path} {why} {other} {source}; choose another {option}")
    for (option, path), (other, second) in combinations(outputs, 2):
        if {*map(_place, _files_of(path))} & {*map(_place, _files_of(second))}:
            raise UsageError(f"{option} {path} and {other} {second} are the same file; choose another {other}")


def record_of(path: Path) -> Path:
    """Return the file next to an output of rows that records the run that wrote them."""
    return path.with_name(f"{path.name}.run.json")


def _replaces(path: Path, source: Path) -> str:
    """Return how an output would change an input, or an empty string."""
    if path.is_dir():
        above = {_identity(each) for start in (source.absolute(), source.resolve()) for each in (start, *start.parents)}
        return "is the folder of" if _identity(path) in above else ""
    outputs = {identity for each in _files_of(path) if (identity := _identity(each))}
    if not outputs:
        return ""
    if _identity(source) in outputs:
        return "is the file of"
    # rows that an earlier run wrote into a folder of images are not its images
    earlier = not path.is_symlink() and path.is_file() and record_of(path).is_file()
    return "" if earlier or outputs.isdisjoint(map(_identity, _members(source))) else "is one of the files of"


def _files_of(path: Path) -> tuple[Path, Path]:
    return path, record_of(path) if path.name else path


def _members(source: Path) -> Iterator[Path]:
    """Yield the files that an input stands for: a folder's, the shards of an index, the lines of a list of images."""
    if source.is_dir():
        yield from _walk(source)
    elif source.name.endswith(".index.json"):
        yield from source.parent.glob("*.safetensors")
    elif source.suffix.lower() == ".txt" and source.is_file() and source.stat().st_size < _LONGEST_LIST_BYTES:
        for line in source.read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n"):
            for place in (Path(line.rstrip("\r")), source.parent / line.rstrip("\r")):
                yield place
                if line.strip() and _identity(place) and place.is_dir():
                    yield from _walk(place)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield a folder's files, also behind links to other folders, each folder once."""
    seen = {_identity(folder)}
    for place, folders, names in os.walk(folder, followlinks=True):
        yield from (Path(place, name) for name in names)
        folders[:] = [each for each in folders if _is_new(Path(place, each), seen)]


def _is_new(folder: Path, seen: set[tuple[int, int] | None]) -> bool:
    identity = _identity(folder)
    return identity not in seen and not seen.add(identity)  # type: ignore[func-returns-value]


def _identity(path: Path) -> tuple[int, int] | None:
    """Return a file's device and inode; None if it does not exist."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # too long a line, or one with a zero byte
        return None
    return found.st_dev, found.st_ino


def _place(path: Path) -> tuple[int, int] | Path:
    return _identity(path) or path.resolve()


def _is_kept(path: Path) -> bool:
    return path.is_file() or path.is_dir() or not path.exists()
