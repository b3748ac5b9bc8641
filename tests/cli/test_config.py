"""Settings in a file, beside options on the command line."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli.cluster import check_outputs, ends_with
from penstock.errors import UsageError
from penstock.recipes.settings import SETTINGS
from tests.cli.conftest import SMALL
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


def test_every_verb_that_runs_a_model_takes_a_file(penstock: Run, tmp_path: Path) -> None:
    config = tmp_path / "infer.toml"
    config.write_text(f'model = "{SMALL}"\nimages = ["digits"]\noutput = "{tmp_path}/a.jsonl"\nnum_images = 3\ntop = 2')
    status, _, err = penstock("infer", "--config", config, "--set", "stages=1", "--num-images", 2)
    assert status == 0, err
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [len(row["top"]) for row in rows] == [2, 2]
    for verb in ("infer", "generate", "chat", "serve", "bench", "train"):
        status, printed, _ = penstock(verb, "--write-config")
        assert status == 0
        tomllib.loads(printed)
        status, _, err = penstock(verb, "--set", "unheard=1")
        assert (status, "'unheard' is no setting" in err) == (2, True)
        assert penstock(verb)[0] == 2  # no model


@pytest.mark.parametrize("given", [["--on-loss", "stop"], ["--set", "on-loss='stop'"], ["--config=stop.toml"]])
def test_settings_file_counts_for_cluster_runs(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stop.toml").write_text('on_loss = "stop"\noutput = "boards.toml"')
    assert (ends_with(["infer", *given]), ends_with(["infer"])) == (True, "first")
    Path("boards.toml").touch()
    if given[0][:8] == "--config":
        with pytest.raises(UsageError, match=r"boards\.toml"):
            check_outputs(Path("boards.toml"), ["infer", *given])
