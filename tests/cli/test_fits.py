"""`penstock fits`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.runtime.registry import RuntimeChoice
from penstock.spec.cluster import write_cluster
from penstock.spec.profile import write_profile
from tests import pretend
from tests.generate.tokens import save_model
from tests.recipes.test_fit import VIT
from tests.spec.samples import make_cluster, make_profile

pytest.importorskip("transformers")
SAMPLE = "timm:vit_small_patch16_224"
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


def test_fits_reads_the_memory_of_a_gpu(penstock: Run, pretended_gpu: torch.device) -> None:
    status, out, _ = penstock("fits", VIT, "--device", pretend.NAME)
    assert (status, pretended_gpu) == (1, torch.device(pretend.NAME, 0))
    assert "the largest memory is 55.5 kB" in out


REFUSED: tuple[tuple[str, ...], ...] = (
    ("--train", "--one-call"), ("--train", "--cache-dtype", "int8"), ("--train", "--runtime", "onnxruntime:stored"),
    ("--train", "--max-length", "64"), ("--train", "--data", "digits", "--max-length", "64"),
    ("--train", "--schedule", "dualpipe"), ("--data", "digits"), ("--microbatches", "4"), ("--schedule", "1f1b"),
    ("--one-call",), ("--max-length", "64"), ("--cache-dtype", "int8"), ("--cache-dtype", "int7"),
    ("--device", "cuda", "--on", "boards.toml"),
    ("--runtime", "onnxruntime:int8"), ("--runtime", "onnxruntime:stored"),
)  # fmt: skip
OF_A_PROFILE: tuple[tuple[str, ...], ...] = (
    ("--runtime", "onnxruntime:stored"), ("--cache-dtype", "int8"), ("--max-length", "64"), ("--one-call",),
    ("--train",), ("--train", "--data", "digits"),
)  # fmt: skip


@pytest.mark.parametrize("options", REFUSED)
def test_options_without_effect_are_refused(penstock: Run, options: tuple[str, ...]) -> None:
    status, _, err = penstock("fits", VIT, *options)
    assert status == 2
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(("model", "options"), [(VIT, ()), *((SAMPLE, options) for options in OF_A_PROFILE)])
def test_fits_refuses_other_models_and_options_of_its_profile(
    penstock: Run, tmp_path: Path, model: str, options: tuple[str, ...]
) -> None:
    write_profile(tmp_path / "profile.json", make_profile([1, 1], model=SAMPLE))
    status, _, err = penstock("fits", model, "--profile", tmp_path / "profile.json", *options)
    assert status == 2
    assert len(err.strip().splitlines()) == 1


def test_profile_gives_the_rate(penstock: Run, tmp_path: Path) -> None:
    write_profile(tmp_path / "profile.json", make_profile([1, 1], model=SAMPLE))
    status, out, err = penstock("fits", SAMPLE, "--profile", tmp_path / "profile.json", "--rows", 2)
    assert (status, err) == (0, "")
    assert "rows per second" in out


def test_other_runtimes_are_not_profiled_on_a_gpu(
    penstock: Run, pretended_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RuntimeChoice, "check_machine", lambda _choice: None)
    status, _, err = penstock("profile", VIT, "--device", pretended_gpu.type, "--runtime", "eager:bfloat16")
    assert (status, len(err.strip().splitlines())) == (2, 1)
    assert "--runtime" in err
