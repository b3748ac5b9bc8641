"""Microbatches of a stream, including copies of those that may have to be sent again."""

import time
from collections import deque
from collections.abc import Iterator, Mapping

from penstock.engine.driver import Microbatch
from penstock.tensors import copy_exactly


class Feed:
    """The microbatches of a stream; after a device is lost, first those without a result, then the remaining ones.

    The caller may reuse tensors once a microbatch was sent, so microbatches that may be sent again are copied.
    """

    def __init__(self, source: Iterator[Microbatch]) -> None:
        self._source = source
        self._pending: deque[Microbatch] = deque()
        self.paused = False
        self.fed_s = 0.0

    @property
    def num_pending(self) -> int:
        """Number of microbatches that were sent and have no result."""
        return len(self._pending)

    def done(self) -> Mapping[str, int]:
        """Record a result; return the sizes of its microbatch."""
        return self._pending.popleft()[1]

    def __iter__(self) -> Iterator[Microbatch]:
        yield from list(self._pending)
        while not self.paused and (following := next(self._source, None)) is not None:
            tensors, sizes = following
            self._pending.append(([copy_exactly(tensor) for tensor in tensors], sizes))
            self.fed_s = time.perf_counter()
            yield following
