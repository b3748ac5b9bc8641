"""Training runs that lose a process and go on: with metrics, checkpoints, and another process that joins."""

import json
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.errors import RunError
from penstock.group.launcher import WorkerExit
from penstock.recipes import launch
from tests.processes import free_port, run_groups

# of every script: the arguments, and a model
BEGINNING = """
import os, signal, sys, time
from pathlib import Path
from penstock.recipes.launch import fit
from penstock.recipes.loop import _Fit
from penstock.recipes.settings import FitSettings

os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
folder, port, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ.get("RANK", "-1"))
os.environ["MASTER_PORT"] = port
MODEL = "timm:vit_tiny_patch16_224,img_size=8,patch_size=2,depth=2,embed_dim=24,num_heads=3"
"""

SCRIPT = (
    BEGINNING
    + """
settings = FitSettings(
    model=MODEL, data="digits",
    stages=2, replicas=2, threads=1, batch_size=64, num_rows=600, steps=24, lr=1e-2, checkpoint_every=5,
    on_loss="wait",
    output=str(folder / "run"),
)
updates, update = [], _Fit._update


def dies(fit):
    updates.append(0)
    if rank == 3 and len(updates) == 7:
        (folder / "lost").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    update(fit)


_Fit._update = dies
if rank < 0:
    while not (folder / "lost").exists():
        time.sleep(0.05)
    settings = settings.replace(join=f"127.0.0.1:{port}")
result = fit(settings)
if rank <= 0:
    (folder / f"rank{rank}").write_text(f"{result.num_processes} {result.last.step}")
"""
)


def test_a_run_waits_for_another_that_joins(tmp_path: Path) -> None:
    script, given = tmp_path / "script.py", [str(tmp_path), str(free_port())]
    script.write_text(SCRIPT)
    ended, (joined,) = run_groups(script, [(4, given), (0, given)], 120.0)
    assert [end.status for end in ended] == [0, 0, 0, -signal.SIGKILL]
    assert joined.status == 0
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank-1").read_text() == "4 24"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 25))
    changes = [line for line in lines if line["kind"] == "change"]
    assert [(line["step"], line["processes"], line["went_back"]) for line in changes] == [(7, 4, False)]
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    assert losses[-1] < losses[0]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    # another process joined at step 7, in the middle of an epoch
    assert [(line["epoch"], line["step"], line["batch_rows"]) for line in epochs] == [
        (0, 9, 64),
        (1, 18, 64),
        (2, 24, 64),
    ]
    assert [line["train_loss"] for line in epochs] == pytest.approx(
        [sum(losses[start:end]) / (end - start) for start, end in pairwise([0, 9, 18, 24])]
    )


LOST_AT_AN_END = (
    BEGINNING
    + """
settings = FitSettings(
    model=MODEL, data="digits",
    stages=2, threads=1, batch_size=64, num_rows=600, steps=24, checkpoint_every=4, on_loss="continue", clip=1.0,
    output=str(folder / "run"), lr_schedule="cosine",
)
moment = sys.argv[3]
function = getattr(_Fit, moment)


def dies(fit, *args):
    if rank == 1 and fit._trainer.step == 9 and fit._loader.position == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return function(fit, *args)


setattr(_Fit, moment, dies)
result = fit(settings)
(folder / "epochs").write_text(str([(each.epoch, each.step) for each in result.epochs]))
"""
)


@pytest.mark.parametrize("moment", ["_update", "_validate", "_checkpoint"])
def test_an_epoch_whose_end_was_taken_back_is_recorded_when_it_ends_again(moment: str, tmp_path: Path) -> None:
    script, given = tmp_path / "script.py", [str(tmp_path), str(free_port()), moment]
    script.write_text(LOST_AT_AN_END)
    (ended,) = run_groups(script, [(2, given)], 120.0)
    assert [end.status for end in ended] == [0, -signal.SIGKILL]
    assert (tmp_path / "epochs").read_text() == "[(0, 9), (1, 18), (2, 24)]"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["went_back"]) for line in lines if line["kind"] == "change"] == [(8, True)]
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 25))
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [(line["epoch"], line["step"], line["batch_rows"]) for line in epochs] == [
        (0, 9, 64),
        (1, 18, 64),
        (2, 24, 64),
    ]
    assert [line["train_loss"] for line in epochs] == pytest.approx(
        [sum(losses[start:end]) / (end - start) for start, end in pairwise([0, 9, 18, 24])]
    )


class Ending:
    """Workers that end one after the other."""

    def __init__(self, *exits: WorkerExit) -> None:
        self.pids = [1] * 4
        self._exits = list(exits)

    def exits(self) -> list[WorkerExit]:
        return [self._exits.pop(0)] if self._exits else []


def test_only_the_first_process_ends_a_run_that_outlives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 0.3)
    lost, first = WorkerExit(3, -signal.SIGKILL), WorkerExit(0, 0)

    def watched(*exits: WorkerExit, outlives: bool) -> RunError | None:
        return launch._watch(Ending(*exits), outlives=outlives)  # type: ignore[arg-type]

    assert watched(lost, first, outlives=True) is None
    assert "rank 3" in str(watched(lost, first, outlives=False))
    assert "rank 0" in str(watched(lost, WorkerExit(0, 1), outlives=True))


JOINED = (
    BEGINNING
    + """
settings = FitSettings(
    model=MODEL, data="digits",
    stages=1, replicas=2, threads=1, batch_size=8, num_rows=600, steps=67, on_loss="continue",
    output=str(folder / "run"),
)
update = _Fit._update


def dies(fit):
    if rank == 1 and fit._trainer.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and len(fit._trainer.changes) == 1:
        (folder / "alone").touch()
        time.sleep(0.4)
    return update(fit)


_Fit._update = dies
if rank < 0:
    while not (folder / "alone").exists():
        time.sleep(0.05)
    settings = settings.replace(join=f"127.0.0.1:{port}")
result = fit(settings)
(folder / f"rank{rank}").write_text(f"{result.last.batch_rows} {result.last.train_loss:.6f}")
"""
)


def test_an_epoch_that_a_process_joins_has_the_rows_and_losses_of_whole_batches(tmp_path: Path) -> None:
    script, given = tmp_path / "script.py", [str(tmp_path), str(free_port())]
    script.write_text(JOINED)
    ended, (joined,) = run_groups(script, [(2, given), (0, given)], 120.0)
    assert [end.status for end in (*ended, joined)] == [0, -signal.SIGKILL, 0]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["processes"] for line in lines if line["kind"] == "change"] == [1, 2]
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    assert len(losses) == 67
    expected = f"8 {sum(losses) / len(losses):.6f}"
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank-1").read_text() == expected
