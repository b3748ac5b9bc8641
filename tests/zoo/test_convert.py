"""Pickled checkpoints to safetensors."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from penstock.errors import ModelError
from penstock.zoo.weights.convert import Converted, convert_checkpoint

STATE = {"fc.weight": torch.arange(4.0).reshape(2, 2), "fc.bias": torch.ones(2, dtype=torch.float16)}


@pytest.mark.parametrize(
    "checkpoint",
    [
        STATE,
        OrderedDict(STATE),
        {"model": STATE, "epoch": 3, "optimizer": {"state": {}}},
        {"state_dict": {f"module.{key}": value for key, value in STATE.items()}},
        {"state_dict": {"model": {f"module._orig_mod.{key}": value for key, value in STATE.items()}}},
        {"model_ema": STATE, "model": {"fc.weight": torch.zeros(2, 2)}},
    ],
)
def test_usual_nestings_are_unwrapped(tmp_path: Path, checkpoint: Any) -> None:
    torch.save(checkpoint, tmp_path / "in.pth")
    made = convert_checkpoint(tmp_path / "in.pth", tmp_path / "out.safetensors")
    assert made == Converted(num_tensors=2, num_bytes=20, dropped=())
    loaded = load_file(tmp_path / "out.safetensors")
    assert loaded.keys() == STATE.keys()
    assert all(torch.equal(loaded[key], value) and loaded[key].dtype == value.dtype for key, value in STATE.items())


def test_shared_and_strided_tensors_are_written_once_each(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": base, "b": base, "row": base[0], "turned": base.t(), "step": 7}, tmp_path / "in.bin")
    made = convert_checkpoint(tmp_path / "in.bin", tmp_path / "out.safetensors")
    assert made.dropped == ("step",)
    loaded = load_file(tmp_path / "out.safetensors")
    assert torch.equal(loaded["b"], base)
    assert loaded["row"].tolist() == [0.0, 1.0, 2.0]
    assert torch.equal(loaded["turned"], base.t())


def test_a_legacy_file_is_read_too(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "in.pt", _use_new_zipfile_serialization=False)
    assert convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.safetensors").num_tensors == 2


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("open('ran', 'w')",)


@pytest.mark.parametrize("checkpoint", [nn.Linear(2, 2), Evil(), {"model": STATE, "args": Evil()}])
def test_pickled_objects_are_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(checkpoint, "in.pth")
    with pytest.raises(ModelError) as caught:
        convert_checkpoint(Path("in.pth"), Path("out.safetensors"))
    assert str(caught.value) == (
        "in.pth holds pickled objects, not only tensors; "
        "where it was made, save model.state_dict() instead and convert that"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["in.pth"]


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ([torch.ones(1)], "holds a list, not tensors by name"),
        ({"epoch": 3}, "holds no tensors; its entries are epoch"),
        ({"w": torch.ones(2).to_sparse()}, "holds w as a sparse or quantized tensor"),
    ],
)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, checkpoint: Any, message: str) -> None:
    torch.save(checkpoint, tmp_path / "in.pth")
    with pytest.raises(ModelError, match=message):
        convert_checkpoint(tmp_path / "in.pth", tmp_path / "out.safetensors")


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "in.pth")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "in.pth").read_bytes()[:-200])
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "empty.pth").write_bytes(b"")
    for name in ("cut", "text", "empty"):
        with pytest.raises(ModelError, match="PyTorch checkpoint") as caught:
            convert_checkpoint(tmp_path / f"{name}.pth", tmp_path / "out.safetensors")
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match=r"checkpoint .* not found"):
        convert_checkpoint(tmp_path / "none.pth", tmp_path / "out.safetensors")
    (tmp_path / "a.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is safetensors already"):
        convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "out.safetensors")


def test_an_old_target_stays_when_the_source_is_bad(tmp_path: Path) -> None:
    (tmp_path / "out.safetensors").write_text("old")
    (tmp_path / "in.pth").write_text("hello")
    with pytest.raises(ModelError):
        convert_checkpoint(tmp_path / "in.pth", tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_text() == "old"
    torch.save(STATE, tmp_path / "in.pth")
    convert_checkpoint(tmp_path / "in.pth", tmp_path / "out.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pth", "out.safetensors"]
