"""What `make test` leaves to `make test-all`: most examples of properties, and most of the cases that are alike."""

import os
from collections.abc import Sequence
from typing import Any

import pytest

FULL = "TESTS_FULL" in os.environ


def examples(full: int) -> int:
    """How many examples of a property to try, out of those of `make test-all`."""
    return full if FULL else max(2, full // 6)


def first(count: int, cases: Sequence[Any]) -> list[Any]:
    """Cases, or tuples of what is a case, of which `make test` runs so many and `make test-all` the others."""
    return [*cases[:count], *(long(*case) if isinstance(case, tuple) else long(case) for case in cases[count:])]


def long(*values: Any) -> Any:
    """Mark a case of `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.long)
