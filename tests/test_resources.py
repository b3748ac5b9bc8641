"""Cores and memory as the system reports them."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OutOfMemory, RunError
from penstock.resources import (
    available_cores,
    is_out_of_memory,
    keep_to_share,
    num_killed,
    peak_bytes,
    quota_cores,
    share,
    usable_cpus,
)
from tests.fewer import long
from tests.processes import run_python


@pytest.mark.long
def test_torch_s_own_allocator_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    failed = RunError("operation linear failed")
    failed.__cause__ = caught.value
    assert is_out_of_memory(failed)


@pytest.mark.parametrize("error", [MemoryError(), OutOfMemory("host1"), torch.OutOfMemoryError("CUDA")])
def test_errors_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RunError("not enough memory"), RuntimeError("unsupported memory format")])
def test_unrelated_error_is_not_out_of_memory(error: BaseException) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.skipif(sys.platform != "linux", reason="the count is Linux's")
def test_kills_by_the_system_are_counted() -> None:
    assert isinstance(num_killed(), int)


@pytest.mark.fresh
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hand a peak down to what a process starts")
def test_the_peak_is_of_the_process_itself() -> None:
    held = torch.ones(2**28 // 4)  # 256 MiB, which what is started here never holds
    assert peak_bytes() > held.nbytes
    code = "from penstock.resources import peak_bytes; print(peak_bytes())"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert 0 < int(started.stdout) < held.nbytes


@pytest.mark.parametrize(("gigabytes", "needed"), [(1, True), long(64, False), long(3, True)])
def test_too_few_addresses_are_one_line(gigabytes: int, needed: bool) -> None:
    limit = (
        "import resource, sys\nfrom penstock.cli.main import main\nlimit = int(sys.argv.pop(1)) * 10**9\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\nsys.exit(main(sys.argv[1:]))"
    )
    ended = run_python("-c", limit, str(gigabytes), "split", "timm:no_such_model", deadline_s=60)
    assert ended.stderr.count("\n") == 1
    assert ("ulimit -v" in ended.stderr) == needed


def test_cyclic_exception_chain_is_handled() -> None:
    error = RunError("the connection broke")
    error.__cause__ = error
    assert not is_out_of_memory(error)


@given(st.integers(1, 16), st.integers(1, 8), st.integers(0, 7))
def test_shares_cover_every_core_once(num_processes: int, each: int, first: int) -> None:
    cores = list(range(first, first + num_processes * each))
    shares = [share(cores, position, num_processes) for position in range(num_processes)]
    assert sorted(core for one in shares for core in one) == cores


@pytest.mark.parametrize("num_processes", [3, 5, 8])
def test_cores_that_do_not_divide_belong_to_all(num_processes: int) -> None:
    assert share([0, 1, 2, 3], 0, num_processes) == {0, 1, 2, 3}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind threads")
def test_cpu_quota_limits_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
@pytest.mark.parametrize(("call", "variables", "count"), [
    ("share_arena()", {}, 1), ("", {}, 2), ("share_arena()", {"MALLOC_ARENA_MAX": "8"}, 2),
])  # fmt: skip
def test_threads_share_an_arena(call: str, variables: dict[str, str], count: int) -> None:
    code = (
        f"import ctypes, threading\nfrom penstock.resources import share_arena\n{call}\nlibrary = ctypes.CDLL(None)\n"
        "thread = threading.Thread(target=library.malloc, args=(1000,))\nthread.start()\nthread.join()\n"
        "library.malloc_stats()"
    )
    ended = run_python("-c", code, deadline_s=60, env=variables)
    assert ended.stderr.count("Arena ") == count
