"""Shares of a machine's cores."""

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.group.entry import keep_to_share, share


@given(st.integers(1, 16), st.integers(1, 8), st.integers(0, 7))
def test_shares_cover_every_core_once(num_processes: int, each: int, first: int) -> None:
    cores = list(range(first, first + num_processes * each))
    shares = [share(cores, position, num_processes) for position in range(num_processes)]
    assert sorted(core for one in shares for core in one) == cores


@pytest.mark.parametrize("num_processes", [3, 5, 8])
def test_cores_that_do_not_divide_belong_to_all(num_processes: int) -> None:
    assert share([0, 1, 2, 3], 0, num_processes) == {0, 1, 2, 3}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind threads")
def test_a_quota_decides_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core cannot be shared out")
    seen: list[set[int]] = []

    def bound(quota: str) -> set[int]:
        monkeypatch.setenv("PENSTOCK_CPU", quota)

        def run() -> None:  # a thread's binding ends with it
            keep_to_share(0, len(cores))
            seen.append(os.sched_getaffinity(0))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return seen[-1]

    assert bound("0.5") == cores
    assert bound(str(len(cores))) == {min(cores)}
