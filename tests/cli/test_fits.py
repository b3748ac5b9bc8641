"""`penstock fits`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.spec.cluster import write_cluster
from tests.generate.tokens import save_model
from tests.recipes.test_fit import VIT
from tests.spec.samples import make_cluster

pytest.importorskip("transformers")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def boards(tmp_path: Path) -> Path:
    file = tmp_path / "boards.toml"
    file.write_text(write_cluster(make_cluster(1, 1, memory_bytes=2**31)))
    return file


def test_slots_of_a_language_model(
    penstock: Run, boards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path)
    capsys.readouterr()
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()  # only headers are read
    options = ("--on", boards, "--max-length", 100, "--json", tmp_path / "fits.json")
    status, out, err = penstock("fits", f"hf:{tmp_path}", *options, "--rows", 3)
    assert (status, err) == (0, "")
    assert "3 slots of a lane" in out
    found = json.loads((tmp_path / "fits.json").read_text())
    assert found["fits"]
    # keys and values of three layers with two heads of 12 numbers, for 3 slots a lane: 100 tokens in blocks of 64,
    # and a place for what is not kept
    lanes = len(found["stages"]) + (len(found["stages"]) > 1)
    assert sum(stage["kept"] for stage in found["stages"]) == 3 * lanes * 129 * 3 * 2 * 2 * 12 * 4


def test_training_and_what_does_not_fit(penstock: Run, boards: Path, tmp_path: Path) -> None:
    status, out, _ = penstock("fits", VIT, "--train", "--on", boards, "--rows", 4)
    assert status == 0
    assert "with checkpointing" in out
    boards.write_text(write_cluster(make_cluster(1, memory_bytes=2**20)))
    status, out, _ = penstock("fits", VIT, "--on", boards, "--json", tmp_path / "fits.json")
    assert status == 1
    assert "no number of machines" in out
    assert not json.loads((tmp_path / "fits.json").read_text())["fits"]


@pytest.mark.parametrize(
    "options", [("--train", "--one-call"), ("--data", "digits"), ("--train", "--schedule", "dualpipe"),
                ("--runtime", "onnxruntime:int8"), ("--runtime", "onnxruntime:stored")],
)  # fmt: skip
def test_options_that_exclude_each_other(penstock: Run, options: tuple[str, ...]) -> None:
    status, _, err = penstock("fits", VIT, *options)
    assert status == 2
    assert len(err.strip().splitlines()) == 1
