"""Reserve, lock and write a shard's files, with errors that say what to do.

Rows are read from mapped memory, but written with `pwrite`: a store into mapped memory that the disk has no room for
kills the process, where `pwrite` returns an error. So does reserving the room, before the first row is computed.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from penstock.elastic.cache.layout import Layout, bfloat16_helps
from penstock.elastic.cache.manifest import rows_path
from penstock.errors import CacheError
from penstock.tensors import HOST
from penstock.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@contextlib.contextmanager
def explained(place: Path) -> Iterator[None]:
    """Raise `CacheError` in one line for an `OSError` of the block."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"the cache {place} must be writable, but {error.filename or 'a file in it'} is not "
            f"({error.strerror or error}); make room or give another folder, or train without a cache"
        ) from error


def lock(place: Path) -> int:
    """Make a folder and take it for this process until `unlock` is given the returned descriptor.

    Raises `CacheError` where another process has it, and `OSError` where the folder cannot be made.
    """
    while True:
        place.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):  # some network file systems lock no folders
                _lock(place, descriptor)
            if _is_at(place, descriptor):
                return descriptor
        except BaseException:
            unlock(descriptor)
            raise
        unlock(descriptor)  # whoever had it has removed it meanwhile


def unlock(descriptor: int) -> None:
    """Let another process take a folder."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked processes may have the descriptor too
    os.close(descriptor)


def _lock(place: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CacheError(
            f"one process fills a cache's shard, and another one has {place} open; wait for its end, or give another "
            "folder"
        ) from None


def _is_at(place: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(place), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def check_files(place: Path, layout: Layout, done: int) -> None:
    """Check that the files of valid rows are there at their full length; raises `CacheError` where one is not."""
    for file, _, _ in layout.spans(0, done):
        _check_size(rows_path(place, file), layout.file_bytes(file))


def _check_size(path: Path, num_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    if found < num_bytes:
        raise _damaged(path, f"it has {found} bytes of {num_bytes}")


def _damaged(path: Path, reason: str) -> CacheError:
    return CacheError(f"the cache's file {path} is damaged: {reason}; remove {path.parent} and fill the cache again")


def reserve(place: Path, layout: Layout) -> None:
    """Make a shard's files, those that are not there yet, and reserve their room.

    Raises `CacheError` where the disk has no room, before it takes what there is, and `OSError` for other reasons.
    """
    sizes = [(rows_path(place, file), layout.file_bytes(file)) for file in range(layout.num_files)]
    missing = sum(max(0, size - _allocated_bytes(path)) for path, size in sizes)
    disk = shutil.disk_usage(place)
    try:
        if missing > disk.free and disk.total:  # some file systems do not say
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for path, size in sizes:
            _reserve(path, size)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise CacheError(
            f"the cache needs {format_bytes(missing)}, but the disk of {place} has {format_bytes(disk.free)} left "
            f"({error.strerror}); make room, or give another folder{bfloat16_helps(layout)}"
        ) from error


def _allocated_bytes(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _reserve(path: Path, num_bytes: int) -> None:
    # no link: who could write to the folder could otherwise have another file written to
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except (OSError, AttributeError) as error:  # macOS has no such call, some file systems refuse it
            if isinstance(error, OSError) and error.errno not in _CANNOT_RESERVE:
                error.filename = str(path)
                raise
            if os.fstat(descriptor).st_size < num_bytes:
                os.ftruncate(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def write_rows(path: Path, layout: Layout, file: int, row: int, columns: list[Tensor]) -> None:
    """Write consecutive rows of each value, already as they are stored; raises `OSError` where they cannot be."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        for column, start, tensor in zip(layout.columns, layout.starts(file), columns, strict=True):
            rest = tensor.reshape(-1).view(torch.uint8).numpy().data
            at = start + row * column.row_bytes
            while rest:
                written = os.pwrite(descriptor, rest, at)
                rest, at = rest[written:], at + written
    finally:
        os.close(descriptor)


def map_file(path: Path, layout: Layout, file: int, *, shared: bool) -> list[Tensor]:
    """Map a file into memory, and view each value's rows there, as they are stored.

    Not `shared`, it need not be writable, but what is written later may not be seen. Raises `CacheError`.
    """
    num_bytes = layout.file_bytes(file)
    _check_size(path, num_bytes)  # torch would make what is missing, full of zeros
    try:
        # keeps no descriptor, of which a process may have fewer than a shard has files
        memory = torch.from_file(str(path), shared=shared, size=num_bytes, dtype=torch.uint8, device=HOST)
    except RuntimeError as error:
        raise _damaged(path, str(error).splitlines()[0]) from None
    rows = layout.rows_in(file)
    return [
        memory.narrow(0, start, rows * column.row_bytes).view(column.stored).view(rows, *column.shape)
        for column, start in zip(layout.columns, layout.starts(file), strict=True)
    ]
