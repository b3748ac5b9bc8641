"""Ceilings are measured on both sides of what is compared with them."""

from collections.abc import Sequence

import pytest
from torch import Tensor

from penstock.bench.references import Ceilings


class Slowing:
    """A whole model on devices that need a second more each time they are asked."""

    beside = False

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def run(self, ranks: Sequence[int], count: int) -> tuple[list[list[Tensor]], list[float]]:
        self.asked.append(tuple(ranks))
        return [], [float(count * len(self.asked)) for _ in ranks]


def make() -> tuple[Slowing, Ceilings]:
    slowing = Slowing()
    return slowing, Ceilings(slowing, [1, 2, 3], num_microbatches=8, rows=2)


def test_the_limit_is_the_mean_of_before_and_after() -> None:
    slowing, ceilings = make()
    with ceilings.around(2) as rates:
        assert len(slowing.asked) == 1
    assert rates == [(2 / 1 + 2 / 2) / 2] * 2
    assert slowing.asked == [(1, 2), (1, 2)]


def test_limit_after_a_run_serves_the_next() -> None:
    slowing, ceilings = make()
    with ceilings.around(3):
        pass
    with ceilings.around(3) as rates:
        pass
    assert rates == [(2 / 2 + 2 / 3) / 2] * 3
    assert len(slowing.asked) == 3


def test_limit_is_measured_again_after_a_change() -> None:
    slowing, ceilings = make()
    with ceilings.around(3):
        pass
    assert ceilings.before(2) == [2 / 3] * 2
    ceilings.forget()
    assert ceilings.before(2) == [2 / 4] * 2
    assert slowing.asked[2:] == [(1, 2), (1, 2)]


def test_typical_rate_is_the_mean_of_several() -> None:
    slowing, ceilings = make()
    assert ceilings.typical(2, 3) == pytest.approx([(2 / 1 + 2 / 2 + 2 / 3) / 3] * 2)
    with ceilings.around(2) as rates:
        assert len(slowing.asked) == 3
    assert rates == [(2 / 3 + 2 / 4) / 2] * 2
