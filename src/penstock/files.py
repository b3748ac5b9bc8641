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
