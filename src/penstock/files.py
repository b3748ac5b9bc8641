"""Atomic writes, lock files, and paths: a file is complete or absent, and no output replaces an input."""

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import IO

from penstock.errors import DataError, UsageError

_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_BEING_MADE_S = 5.0  # of a temporary file
_LONGEST_LIST_BYTES = 2**24  # a longer text file is no list of images
_Named = tuple[str, Path]  # an option and its path


@contextlib.contextmanager
def written_whole(target: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file next to `target`; at the end of the block, sync it to disk and rename it to `target`.

    An existing `target` is unchanged until then, and if the block or the disk fails. Links are followed and
    permissions kept, as by `open`.

    Example:
        with written_whole(Path("model.safetensors")) as file:
            file.write(data)

    Raises `OSError` if it cannot be written.
    """
    target = Path(os.path.realpath(target))
    left = target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 16}")
    remove_unlocked(left, older_than_s=_BEING_MADE_S)
    beside = _beside(target)
    try:
        # "x" never opens an existing file, and applies the umask
        with beside.open("xb") as file:
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            os.replace(beside, target)  # while the file is locked
    finally:
        beside.unlink(missing_ok=True)
    flush(target.parent)


def remove_unlocked(
    paths: Iterable[Path], *, older_than_s: float = 60.0, remove: Callable[[Path], object] = Path.unlink
) -> None:
    """Remove files or folders that killed processes left: a running process keeps its own locked with `flock`.

    A younger one may not be locked yet. Errors leave a path as it is.

    Example:
        remove_unlocked(Path("/tmp/features").glob("*.rows"))
    """
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # neither links nor pipes are left
            try:
                if time.time() - os.fstat(descriptor).st_mtime > older_than_s:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(path)
            finally:
                os.close(descriptor)


def _lock(file: IO[bytes]) -> bool:
    """Lock a file until it is closed; return False if this is impossible, as on some network file systems."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file atomically; a device or pipe such as /dev/stdout is written directly.

    Raises `OSError` if it cannot be written.
    """
    data = data.encode() if isinstance(data, str) else data
    if is_special(path):
        path.write_bytes(data)
        return
    with written_whole(path) as file:
        file.write(data)


def check_writable(path: Path) -> None:
    """Raise `OSError` if `write_whole` could not write a file, by writing an empty one next to it."""
    target = path.resolve()
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not is_special(path):
        beside = _beside(target)
        beside.open("xb").close()
        beside.unlink()


def is_stdout(path: Path) -> bool:
    """Return True for standard output, which other lines must then keep free.

    >>> is_stdout(Path("-")), is_stdout(Path("out.csv"))
    (True, False)
    """
    return str(path) in ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


def is_special(path: Path) -> bool:
    """Return True for a device or pipe; links in /dev/fd resolve to names that do not exist."""
    return path.exists() and not path.is_file()


def check_stored(path: Path) -> None:
    """Raise `DataError` for data in a device or a pipe, which can be read only once, if it ever ends."""
    if is_special(path) and not path.is_dir():
        raise DataError(f"{path} is a device or a pipe, and data is read more than once; copy it to a file")


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}")


def read_private(path: Path, make: str) -> str:
    """Read a private file; raises `UsageError` if others can read it. `make` tells how to create one."""
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"key {path} cannot be read ({said}); {make}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"a key must be readable by its owner only, but other users may read {path}; chmod 600 {path}")
    return text


def reserve(file: IO[bytes], num_bytes: int) -> None:
    """Extend a file to a size for which the disk has space; raises `OSError` if it has too little.

    On a full disk, a store into mapped memory would kill the process.
    """
    disk = shutil.disk_usage(file.name)
    if num_bytes > disk.free and disk.total:  # some file systems report zero
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except (OSError, AttributeError) as error:  # missing on macOS, refused by some file systems
        if isinstance(error, OSError) and error.errno not in _CANNOT_RESERVE:
            raise
        os.ftruncate(file.fileno(), num_bytes)


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file while the block runs; processes on other machines that share the folder see it too.

    The lock is released when this process ends, for any reason; forked processes do not inherit it. The file stays.

    Example:
        with locked(Path("runs/a/run.lock")):
            ...

    Raises `BlockingIOError` if another process holds the lock; its `filename` is then the text written by the holder.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                raise BlockingIOError(error.errno, os.strerror(error.errno), holder) from None
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):  # as on some network file systems
                raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


class LineFile:
    """A text file to append whole lines to; `write` returns when the operating system has the line.

    A line that cannot be written completely is removed again, so the file can be read and continued. The first line
    replaces what the file held after its first `kept` bytes, by default all of it; until then the file is unchanged.
    It is locked until it is closed.

    Example:
        with LineFile(Path("metrics.jsonl"), append=True) as file:
            file.write("{}\\n")

    Raises `OSError` if it cannot be opened, and `BlockingIOError` if another process has it open.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self._path, self._is_new = path, not path.exists()
        # unbuffered: a buffer would keep a line that did not fit and write it again on close
        self._file = path.open("ab", buffering=0)
        found = os.fstat(self._file.fileno())
        self._is_regular = stat.S_ISREG(found.st_mode)  # devices and pipes have no length
        self.kept = self._end = found.st_size if append else 0
        self._has_begun = False
        if self._is_regular and not self._is_mine():
            self._file.close()
            raise BlockingIOError(errno.EAGAIN, "another process writes it")

    def _is_mine(self) -> bool:
        """Lock the file; return False if another process has locked it, or has removed it."""
        with contextlib.suppress(FileNotFoundError):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if isinstance(error, BlockingIOError):
                    return False
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        return False

    def begin(self) -> None:
        """Cut the file to the bytes that are kept, as the first line does."""
        if not self._has_begun:
            if self._is_regular:
                self._file.truncate(self.kept)
            self._has_begun, self._end = True, self.kept

    def write(self, line: str) -> None:
        """Append a line; raises `OSError` if it does not fit on the disk."""
        self.begin()
        rest = memoryview(line.encode(errors="surrogateescape"))  # file names may contain bytes that are not text
        end = self._end + len(rest)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:
            with contextlib.suppress(OSError):  # a device has no length
                self._file.truncate(self._end)
            raise
        self._end = end

    def close(self) -> None:
        """Close the file; a new one to which nothing was written is removed."""
        if self._is_new and self._is_regular and not self._has_begun and not self._file.closed:
            self._path.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> "LineFile":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class StandardOutput(LineFile):
    """Standard output as a file to append whole lines to; it is never truncated or replaced."""

    def __init__(self) -> None:
        pass

    def begin(self) -> None:
        """Leave it as it is."""

    def write(self, line: str) -> None:
        """Write a line; raises `OSError` if nobody reads it."""
        sys.stdout.buffer.write(line.encode(errors="surrogateescape"))
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """Leave it open."""


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
