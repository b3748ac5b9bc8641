"""Metrics beside the JSON lines: what TensorBoard and Weights & Biases find on disk."""

import sys
from pathlib import Path
from typing import Any

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


class Library:
    """In the place of Weights & Biases: keeps what it is given."""

    def __init__(self) -> None:
        self.started: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **settings: Any) -> "Library":
        self.started = settings
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def test_weights_and_biases_gets_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, "wandb", library)
    folder = tmp_path / "run"
    fit(settings(folder, steps=3, track=["wandb"]))
    assert (library.started["name"], library.started["dir"]) == ("run", str(folder))
    assert library.started["config"]["steps"] == 3
    found = [(step, values["step/loss"]) for step, values in library.logged if "step/loss" in values]
    assert found == [(line["step"], line["loss"]) for line in lines(folder, "step")]
    assert [step for step, _ in library.logged] == sorted(step for step, _ in library.logged)  # it takes no other order
    assert library.finished == 1


def test_a_tracker_that_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UsageError, match=rf"{name} .*penstock\[track\]"):
            fit(settings(tmp_path / name, track=[name]))
