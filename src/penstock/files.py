"""Files that are there whole or not at all, whenever the process or the machine dies."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO


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
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        # "x" creates it or fails, so that nobody's file is written to, and asks the umask as every other file does
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    flush(target.parent)


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
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
