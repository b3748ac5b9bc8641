"""What the tests of the cache share."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def leaves_no_descriptors() -> Iterator[None]:
    """Fail a test that leaves a file open."""
    before = _descriptors()
    yield
    gc.collect()
    new = _descriptors() - before
    assert not new, f"left open: {sorted(new)}"


def _descriptors() -> set[tuple[int, str]]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add((int(link.name), os.readlink(link)))
    return found
