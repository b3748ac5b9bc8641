"""Files that are there whole or not at all, whenever the process or the machine dies."""

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from penstock.errors import UsageError

_BEING_MADE_S = 5.0  # in which a file that was made has been locked


@contextlib.contextmanager
def written_whole(target: Path) -> Iterator[IO[bytes]]:
    """Open a file beside `target` that takes its place when the block ends, and is on the disk by then.

    An earlier `target` stays as it is until then, and where the block or the disk fails. Permissions are those that
    `open` would give.

    Example:
        with written_whole(Path("model.safetensors")) as file:
            file.write(data)

    Raises `OSError` where it cannot be written.
    """
    drop_left(target)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        # "x" creates it or fails, so that nobody's file is written to, and asks the umask as every other file does
        with beside.open("xb") as file:
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(beside, target)  # while it is locked
    finally:
        beside.unlink(missing_ok=True)
    flush(target.parent)


def drop_left(target: Path) -> None:
    """Remove temporary files of killed processes next to a file; a running process keeps its own locked."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 16}"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if _lock(file) and time.time() - path.stat().st_mtime > _BEING_MADE_S:
                path.unlink(missing_ok=True)


def _lock(file: IO[bytes]) -> bool:
    """Lock a file until it is closed; return whether this could be done, which some network file systems cannot."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file atomically; a device or pipe such as /dev/stdout is written directly.

    Raises `OSError` where it cannot be written.
    """
    data = data.encode() if isinstance(data, str) else data
    target = path.resolve()  # the file that a link leads to
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    with written_whole(target) as file:
        file.write(data)


def read_private(path: Path, make: str) -> str:
    """Read a private file; raises `UsageError` if others can read it. `make` is the command that creates one."""
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"key {path} cannot be read ({said}); {make}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"a key must be its owner's alone, but others may read {path}; chmod 600 {path}")
    return text


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

    The lock ends with this process, however it ends, and what it has forked does not have it. The file stays.

    Example:
        with locked(Path("runs/a/run.lock")):
            ...

    Raises `BlockingIOError` if another process holds it, with what that one has written into it as `filename`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                raise BlockingIOError(error.errno, os.strerror(error.errno), holder) from None
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):  # some network file systems
                raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


class LineFile:
    """A text file that grows by whole lines, each with the operating system when `write` returns.

    Of a line that cannot be written nothing stays behind, so what is in the file can be read and gone on with.

    Example:
        with LineFile(Path("metrics.jsonl"), append=True) as file:
            file.write("{}\\n")

    Raises `OSError` where it cannot be opened.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        # without a buffer, which would hold on to a line that did not fit and try again at the close
        self._file = path.open("ab" if append else "wb", buffering=0)
        self._end = self._file.tell()

    def write(self, line: str) -> None:
        """Append a line; raises `OSError` where it does not fit."""
        rest = memoryview(line.encode(errors="surrogateescape"))  # names of files may hold bytes that are no text
        end = self._end + len(rest)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:
            with contextlib.suppress(OSError):  # a device has no length
                self._file.truncate(self._end)
                self._file.seek(self._end)
            raise
        self._end = end

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "LineFile":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
