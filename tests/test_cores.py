"""Shares of a machine's cores."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cores import available_cores, keep_to_share, quota_cores, share, usable_cpus


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


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 0.5),
        ("0::/a/b", {"a/cpu.max": "max 100000"}, None),
        ("0::/a", {"a/cpu.max": "damaged"}, None),
        (
            "3:cpu,cpuacct:/a",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "3500", "cpu,cpuacct/a/cpu.cfs_period_us": "10000"},
            0.35,
        ),
        ("3:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "10000"}, None),
        ("4:memory:/a", {"memory/a/cpu.max": "1 100"}, None),
    ],
)
def test_quotas_of_both_versions(group: str, files: dict[str, str], expected: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    process = tmp_path / "process"
    process.write_text(f"{group}\n")
    assert quota_cores(tmp_path, process) == expected


def test_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
    monkeypatch.setenv("PENSTOCK_CPU", "0.35")
    assert usable_cpus() == 0.35
    assert available_cores() == 1
