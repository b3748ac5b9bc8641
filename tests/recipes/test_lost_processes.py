"""Training runs that lose a process and go on: with metrics, checkpoints, and another process that joins."""

import json
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.errors import RunError
from penstock.group.launcher import WorkerExit
from penstock.recipes import launch
from tests.processes import PROGRAMS, free_port, run_groups

SCRIPT = PROGRAMS / "lost_processes.py"


def test_a_run_waits_for_another_that_joins(tmp_path: Path) -> None:
    given = [str(tmp_path), str(free_port()), "wait"]
    ended, (joined,) = run_groups(SCRIPT, [(4, given), (0, given)], 120.0)
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


@pytest.mark.parametrize("moment", ["clip_grad_norm_", "evaluate_all", "save_checkpoint"])
def test_an_epoch_whose_end_was_taken_back_is_recorded_when_it_ends_again(moment: str, tmp_path: Path) -> None:
    given = [str(tmp_path), str(free_port()), "end", moment]
    (ended,) = run_groups(SCRIPT, [(2, given)], 120.0)
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


def test_surviving_run_ends_with_its_first_process() -> None:
    lost, first = WorkerExit(3, -signal.SIGKILL), WorkerExit(0, 0)

    def watched(*exits: WorkerExit, outlives: bool) -> RunError | None:
        return launch._watch(Ending(*exits), outlives=outlives, grace_s=0.3)  # type: ignore[arg-type]

    assert watched(lost, first, outlives=True) is None
    assert "rank 3" in str(watched(lost, first, outlives=False))
    assert "rank 0" in str(watched(lost, WorkerExit(0, 1), outlives=True))


def test_joined_epoch_has_rows_and_losses_of_whole_batches(tmp_path: Path) -> None:
    given = [str(tmp_path), str(free_port()), "join"]
    ended, (joined,) = run_groups(SCRIPT, [(2, given), (0, given)], 120.0)
    assert [end.status for end in (*ended, joined)] == [0, -signal.SIGKILL, 0]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["processes"] for line in lines if line["kind"] == "change"] == [1, 2]
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    assert len(losses) == 67
    expected = f"8 {sum(losses) / len(losses):.6f}"
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank-1").read_text() == expected
