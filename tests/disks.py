"""A disk whose calls fail, for one file or for all."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest


class Disk:
    """Calls of `os` that fail as on a full or a broken disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def fail(self, call: str, error: int, *, only: str = "", after: int = 0) -> None:
        """Let a call fail from now on, after so many calls; `only` is a part of the paths of its files."""
        real, left = getattr(os, call), iter(range(after))

        def failing(file: Any, *given: Any, **named: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
            if only in path and next(left, None) is None:
                raise OSError(error, os.strerror(error), path)
            return real(file, *given, **named)

        self._monkeypatch.setattr(os, call, failing)

    @contextlib.contextmanager
    def failing(self, call: str, error: int) -> Iterator[None]:
        """Let a call fail within the block."""
        with self._monkeypatch.context() as patch:
            Disk(patch).fail(call, error)
            yield
