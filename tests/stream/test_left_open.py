"""Pipelines that nobody closes: at the end of a script, and dropped in the middle of one."""

import gc
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from penstock.pipeline import Pipeline
from tests.processes import run_python

OPEN = """
import os, sys, time, torch, penstock
from torch import nn
x = torch.randn(2, 8)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).eval()
pipe = penstock.Pipeline(model, (x,), stages=2, threads=1)
rank, how = os.environ.get("RANK", "0"), sys.argv[1]
if how == "middle":
    stream = pipe.stream([x] * 50)
    taken = [next(stream)]
else:
    taken = list(pipe.stream([x] * 5))
if how == "more" and rank == "0":  # of which the others' scripts know nothing
    time.sleep(2.0)
    taken += list(pipe.stream([x] * 5))
if how == "close" and rank != "0":
    pipe.close()
if how == "raise" and rank == "0":
    raise ValueError("the script's own mistake")
sys.stdout.write(f"{rank} took {len(taken)}\\n")
"""


TRAINING = """
import torch, penstock
x = torch.ones(2, 4)
pipe = penstock.Pipeline(torch.nn.Linear(4, 4), x)
pipe.train_step(x, x, torch.nn.functional.mse_loss)
"""


def test_a_training_ends_with_its_script() -> None:
    done = run_python("-c", TRAINING, deadline_s=60.0)
    assert (done.status, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("how", "taken"), [("end", 5), ("middle", 1)])
def test_at_the_end_of_a_script(how: str, taken: int) -> None:
    done = run_python("-c", OPEN, how, deadline_s=60.0)
    assert (done.status, done.stdout, done.stderr) == (0, f"0 took {taken}\n", "")


@pytest.mark.parametrize(("how", "taken"), [("end", 5), ("more", 10), ("close", 5)])
def test_under_torchrun_the_others_serve_until_the_first_has_ended(how: str, taken: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OPEN)
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), how]
    done = run_python(*arguments, deadline_s=120.0)
    assert done.status == 0, done.stderr
    assert sorted(filter(None, done.stdout.splitlines())) == [f"0 took {taken}", "1 took 0"]
    assert "Traceback" not in done.stderr  # of torch's there may be lines on connections that have ended
    assert "note:" not in done.stderr


def test_a_mistake_of_the_script_is_told_to_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OPEN)
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), "raise"]
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
