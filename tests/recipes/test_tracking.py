"""Metrics beside the JSON lines: what TensorBoard and Weights & Biases find on disk."""

import sys
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.recipes.launch import fit
from tests.recipes.test_fit import lines, settings


def test_tensorboard_reads_the_losses(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed (penstock[track])")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit(settings(tmp_path / "run", steps=3, track=["tensorboard"]))
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("step/loss")]
    assert found == [(line["step"], pytest.approx(line["loss"])) for line in lines(tmp_path / "run", "step")]
    assert len(found) == 3
    epoch = lines(tmp_path / "run", "epoch")[0]
    assert events.Scalars("epoch/validation_loss")[0].value == pytest.approx(epoch["validation_loss"])


def test_a_tracker_that_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UsageError, match=rf"{name} .*penstock\[track\]"):
            fit(settings(tmp_path / name, track=[name]))
