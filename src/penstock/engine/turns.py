"""Things that take turns: which one a microbatch meets depends on its number alone, so every process agrees."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class Turns(Generic[T_co]):
    """Several things of which microbatch `m` takes number `order[m % len(order)]`.

    >>> Turns(["a", "b"], (0, 1, 0))[4]
    'b'
    """

    def __init__(self, items: Sequence[T_co], order: Sequence[int] = (0,)) -> None:
        self.items = tuple(items)
        self.order = tuple(order)

    def __getitem__(self, microbatch: int) -> T_co:
        return self.items[self.order[microbatch % len(self.order)]]

    def map(self, function: Callable[[T_co], U]) -> "Turns[U]":
        """Make something of each, in the same order of turns."""
        return Turns([function(item) for item in self.items], self.order)
