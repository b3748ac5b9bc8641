"""Metrics beside the JSON lines: what TensorBoard and Weights & Biases find on disk."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
import wandb
import wandb.util
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from penstock.errors import UsageError
from penstock.recipes.launch import fit
from penstock.train.step import LossTensor
from tests.recipes.test_fit import lines, settings


def test_tensorboard_reads_the_losses(tmp_path: Path) -> None:
    fit(settings(tmp_path / "run", steps=3, track=["tensorboard"]))
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("step/loss")]
    assert found == [(line["step"], pytest.approx(line["loss"])) for line in lines(tmp_path / "run", "step")]
    assert len(found) == 3
    epoch = lines(tmp_path / "run", "epoch")[0]
    assert events.Scalars("epoch/validation_loss")[0].value == pytest.approx(epoch["validation_loss"])


def test_weights_and_biases_writes_every_line_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "MODE": "offline",
        "SILENT": "true",
        "CACHE_DIR": str(tmp_path),
        "CONFIG_DIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    folder = tmp_path / "run"
    try:
        fit(settings(folder, steps=3, track=["wandb"]))
    finally:
        wandb.teardown()
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    written = file.read_bytes()
    for line in lines(folder, "step"):
        assert json.dumps(line["loss"]).encode() in written
    assert written.count(b"step/loss") >= 3
    assert b"epoch/validation_loss" in written
    assert b"vit_tiny" in written  # of the settings


def test_a_resumed_run_continues_its_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder, both = tmp_path / "run", ["tensorboard", "wandb"]
    try:
        fit(settings(folder, steps=2, track=both))
        begun = (folder / "wandb-id").read_text()
        for name in ("a step that was lost", "step/loss"):
            with SummaryWriter(str(folder)) as writer:  # of a run that went on after its last checkpoint
                writer.add_scalar(name, 99.0, 3)
        time.sleep(1)  # the folders are named by the second
        fit(settings(folder, steps=4, track=both, resume=True))
        fit(settings(tmp_path / "other", steps=1, track=["wandb"]))
    finally:
        wandb.teardown()
    assert (folder / "wandb-id").read_text() == begun
    assert len(list(folder.glob(f"wandb/offline-run-*-{begun}"))) == len(list(folder.glob("wandb/offline-run-*"))) == 2
    assert (tmp_path / "other" / "wandb-id").read_text() != begun
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("step/loss")] == [1, 2, 3, 4]
    assert events.Scalars("step/loss")[2].value < 99.0


def test_a_tracker_without_a_key_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("api_key not configured (no-tty).\nCall wandb.login(key=...)")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UsageError, match=r"api_key not configured.*wandb login") as caught:
        fit(settings(tmp_path / "run", steps=1, track=["wandb"]))
    assert "\n" not in str(caught.value)
    fit(settings(tmp_path / "run", steps=1))  # the folder holds no run yet


def test_a_tracker_that_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UsageError, match=rf"{name} .*penstock\[track\]"):
            fit(settings(tmp_path / name, track=[name]))


def test_the_loss_of_a_step_is_logged_as_a_number() -> None:
    loss = torch.tensor(2.5, dtype=torch.float64).as_subclass(LossTensor)
    assert wandb.util.json_friendly(loss) == (2.5, True)
