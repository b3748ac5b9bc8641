"""Settings in a file, beside options on the command line."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

from penstock.recipes.settings import SETTINGS
from tests.recipes.test_fit import VIT

Run = Callable[..., tuple[int, str, str]]


def test_settings_come_from_options_then_set_then_the_file(penstock: Run, tmp_path: Path) -> None:
    file, folder = tmp_path / "run.toml", tmp_path / "run"
    few = {"data": "digits", "num_rows": 40, "steps": 2, "threads": 1, "batch_size": 8, "lr": 0.5, "clip": 2.0}
    lines = [f"model = {json.dumps(VIT)}", *(f"{name} = {json.dumps(value)}" for name, value in few.items())]
    file.write_text("\n".join([*lines, f"output = {json.dumps(str(folder))}"]))
    words = ["--config", file, "--set", "clip=1", "--set", "lr=0.25", "--lr", 0.125]
    status, printed, err = penstock("train", "--write-config", *words)
    assert status == 0, err
    assert tomllib.loads(printed) == {**few, "model": VIT, "output": str(folder), "clip": 1.0, "lr": 0.125}
    assert "Hosts must share" in printed
    status, _, err = penstock("train", *words)
    assert status == 0, err
    read = json.loads((folder / SETTINGS).read_text())
    assert {name: read[name] for name in few} == {**few, "clip": 1.0, "lr": 0.125}
    # what the command printed, and what the run kept, train the same model
    file.write_text(printed)
    for number, given in enumerate((file, folder / SETTINGS)):
        status, _, err = penstock("train", "--config", given, "-o", tmp_path / str(number))
        assert status == 0, err
        assert (tmp_path / str(number) / "model.safetensors").read_bytes() == (
            folder / "model.safetensors"
        ).read_bytes()
    # a resumed run keeps its own values, but for those in the file
    file.write_text("steps = 4\nlr = 0.0")
    status, _, err = penstock("train", "--resume", "-o", folder, "--config", file)
    assert status == 0, err
    assert "lr 0.0 instead of 0.125" in err


def test_no_output_in_a_file_of_settings_is_an_input(penstock: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "best.safetensors").write_bytes(b"weights")
    file = tmp_path / "run.toml"
    file.write_text(f"output = {json.dumps(str(folder))}\nteacher = {json.dumps(str(folder / 'best.safetensors'))}")
    status, _, err = penstock("train", VIT, "--data", "digits", "--config", file)
    assert (status, err.count("\n")) == (2, 1)
    assert "--set teacher" in err
    status, _, err = penstock("train", VIT, "--data", "digits", "--config", file, "--json", file)
    assert status == 2
    assert file.read_text().startswith("output")
    assert (folder / "best.safetensors").read_bytes() == b"weights"
