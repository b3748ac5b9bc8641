"""Worker processes that streams of a module share."""

from collections.abc import Iterator

import pytest

from penstock.group.entry import start_local
from penstock.group.world import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Three worker processes for many pipelines, one after the other."""
    made = start_local(3)
    yield made
    made.close(0.0)
