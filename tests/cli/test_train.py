"""`penstock train`: what it prints, and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import DeviceLost, RunError
from penstock.recipes.settings import SETTINGS
from penstock.train.training_pipeline import TrainingPipeline
from tests.processes import run_python
from tests.recipes.test_fit import VIT

Run = Callable[..., tuple[int, str, str]]


def test_a_run_on_the_command_line(penstock: Run, tmp_path: Path) -> None:
    arguments = ["--data", "digits", "--set", "num_rows=100", "--threads", 1, "-o", tmp_path / "run"]
    arguments += ["--trace", tmp_path / "trace", "--json", tmp_path / "out.json"]
    status, out, err = penstock("train", VIT, *arguments)
    about = "90 images to train on, 10 for validation; 10 classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert (status, err) == (0, f"note: {about}\n")
    assert "1 process; model, checkpoints and metrics are in" in out
    assert json.loads((tmp_path / "out.json").read_text())["epochs"][0]["unit"] == "images"
    status, out, err = penstock("train", VIT, *arguments[:-4], "--resume")
    assert (status, err, out.count("\n")) == (0, "", 1)
    assert f"{tmp_path / 'run'} is finished" in out
    status, out, _ = penstock("report", tmp_path / "trace")
    assert status == 0
    assert "synchronization" in out


def test_a_run_in_stages_names_its_phases_on_a_terminal(tmp_path: Path) -> None:
    given = [
        "train", VIT, "--data", "digits", "--set", "num_rows=40",
        "--steps", "1", "--stages", "2", "-o", str(tmp_path),
    ]  # fmt: skip
    terminal = {"FORCE_COLOR": "1", "PENSTOCK_PROGRESS": "1"}
    done = run_python("-m", "penstock", *given, deadline_s=120.0, env=terminal)
    assert done.status == 0, done.stderr
    phases = ["loading PyTorch", "starting 2 processes", "connecting 2 processes", "preparing model and data",
              "capturing the model", "putting the stages in place", "train"]  # fmt: skip
    places = [done.stderr.find(phase) for phase in phases]
    assert -1 not in places
    assert places == sorted(places)


def test_resumed_run_keeps_options_that_are_not_given(penstock: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    again = ["train", "--threads", 1, "--resume", "-o", folder]
    started = [
        "--set", "num_rows=100", "--epochs", 3, "--seed", 2, "--batch-size", 30, "--lr", 0.01, "--set", "clip=1.0",
    ]  # fmt: skip
    started += ["--threads", 1, "-o", folder, "--set", "checkpoint_every=2"]
    assert penstock("train", VIT, "--data", "digits", *started)[0] == 0
    shutil.rmtree(folder / "checkpoints" / "step-000009")
    before = json.loads((folder / SETTINGS).read_text())
    status, _, err = penstock(*again)
    assert (status, err) == (0, "note: resuming from the checkpoint of step 8, to step 9\n")
    assert json.loads((folder / SETTINGS).read_text()) == before | {"resume": True, "checkpoint_every": None}
    status, _, err = penstock(*again, "--steps", 10)
    assert status == 0
    assert err.splitlines() == [
        "note: resuming with steps 10 (not set before)",
        "note: resuming from the checkpoint of step 9, to step 10",
    ]
    status, _, err = penstock(*again, "--epochs", 4)
    assert status == 0
    assert err.splitlines() == [
        "note: resuming with epochs 4 instead of 3, no steps (10 before)",
        "note: resuming from the checkpoint of step 10, to step 12",
    ]
    status, _, err = penstock(*again, "--set", "num_rows=90", "--set", "teacher=x")
    assert (status, err.count("\n")) == (2, 1)
    status, _, err = penstock(*again, "--set", "teacher=x")
    assert status == 2
    assert "expected a run without teacher; got x; leave --set teacher out" in err


def test_a_run_that_ends_early_reports_how_to_continue(
    penstock: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [
        "train", VIT, "--data", "digits", "--set", "num_rows=100",
        "--threads", 1, "--steps", 4, "-o", tmp_path / "run",
    ]  # fmt: skip
    ending: list[BaseException] = [DeviceLost("rank 1 is lost")]
    train_step = TrainingPipeline.train_step

    def ends(pipe: TrainingPipeline, *given: Any) -> Any:
        if ending:
            raise ending[-1]
        return train_step(pipe, *given)

    monkeypatch.setattr(TrainingPipeline, "train_step", ends)
    status, _, err = penstock(*given)
    assert (status, err.splitlines()[-1]) == (
        1,
        f"error: rank 1 is lost; no checkpoint was written yet; remove {tmp_path / 'run'}, or choose another "
        "--output, and start again",
    )
    for more in ([], ["--resume"]):
        status, _, err = penstock(*given, *more)
        assert (status, "remove the folder, or choose another --output" in err) == (2, True)
    shutil.rmtree(tmp_path / "run")
    lost = ending.pop()
    assert penstock(*given)[0] == 0
    ending.append(lost)
    again = [*given, "--steps", 6, "--resume"]
    assert penstock(*again)[2].endswith("error: rank 1 is lost; continue with --resume from step 4\n")
    ending.append(RunError("the disk is full; free space and continue with --resume"))
    assert penstock(*again)[2].endswith("error: the disk is full; free space and continue with --resume\n")
    ending.append(KeyboardInterrupt())
    status, _, err = penstock(*again)
    assert status == 130
    assert err.endswith("interrupted; continue with --resume from step 4\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "nowhere"], "nowhere not found"),
        ([], "a new run needs --data"),
        (["--data", "digits", "--optimizer", "adam"], "optimizer must be adamw or sgd; got 'adam'"),
        (["--data", "digits", "--compare", "none"], "single, model, pipeline, data, both; got none"),
        (["--data", "digits", "--compare", "data", "--trace", "x"], "--trace records one"),
        (["--data", "digits", "--clip", "1"], "--clip is a setting without an option; give --set clip=VALUE"),
        (["--data", "digits", "--no-cache"], "give --set cache=VALUE"),
        (["--data", "digits", "--set", "clip"], "--set must be KEY=VALUE; got 'clip'"),
        (["--data", "digits", "--set", "clipp=1"], "'clipp' is no setting; did you mean clip?"),
        (["--data", "digits", "--set", "clip=tight"], "the setting clip is not valid"),
        (["--data", "digits", "--set", "torch_profiler=true"], "torch_profiler needs a trace"),
        (["--data", "digits", "--config", "nowhere.toml"], "settings cannot be read from nowhere.toml"),
        (["--data", "digits", "--schedule", "2f2b"], "'2f2b' is neither"),
        (["--data", "digits", "--freeze", "none"], "freeze is for elastic training; add elastic=True (--elastic)"),
        (["--data", "digits", "--set", "cache_views=3"], "cache_views is for elastic training"),
        (["--data", "digits", "--elastic", "--set", "cache_limit=much"], "much"),
        (["--data", "digits", "--elastic", "--freeze", "0,-1"], "'0,-1'"),
        (["--data", "digits", "--elastic", "--freeze", "0,9"], "has 2 layers, so 9 cannot be frozen"),
        (["--data", "digits", "--elastic", "--trace", "x"], "leave the trace out"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], said: str, penstock: Run, tmp_path: Path) -> None:
    status, _, err = penstock("train", VIT, *arguments, "-o", tmp_path / "run")
    assert status == 2
    assert said in err
    assert err.count("\n") == 1


def test_ways_to_train_are_compared(penstock: Run, tmp_path: Path) -> None:
    few = ["--data", "digits", "--set", "num_rows=48", "--batch-size", 8, "--threads", 1]
    given = ["--compare", "single,data", "-o", tmp_path / "compared", "--json", tmp_path / "rows.json"]
    status, _out, err = penstock("train", VIT, *few, *given)
    assert status == 0, err
    one, two = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["name"], row["processes"], row["settings"]["batch_size"]) for row in (one, two)] == [
        ("single", 1, 8),
        ("data", 2, 8),
    ]
    assert one["units_per_s"] > 0 < two["units_per_s"]
    for picture in ("training_time", "throughput"):
        assert (tmp_path / "compared" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")


def test_an_elastic_run_and_its_report(penstock: Run, tmp_path: Path) -> None:
    arguments = ["--data", "digits", "--set", "num_rows=60", "--threads", 1, "-o", tmp_path / "run", "--epochs", 2]
    arguments += [
        "--elastic", "--freeze", "0,1", "--set", f"cache_dir={tmp_path / 'cache'}", "--set", "cache_limit=1GiB",
    ]  # fmt: skip
    status, out, err = penstock("train", VIT, *arguments)
    assert status == 0, err
    assert "give a profile" in err
    assert "model, checkpoints and metrics are in" in out
    status, out, _ = penstock("report", tmp_path / "run", "--json", tmp_path / "report.json")
    assert status == 0
    plans = json.loads((tmp_path / "report.json").read_text())["plans"]
    assert [(plan["epoch"], plan["frozen_layers"], plan["num_layers"]) for plan in plans] == [(0, 0, 2), (1, 1, 2)]
