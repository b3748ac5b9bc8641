"""The limit on a process's open files, which include sockets."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

import zmq

from penstock.errors import RunError

FULL = (errno.EMFILE, errno.ENFILE)
_WANTED = 4096


def raise_file_limit() -> None:
    """Raise the soft limit towards the hard limit if possible; a higher soft limit is kept."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems have a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def too_many_files() -> str:
    """Return the message for a process that cannot open more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"too many open files: this process may have {soft} (at most {hard}), and connections between processes need "
        "more; raise it with ulimit -n 4096, or LimitNOFILE of the service that starts it"
    )


def check_room(number: int) -> None:
    """Raise `RunError` unless this process can open `number` more files; libzmq would abort the process."""
    opened: list[int] = []
    try:
        for _ in range(number):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno in FULL:
            raise RunError(too_many_files()) from None
        raise
    finally:
        for each in opened:
            os.close(each)


@contextlib.contextmanager
def naming_limit() -> Iterator[None]:
    """Convert libzmq's errors of creating sockets to `RunError`."""
    try:
        yield
    except zmq.ZMQError as error:
        if error.errno in FULL:
            raise RunError(too_many_files()) from None
        raise RunError(f"a connection between processes cannot be opened: {error}; start again") from None
    except OSError as error:
        if error.errno in FULL:
            raise RunError(too_many_files()) from None
        raise
