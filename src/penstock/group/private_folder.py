"""A folder in which the processes of one account on one machine meet: sockets in it are nobody else's to reach."""

import contextlib
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from penstock.errors import UsageError

_PREFIX = "penstock-"
_OWN = {".taken", ".store"}  # beside sockets
_MOST_PATH = 94  # of 104 bytes that the path of a socket may have, the least of all systems


class PrivateFolder:
    """A new folder that this account alone may enter, which is removed at the latest when this process ends.

    Example:
        folder = PrivateFolder()
        store = links.serve_store(folder.path)
        folder.close()

    Raises `UsageError` where the folder for temporary files has too long a name.
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        if len(self.path) > _MOST_PATH:
            os.rmdir(self.path)
            raise UsageError(
                f"sockets lie in folders whose path has {_MOST_PATH} bytes at most, but {self.path} has "
                f"{len(self.path)}; name a shorter one for temporary files with TMPDIR"
            )
        self._remove = weakref.finalize(self, _remove, self.path, os.getpid())

    def close(self) -> None:
        """Remove the folder, and what is in it."""
        self._remove()


def remove_left(path: str) -> None:
    """Remove what processes have put into a folder whose maker has ended before it could, and then the folder."""
    folder = Path(path)
    if not folder.name.startswith(_PREFIX) or not folder.is_dir():
        return
    with contextlib.suppress(OSError):  # another one removes it as well, or somebody has put something else there
        for file in folder.iterdir():
            if file.is_socket() or file.suffix in _OWN:
                file.unlink(missing_ok=True)
        folder.rmdir()


def _remove(path: str, process: int) -> None:
    if os.getpid() == process:  # not in a fork of it
        shutil.rmtree(path, ignore_errors=True)
