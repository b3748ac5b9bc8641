"""torch.profiler operations in a recorder's timeline: names, shapes and memory of a few computations."""

import contextlib
import threading
from collections.abc import Iterator

from torch.profiler import ProfilerActivity, profile, record_function

from penstock.tracing.record import Recorder

# the window starts after the first microbatches, which allocate buffers, and is short, since profiling slows the stream
FIRST, COUNT = 2, 4
MAX_OPERATIONS = 20_000
_MARK = "penstock: the recorder's clock"
# torch has one profiler per process, but a process may run stages in several threads
_BUSY = threading.Lock()


class ProfileWindow:
    """Profiles the blocks inside `around` for a window of microbatches, and writes the operations to a recorder.

    The profiler has a separate clock; a mark, made at a known time of the recorder's clock, aligns both clocks.

    Example:
        window = ProfileWindow(recorder)
        with window.around(stage=0, microbatch=2):
            runtime(sizes, inputs)
    """

    def __init__(self, recorder: Recorder, *, first: int = FIRST, count: int = COUNT, by_step: bool = False) -> None:
        self._recorder = recorder
        self._window = range(first, first + count)
        self._by_step = by_step
        self._room = MAX_OPERATIONS

    @contextlib.contextmanager
    def around(self, stage: int, microbatch: int) -> Iterator[None]:
        """Profile the block if its microbatch is in the window, or its step with `by_step`."""
        inside = (self._recorder.step if self._by_step else microbatch) in self._window and self._room > 0
        if not inside or not _BUSY.acquire(blocking=False):
            yield
            return
        try:
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as profiler:
                at_s = self._recorder.clock()
                with record_function(_MARK):
                    pass
                yield
            self._keep(profiler, stage, microbatch, at_s)
        finally:
            _BUSY.release()

    def _keep(self, profiler: profile, stage: int, microbatch: int, at_s: float) -> None:
        events = list(profiler.events() or ())
        mark = next((event.time_range.start for event in events if event.name == _MARK), None)
        for event in events:
            if mark is None or event.name == _MARK or self._room <= 0:
                continue
            self._room -= 1
            begin_s, end_s = (at_s + (us - mark) / 1e6 for us in (event.time_range.start, event.time_range.end))
            shapes = " ".join("x".join(map(str, shape)) for shape in event.input_shapes or () if shape)
            self._recorder.span(
                "profile", stage, microbatch, begin_s, end_s, event.name, max(0, event.cpu_memory_usage), detail=shapes
            )
