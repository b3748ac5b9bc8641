"""Pickled checkpoints, and folders of torch.distributed.checkpoint, to safetensors."""

import json
import os
import pickle
import re
import shutil
from argparse import Namespace
from collections import OrderedDict, defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint.state_dict_saver
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import state_dict_saver

from penstock.errors import ModelError
from penstock.zoo.weights.convert import convert_checkpoint
from penstock.zoo.weights.weight_files import FileWeights, read_classes
from tests.processes import PROGRAMS, run_python


class Own(dict[str, Any]):
    """As configurations of training scripts are."""


class Several(list[int]):
    """A list of its own class."""


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
        {"net": STATE, "acc": 0.5},
        {"model_state": defaultdict(torch.Tensor, STATE)},
        {"student": {f"module.{key}": value for key, value in STATE.items()}},
        {"state_dict": {f"model.{key}": value for key, value in STATE.items()}, "hyper_parameters": Namespace(lr=1)},
        {"state_dict": {f"_orig_mod.module.{key}": value for key, value in STATE.items()}},
        {"args": Namespace(lr=1), "model": STATE, "best": np.float64(0.5), "out": Path("runs"), Path("key"): 1},
        {"model": Own(STATE), "of": Several([1, 2]), "twice": [Own(a=Own(b=1)), defaultdict(int, {1: 2})]},
        {"epochs": defaultdict(list, {1: [2]}), "ema": STATE, "rng": np.random.get_state(), "when": timedelta(1)},
    ],
)
def test_usual_nestings_are_unwrapped(tmp_path: Path, checkpoint: Any) -> None:
    torch.save(checkpoint, tmp_path / "in.pth")
    made = convert_checkpoint(tmp_path / "in.pth", tmp_path / "out.safetensors")
    assert (made.num_tensors, made.num_bytes, made.dropped) == (2, 20, ())
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


@pytest.mark.parametrize(
    "checkpoint", [nn.Linear(2, 2), Evil(), {"model": nn.Linear(2, 2)}, {"model": STATE, "args": os.system}]
)
def test_pickled_objects_are_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(checkpoint, "in.pth")
    with pytest.raises(ModelError) as caught:
        convert_checkpoint(Path("in.pth"), Path("out.safetensors"))
    assert re.match(
        r"in\.pth holds (a )?pickled object.* state_dict\(\)|in\.pth .*where it was made", str(caught.value)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["in.pth"]


def test_objects_beside_the_weights_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": STATE, "args": Evil(), "of": [Evil(), {"a": Evil()}]}, "in.pth")
    assert convert_checkpoint(Path("in.pth"), Path("out.safetensors")).num_tensors == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pth", "out.safetensors"]


def test_objects_in_a_legacy_file_are_skipped(tmp_path: Path) -> None:
    torch.save({"model": STATE, "args": Namespace(a=1)}, tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    assert convert_checkpoint(tmp_path / "a.pth", tmp_path / "out.safetensors").num_tensors == 2


def test_the_key_is_reported_and_can_be_chosen(tmp_path: Path) -> None:
    other = {"fc.weight": torch.zeros(3)}
    torch.save({"model": other, "model_ema": {"module": STATE}, "optimizer": {}, "teacher": other}, tmp_path / "a.pth")
    found = convert_checkpoint(tmp_path / "a.pth", tmp_path / "out.safetensors")
    assert (found.key, found.others) == ("model_ema.module", ("model",))
    for key in ("model", "teacher"):
        found = convert_checkpoint(tmp_path / "a.pth", tmp_path / "out.safetensors", key)
        assert (found.key, found.num_bytes) == (key, 12)
    for key in ("optimizer", "mode"):
        with pytest.raises(ModelError, match=rf"'{key}'.*model, model_ema, teacher"):
            convert_checkpoint(tmp_path / "a.pth", tmp_path / "out.safetensors", key)


def test_the_counter_of_an_averaged_model_and_names_of_a_flat_model(tmp_path: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    torch.save({"ema": averaged.state_dict()}, tmp_path / "a.pth")
    found = convert_checkpoint(tmp_path / "a.pth", tmp_path / "out.safetensors")
    assert (found.num_tensors, found.dropped) == (2, ("n_averaged",))
    torch.save({"model.norm.weight": torch.ones(1)}, tmp_path / "flat.bin")  # as of a decoder of transformers
    convert_checkpoint(tmp_path / "flat.bin", tmp_path / "out.safetensors")
    assert list(load_file(tmp_path / "out.safetensors")) == ["model.norm.weight"]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"class_to_idx": {"dog": 1, "cat": 0}}, ("cat", "dog")),
        ({"classes": ["cat", "dog"]}, ("cat", "dog")),
        ({"class_to_idx": {"dog": 3}}, None),
        ({"class_to_idx": Namespace()}, None),
    ],
)
def test_class_names_of_a_checkpoint_are_kept(tmp_path: Path, entry: Any, expected: Any) -> None:
    torch.save({"model": STATE, **entry}, tmp_path / "a.pth")
    convert_checkpoint(tmp_path / "a.pth", tmp_path / "out.safetensors")
    assert read_classes(FileWeights(tmp_path / "out.safetensors").metadata) == expected


def test_a_target_that_is_the_source_is_refused(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pth")
    kept = (tmp_path / "a.pth").read_bytes()
    (tmp_path / "soft.safetensors").symlink_to("a.pth")
    (tmp_path / "hard.safetensors").hardlink_to(tmp_path / "a.pth")
    for name in ("a.pth", "b.pth", "out", "soft.safetensors", "hard.safetensors"):
        with pytest.raises(ModelError, match=name):
            convert_checkpoint(tmp_path / "a.pth", tmp_path / name)
    assert (tmp_path / "a.pth").read_bytes() == kept


def test_shards_become_one_file(tmp_path: Path) -> None:
    places = {}
    for number, (name, value) in enumerate(STATE.items()):
        torch.save({name: value}, tmp_path / f"pytorch_model-{number}.bin")
        places[name] = f"pytorch_model-{number}.bin"
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    for path in (tmp_path, index):
        with pytest.raises(ModelError, match=r"convert .*index\.json -o .*pytorch_model\.safetensors"):
            FileWeights(path)
    assert convert_checkpoint(index, tmp_path / "out.safetensors").num_tensors == 2


@pytest.mark.parametrize("name", ["a.pth.tar", "a.pkl", "a.PTH", "a.ckpt", "a.pt", "a", "a.model"])
def test_pickled_files_of_other_names_get_the_command(tmp_path: Path, name: str) -> None:
    torch.save(STATE, tmp_path / name)
    with pytest.raises(ModelError, match=r"penstock convert .* -o .*/a(\.model)?\.safetensors"):
        FileWeights(tmp_path / name)


def test_files_of_other_kinds_get_their_own_advice(tmp_path: Path) -> None:
    torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)).save(tmp_path / "script.pt")
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), tmp_path / "program.pt2")
    (tmp_path / "lfs.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    (tmp_path / "lfs.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    for name, said in (
        ("script.pt", "torch.jit.load"),
        ("program.pt2", "torch.export.load"),
        ("lfs.bin", "git lfs pull"),
    ):
        for read in (lambda path: convert_checkpoint(path, tmp_path / "out.safetensors"), FileWeights):
            with pytest.raises(ModelError, match=re.escape(said)):
                read(tmp_path / name)
    with pytest.raises(ModelError, match="git lfs pull"):
        FileWeights(tmp_path / "lfs.safetensors")


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ([torch.ones(1)], "holds a list, not tensors by name"),
        ({"epoch": 3}, "holds no tensors; its entries are epoch"),
        ({"w": torch.ones(2).to_sparse()}, "holds w as a sparse or quantized tensor"),
    ],
)
def test_checkpoint_without_tensors_is_refused(tmp_path: Path, checkpoint: Any, message: str) -> None:
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
