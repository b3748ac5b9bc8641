"""Worker processes: started, watched, ended."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from penstock.errors import RunError, UsageError
from penstock.group.board import wait_for_server
from penstock.group.entry import under_torchrun
from penstock.group.launcher import (
    Launched,
    LocalWorkers,
    WorkerExit,
    code_command,
    first_node,
    launcher_variables,
    module_command,
    read_launched,
    slurm_variables,
    tasks_per_node,
)
from tests.processes import ROOT, free_port, lay_trap, run_python

SLEEP = "import sys, time; time.sleep(60)"
UNTIL_END = "import sys; sys.stdin.buffer.read()"
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
GOOD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
STEP = {
    "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_ID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NODELIST": "board[1-2]", "SLURM_JOB_ID": "39999",
}  # fmt: skip


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


def test_workers_that_do_not_end_are_killed(module: Path) -> None:
    module.write_text(SLEEP)
    workers = LocalWorkers("some_worker", [[], []])
    os.kill(workers.pids[0], signal.SIGSTOP)
    begin = time.perf_counter()
    workers.stop(0.2)
    assert time.perf_counter() - begin < 5.0


def test_worker_that_survives_a_kill_is_named(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module.write_text(SLEEP)
    workers = LocalWorkers("some_worker", [[], []])
    (pid, other), process = workers.pids, workers._processes[0]
    with monkeypatch.context() as patch:
        patch.setattr(process, "kill", lambda: None)  # as if it waited for a disk
        begin = time.perf_counter()
        with pytest.warns(UserWarning, match=f"0.3 s, but worker process {pid} did not"):
            workers.stop(0.2, killed_s=0.3)
        assert time.perf_counter() - begin < 5.0
    assert not psutil.pid_exists(other)
    process.kill()
    process.wait()


def test_exit_status_is_described(module: Path) -> None:
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


def test_worker_gets_environment_and_process_group(module: Path, tmp_path: Path) -> None:
    said = "os.environ['MINE'] + str(os.getpgid(0) == os.getpid())"
    module.write_text(f"import os; open({str(tmp_path / 'said')!r}, 'w').write({said})")
    workers = LocalWorkers("some_worker", [[]], {"MINE": "yes"})
    wait_for_exit(workers)
    workers.stop(0.0)
    assert (tmp_path / "said").read_text() == "yesTrue"


def test_workers_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    mark = lay_trap(tmp_path / "downloaded")
    found = run_python("-c", WORLD, str(ROOT / "src"), str(mark.parent), deadline_s=60.0, env={"PYTHONPATH": ""})
    assert not mark.exists(), mark.read_text()
    assert (found.status, found.stdout) == (0, "fine\n"), found.stderr


def test_a_worker_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_worker.py").write_text("import some_neighbour, sys; sys.exit(some_neighbour.STATUS)")
    (tmp_path / "some_neighbour.py").write_text("STATUS = 5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
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


def test_torchrun_variables_are_read() -> None:
    assert read_launched(GOOD) == Launched(1, 2, "10.0.0.1", 29500)
    assert read_launched({}) is None
    assert read_launched({"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", ""), ("RANK", "x"), ("RANK", "-1"), ("RANK", "2"), ("RANK", "1.0"), ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", ""), ("MASTER_PORT", "abc"), ("MASTER_PORT", ""), ("MASTER_PORT", "0"), ("MASTER_PORT", "70000"),
        ("MASTER_ADDR", ""), ("LOCAL_RANK", "zero"), ("LOCAL_WORLD_SIZE", ""),
    ],
)  # fmt: skip
def test_invalid_launcher_variables_are_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, good in {**GOOD, name: value}.items():
        monkeypatch.setenv(key, good)
    with pytest.raises(UsageError, match=rf"{name} must be .*got '{value}'"):
        under_torchrun()


@pytest.mark.parametrize("absent", ["MASTER_ADDR", "MASTER_PORT"])
def test_missing_launcher_variable_is_named(absent: str) -> None:
    with pytest.raises(UsageError, match=absent):
        read_launched({name: value for name, value in GOOD.items() if name != absent})


@pytest.mark.parametrize(
    "given",
    [
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
         "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    ],
)  # fmt: skip
def test_processes_of_mpi(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert launcher_variables(given) == expected
    for key in (*GOOD, *expected):
        monkeypatch.setenv(key, "")  # so that it is removed again
        monkeypatch.delenv(key)
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UsageError, match="MASTER_ADDR and MASTER_PORT"):
        under_torchrun()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert under_torchrun()


def test_one_process_of_mpi_is_alone() -> None:
    assert launcher_variables({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) == {}


def test_waiting_rank_names_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with pytest.raises(RunError, match=f"127.0.0.1:{port}"):
        wait_for_server("127.0.0.1", port, 0.5, tell_s=0.1)
    assert capsys.readouterr().err.count(f"waiting for rank 0 at 127.0.0.1:{port}") == 1


def test_a_task_of_a_step_has_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "")  # so that it is removed again
            patch.delenv(name)
        assert under_torchrun()
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("2", "3", "1")
        assert os.environ["MASTER_ADDR"] == "board1"
        assert os.environ["MASTER_PORT"] == str(20_000 + (39_999 + 97) % 20_000)


def test_existing_variables_are_kept() -> None:
    found = slurm_variables({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29500")


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "x"},
        {"SLURM_NODEID": "7"},
        {"SLURM_STEP_TASKS_PER_NODE": "many"},
    ],
)
def test_process_outside_of_a_step_is_alone(change: dict[str, str]) -> None:
    assert slurm_variables({**STEP, **change}) == {}
    assert slurm_variables({name: STEP[name] for name in STEP if name not in {"SLURM_STEP_NUM_TASKS"}}) == {}


@pytest.mark.parametrize(("text", "counts"), [("1", [1]), ("1(x2)", [1, 1]), ("2(x2),3,1(x2)", [2, 2, 3, 1, 1])])
def test_tasks_of_nodes(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n[1-2]", "n1"), ("n[003,5-9]", "n003"), ("a,b[1-2]", "a"), ("b[2],a", "b2")]
)
def test_first_node_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first
