"""Pipelines that nobody closes: at the end of a script, and dropped in the middle of one."""

import gc

import psutil
import pytest
import torch
from torch import nn

from penstock.pipeline import Pipeline
from tests.processes import PROGRAMS, run_python

OPEN = str(PROGRAMS / "left_open.py")


def test_a_training_ends_with_its_script() -> None:
    done = run_python(str(PROGRAMS / "training_left_open.py"), deadline_s=60.0)
    assert (done.status, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("how", "taken"), [("end", 5), ("middle", 1)])
def test_script_ends_without_closing_the_pipeline(how: str, taken: int) -> None:
    done = run_python(OPEN, how, deadline_s=60.0)
    assert (done.status, done.stdout, done.stderr) == (0, f"0 took {taken}\n", "")


@pytest.mark.parametrize(("how", "taken"), [("end", 5), ("more", 10), ("close", 5)])
def test_torchrun_ranks_serve_until_rank_0_ends(how: str, taken: int) -> None:
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", OPEN, how]
    done = run_python(*arguments, deadline_s=120.0)
    assert done.status == 0, done.stderr
    assert sorted(filter(None, done.stdout.splitlines())) == [f"0 took {taken}", "1 took 0"]
    assert "Traceback" not in done.stderr  # of torch's there may be lines on connections that have ended
    assert "note:" not in done.stderr


def test_script_error_reaches_the_other_ranks() -> None:
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", OPEN, "raise"]
    done = run_python(*arguments, deadline_s=120.0)
    assert done.status == 1
    assert "ValueError: the script's own mistake" in done.stderr


@pytest.mark.parametrize("cycle", [False, True])
def test_a_pipeline_that_is_dropped_ends_its_workers(cycle: bool) -> None:
    x = torch.zeros(2, 8)
    pipe = Pipeline(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval(), (x,), stages=2, threads=1)
    assert len(list(pipe.stream([x] * 3))) == 3
    assert pipe._streaming.world.workers is not None
    workers = [psutil.Process(pid) for pid in pipe._streaming.world.workers.pids]
    assert len(workers) == 2
    if cycle:
        pipe.itself = pipe  # type: ignore[attr-defined]
    del pipe
    gc.collect()
    _, alive = psutil.wait_procs(workers, timeout=10.0)
    assert not alive
