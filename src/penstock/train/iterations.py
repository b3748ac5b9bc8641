"""Iterations over one loader, and where the next one starts, even if the last was left early."""

from dataclasses import dataclass
from typing import Any

from penstock.errors import UsageError

Place = tuple[int, int]  # epoch, and number of the batch in the epoch


@dataclass(eq=False)
class Iteration:
    """One iteration over a loader: its position, and whether a step trained on its batches."""

    number: int
    begin: Place
    place: Place
    order: Any = None  # order of its epoch
    trained: bool = False
    finished: bool = False


class Iterations:
    """All iterations over one loader.

    The next iteration starts at the next epoch if a step trained on a batch of the last iteration, otherwise at the
    same position, as after a loop that only inspected a batch.
    """

    def __init__(self) -> None:
        self._last: Iteration | None = None
        self._trained: Iteration | None = None  # the last that a step trained on; None once a later one has ended
        self._number = 0

    def restart(self) -> None:
        """Drop unfinished iterations: the position in the data has changed."""
        self._last = self._trained = None

    def next_place(self, place: Place) -> Place:
        """Return the start of the next iteration; `place` is the current position."""
        last, trained = self._last, self._trained
        if last is not None and not last.finished:
            last.place, place = place, place if last.trained else last.begin
        if trained is not None and not trained.finished and trained.place[0] >= place[0]:
            epoch, batch = trained.place
            return (epoch, 0) if batch == 0 and epoch > trained.begin[0] else (epoch + 1, 0)
        return place

    def begin(self, place: Place) -> Iteration:
        """Start another iteration."""
        self._number += 1
        self._last = Iteration(self._number, place, place)
        return self._last

    def go_on(self, iteration: Iteration) -> bool:
        """Continue an iteration; return whether another has started meanwhile, so that the position must be restored.

        Raises `UsageError` if a step trained on a batch of a later iteration.
        """
        if self._last is iteration:
            return False
        if self._trained is not None and self._trained.number > iteration.number:
            raise UsageError(
                "a loop over this loader continues although a later loop has trained on the loader's batches; give "
                "each loop its own pipe.loader"
            )
        self._last = iteration
        return True

    def saw_step(self, iteration: Iteration) -> None:
        """Record that a step trained on a batch of an iteration."""
        iteration.trained = True
        if self._trained is None or self._trained.number <= iteration.number:
            self._trained = iteration

    def end(self, iteration: Iteration) -> None:
        """Record that an iteration has yielded its last batch."""
        iteration.finished = True
        if self._last is iteration:
            self._trained = None

    def saved_place(self, place: Place) -> Place:
        """Return the position for a checkpoint to continue from; batches that were only inspected do not count."""
        last, trained = self._last, self._trained
        if last is None or last.finished or last.trained:
            return place
        return trained.place if trained is not None and not trained.finished else last.begin
