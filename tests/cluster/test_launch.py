"""Worker processes: started, watched, ended."""

import os
import signal
import time
from pathlib import Path

import pytest

from penstock.cluster.launch import LocalWorkers, WorkerExit, available_cores

SLEEP = "import sys, time; time.sleep(60)"
UNTIL_END = "import sys; sys.stdin.buffer.read()"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that workers can run, found like one beside a notebook."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "some_worker.py"


def wait_for_exit(workers: LocalWorkers) -> WorkerExit:
    deadline = time.monotonic() + 20.0
    while (gone := workers.exited()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return gone


def test_workers_end_by_themselves_when_their_pipe_closes(module: Path) -> None:
    module.write_text(UNTIL_END)
    workers = LocalWorkers("some_worker", [[], []])
    assert len(workers.pids) == 2
    assert workers.exited() is None
    workers.stop(10.0)
    assert workers.pids == []


def test_those_that_do_not_are_killed_even_when_stopped(module: Path) -> None:
    module.write_text(SLEEP)
    workers = LocalWorkers("some_worker", [[], []])
    os.kill(workers.pids[0], signal.SIGSTOP)
    begin = time.perf_counter()
    workers.stop(0.2)
    assert time.perf_counter() - begin < 5.0


def test_exits_are_named(module: Path) -> None:
    module.write_text("import sys; sys.exit(int(sys.argv[1]))")
    workers = LocalWorkers("some_worker", [["7"]])
    assert str(wait_for_exit(workers)) == "ended with status 7"
    workers.stop(0.0)
    module.write_text(SLEEP)
    workers = LocalWorkers("some_worker", [[], []])
    os.kill(workers.pids[1], signal.SIGKILL)
    gone = wait_for_exit(workers)
    assert (gone.index, str(gone)) == (1, "was killed by signal 9 (out of memory?)")
    workers.stop(0.0)


def test_the_environment_and_the_process_group(module: Path, tmp_path: Path) -> None:
    said = "os.environ['MINE'] + str(os.getpgid(0) == os.getpid())"
    module.write_text(f"import os; open({str(tmp_path / 'said')!r}, 'w').write({said})")
    workers = LocalWorkers("some_worker", [[]], {"MINE": "yes"})
    wait_for_exit(workers)
    workers.stop(0.0)
    assert (tmp_path / "said").read_text() == "yesTrue"


def test_cores() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
