"""Worker processes: started, watched, ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from penstock.group import launcher
from penstock.group.launcher import LocalWorkers, WorkerExit, code_command, module_command
from tests.processes import ROOT, lay_trap, run_python

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


def test_a_process_that_not_even_a_kill_ends_is_named_and_not_waited_for(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.write_text(SLEEP)
    workers = LocalWorkers("some_worker", [[], []])
    (pid, other), process = workers.pids, workers._processes[0]
    monkeypatch.setattr(launcher, "_KILLED_S", 0.3)
    with monkeypatch.context() as patch:
        patch.setattr(process, "kill", lambda: None)  # as if it waited for a disk
        begin = time.perf_counter()
        with pytest.warns(UserWarning, match=f"0.3 s, but worker process {pid} did not"):
            workers.stop(0.2)
        assert time.perf_counter() - begin < 5.0
    assert not psutil.pid_exists(other)
    process.kill()
    process.wait()


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


WORLD = """
import os, sys
sys.path.insert(0, sys.argv[1])  # a script that has the package on its path
from penstock.group.entry import start_local
os.chdir(sys.argv[2])
sys.path.insert(0, "")  # as in a notebook
world = start_local(1)
world.dismiss()
world.close()
print("fine")
"""


def test_workers_do_not_import_what_lies_in_the_current_folder(tmp_path: Path) -> None:
    mark = lay_trap(tmp_path / "downloaded")
    found = run_python("-c", WORLD, str(ROOT / "src"), str(mark.parent), deadline_s=60.0, env={"PYTHONPATH": ""})
    assert not mark.exists(), mark.read_text()
    assert (found.status, found.stdout) == (0, "fine\n"), found.stderr


def test_a_worker_in_the_current_folder_is_found(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module.write_text("import some_neighbour, sys; sys.exit(some_neighbour.STATUS)")
    module.with_name("some_neighbour.py").write_text("STATUS = 5")
    monkeypatch.chdir(module.parent)
    monkeypatch.setattr(sys, "path", ["", *sys.path[1:]])
    workers = LocalWorkers("some_worker", [[]])
    assert wait_for_exit(workers).status == 5
    workers.stop(0.0)


def test_commands_leave_the_current_folder_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = lay_trap(tmp_path)
    monkeypatch.chdir(tmp_path)
    commands = module_command("json.tool", "--help"), code_command("import json; print(json.dumps([1]))")
    found = [subprocess.run(command, capture_output=True, text=True, timeout=60, check=True) for command in commands]
    assert "usage" in found[0].stdout
    assert found[1].stdout == "[1]\n"
    assert not mark.exists()
