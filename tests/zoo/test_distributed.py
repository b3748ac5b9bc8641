"""Folders of torch.distributed.checkpoint, as one file."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import state_dict_saver

from penstock.errors import ModelError
from penstock.zoo.weights.convert import convert_checkpoint
from penstock.zoo.weights.weight_files import FileWeights
from tests.processes import PROGRAMS, run_python


def save(folder: Path, **state: Any) -> Path:
    state_dict_saver.save(state, checkpoint_id=folder)
    return folder


def test_a_model_with_its_optimizer(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    folder = save(tmp_path / "dcp", model=module.state_dict(), optimizer=optimizer.state_dict(), epoch=3, path=tmp_path)
    found = convert_checkpoint(folder, tmp_path / "out.safetensors")
    assert (found.key, found.num_tensors) == ("model", 7)
    loaded = load_file(tmp_path / "out.safetensors")
    assert loaded.keys() == module.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in module.state_dict().items())
    with pytest.raises(ModelError, match=r"convert it first: penstock convert .*dcp -o dcp\.safetensors"):
        FileWeights(folder)


@pytest.mark.parametrize("outer", [{}, {"app": None}, {"app": None, "model": None}])
def test_other_nestings(tmp_path: Path, outer: dict[str, None]) -> None:
    state: Any = {"module.w": torch.ones(2, 0), "module.b": torch.tensor(3.0)}
    for key in reversed(outer):
        state = {key: state}
    convert_checkpoint(save(tmp_path / "dcp", **state), tmp_path / "out.safetensors")
    loaded = load_file(tmp_path / "out.safetensors")
    assert {name: tuple(value.shape) for name, value in loaded.items()} == {"w": (2, 0), "b": ()}


def test_tensors_in_parts_of_several_ranks(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    script = str(PROGRAMS / "sharded_checkpoint.py")
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda rank: run_python(script, str(tmp_path), str(rank), deadline_s=120.0), range(2)))
    assert [end.status for end in ends] == [0, 0], ends[0].stderr
    convert_checkpoint(tmp_path / "dcp", tmp_path / "out.safetensors")
    loaded = load_file(tmp_path / "out.safetensors")
    assert torch.equal(loaded["fc.weight"], torch.arange(35.0).reshape(7, 5))
    assert torch.equal(loaded["fc.bias"], torch.arange(5.0).bfloat16())
    lost = next(path for path in (tmp_path / "dcp").iterdir() if path.name.startswith("__1"))
    lost.unlink()
    with pytest.raises(ModelError, match=rf"{lost.name} is missing"):
        convert_checkpoint(tmp_path / "dcp", tmp_path / "out.safetensors")


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made-by-a-pickle",)


def test_damaged_and_forged_checkpoints_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save(tmp_path / "dcp", model={"w": torch.arange(100.0)})
    (data,) = (path for path in folder.iterdir() if path.suffix == ".distcp")
    index, whole = (folder / ".metadata").read_bytes(), data.read_bytes()
    for text in (b"", index[:-20], b"no pickle", pickle.dumps(_Evil()), pickle.dumps({"a": _Evil()})):
        (folder / ".metadata").write_bytes(text)
        with pytest.raises(ModelError, match="metadata cannot be read") as caught:
            convert_checkpoint(folder, tmp_path / "out.safetensors")
        assert "\n" not in str(caught.value)
    (folder / ".metadata").write_bytes(index.replace(data.name.encode(), b"/" + data.name[1:].encode()))
    with pytest.raises(ModelError, match=r"no file for a part of model\.w"):
        convert_checkpoint(folder, tmp_path / "out.safetensors")
    (folder / ".metadata").write_bytes(index)
    for content in (whole[:50], pickle.dumps(_Evil())):
        data.write_bytes(content)
        with pytest.raises(ModelError, match=r"the part of w in .* cannot be read"):
            convert_checkpoint(folder, tmp_path / "out.safetensors")
    assert not (tmp_path / "made-by-a-pickle").exists()
    assert not (tmp_path / "out.safetensors").exists()
    shutil.rmtree(folder)
