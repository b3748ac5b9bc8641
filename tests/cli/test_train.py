"""`penstock train`: what it prints, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes.test_fit import VIT

Run = Callable[..., tuple[int, str, str]]


def test_a_run_on_the_command_line(penstock: Run, tmp_path: Path) -> None:
    arguments = ["--data", "digits", "--num-rows", 100, "--threads", 1, "-o", tmp_path / "run"]
    arguments += ["--trace", tmp_path / "trace", "--json", tmp_path / "out.json"]
    status, out, err = penstock("train", VIT, *arguments)
    assert (status, err) == (0, "")
    assert "1 processes; model, checkpoints and metrics are in" in out
    assert json.loads((tmp_path / "out.json").read_text())["epochs"][0]["unit"] == "images"
    status, out, _ = penstock("report", tmp_path / "trace", "--no-pictures")
    assert status == 0
    assert "synchronization" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "nowhere"], "there is no nowhere"),
        (["--data", "digits", "--optimizer", "adam"], "Invalid enum value 'adam'"),
        (["--data", "digits", "--sweep", "x", "--compare", "data"], "--compare and --sweep starts"),
        (["--data", "digits", "--compare", "none"], "the modes to compare are"),
        (["--data", "digits", "--memory", "1GiB"], "leave it out"),
        (["--data", "digits", "--memory", "1GiB", "--cluster", "lab.toml"], "a lab's hosts theirs"),
        (["--data", "digits", "--compare", "data", "--trace", "x"], "--trace records one"),
        (["--data", "digits", "--schedule", "2f2b"], "is not known; use one of gpipe"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], said: str, penstock: Run, tmp_path: Path) -> None:
    status, _, err = penstock("train", VIT, *arguments, "-o", tmp_path / "run")
    assert status == 2
    assert said in err
    assert err.count("\n") == 1


def test_the_help_says_that_hosts_share_the_folder(penstock: Run) -> None:
    _, out, _ = penstock("train", "--help")
    assert "Hosts must share the folder" in " ".join(out.replace("│", " ").split())
