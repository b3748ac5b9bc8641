"""Reserving, locking and writing of a shard's files, with actionable errors.

Rows are read from mapped memory, but written with `pwrite`: on a full disk a store into mapped memory kills the
process, whereas `pwrite` returns an error. So does reserving the space, before the first row is computed.
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
            f"({error.strerror or error}); free space or give another folder, or train without a cache"
        ) from error


def lock(place: Path) -> int:
    """Make a folder and lock it for this process until `unlock` of the returned descriptor.

    Raises `CacheError` if another process has it locked, and `OSError` if the folder cannot be made.
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
        unlock(descriptor)  # the previous owner has removed it concurrently


def unlock(descriptor: int) -> None:
    """Release a folder for other processes."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked processes may have the descriptor too
    os.close(descriptor)


def _lock(place: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CacheError(
            f"another process has {place} open, and only one can fill a cache's shard; wait for its exit, or give "
            "another folder"
        ) from None


def _is_at(place: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(place), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def check_files(place: Path, layout: Layout, done: int) -> None:
    """Check that the files of valid rows exist at full length; raises `CacheError` if one does not."""
    for file, _, _ in layout.spans(0, done):
        _check_size(rows_path(place, file), layout.file_bytes(file))


def _check_size(path: Path, num_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    if found < num_bytes:
        raise _damaged(path, f"expected {num_bytes} bytes, got {found}")


def _damaged(path: Path, reason: str) -> CacheError:
    return CacheError(f"the cache's file {path} is damaged: {reason}; remove {path.parent} and fill the cache again")


def reserve(place: Path, layout: Layout) -> None:
    """Create a shard's missing files and reserve their space.

    Raises `CacheError` if the disk has not enough space, before using any, and `OSError` for other reasons.
    """
    sizes = [(rows_path(place, file), layout.file_bytes(file)) for file in range(layout.num_files)]
    missing = sum(max(0, size - _allocated_bytes(path)) for path, size in sizes)
    disk = shutil.disk_usage(place)
    try:
        if missing > disk.free and disk.total:  # some file systems report zero
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for path, size in sizes:
            _reserve(path, size)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise CacheError(
            f"the cache needs {format_bytes(missing)}, but the disk of {place} has {format_bytes(disk.free)} left "
            f"({error.strerror}); free space, or give another folder{bfloat16_helps(layout)}"
        ) from error


def _allocated_bytes(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _reserve(path: Path, num_bytes: int) -> None:
    # no links: otherwise a user with write access to the folder could redirect the writes to another file
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except (OSError, AttributeError) as error:  # missing on macOS, refused by some file systems
            if isinstance(error, OSError) and error.errno not in _CANNOT_RESERVE:
                error.filename = str(path)
                raise
            if os.fstat(descriptor).st_size < num_bytes:
                os.ftruncate(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def write_rows(path: Path, layout: Layout, file: int, row: int, columns: list[Tensor]) -> None:
    """Write consecutive rows of each value, already in stored form; raises `OSError` if this fails."""
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
    """Map a file into memory, and return views of each value's rows in stored form.

    Without `shared` it need not be writable, but later writes may not be visible. Raises `CacheError`.
    """
    num_bytes = layout.file_bytes(file)
    _check_size(path, num_bytes)  # torch would extend a short file with zeros
    try:
        # keeps no descriptor open, since a shard may have more files than a process may have descriptors
        memory = torch.from_file(str(path), shared=shared, size=num_bytes, dtype=torch.uint8, device=HOST)
    except RuntimeError as error:
        raise _damaged(path, str(error).splitlines()[0]) from None
    rows = layout.rows_in(file)
    return [
        memory.narrow(0, start, rows * column.row_bytes).view(column.stored).view(rows, *column.shape)
        for column, start in zip(layout.columns, layout.starts(file), strict=True)
    ]
