"""Bytes that tensors hold: at most, and what is left; in place, through views, backward."""

import torch

from penstock.measure.backward import LiveBytes

KILO = 1000


def floats(count: int) -> torch.Tensor:
    return torch.ones(count // 4)


def test_peak_and_remaining_bytes_are_counted() -> None:
    given = floats(KILO)
    with LiveBytes() as meter:
        begin = meter()
        doubled = given * 2
        del doubled
        result = (given + 1) * 3  # two of them for a moment
        assert meter() - begin == 2 * KILO
        assert meter.held == KILO
        begin = meter()
        assert meter() - begin == 0
    del result
    assert meter.held == 0


def test_views_and_writes_hold_nothing_more() -> None:
    given = floats(KILO)
    with LiveBytes() as meter:
        given.add_(1).view(10, -1).t()
        made = given + 1
        kept = made.mul_(2)[:3]
        del made
        assert meter.held == KILO
    assert kept.numel() == 3


def test_accumulating_backward_counts_its_gradient() -> None:
    weight = floats(KILO).requires_grad_()
    for expected in (KILO, 0):
        with LiveBytes() as meter:
            loss = (weight * 2).sum()
            held = meter.held
            begin = meter()
            loss.backward()
            assert meter() - begin >= KILO
            assert meter.held - held == expected
            del loss
