"""Safetensors files: whole, sharded, renamed and damaged."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import ModelError
from penstock.recipes.data_formats import make_task
from penstock.recipes.data_tasks import classes_of
from penstock.recipes.settings import FitSettings
from penstock.zoo.data.image_names import open_images
from penstock.zoo.models.models import load_model, with_classes
from penstock.zoo.weights.weight_files import FileWeights, read_classes, save_weights, write_classes
from penstock.zoo.weights.weights import RenamedWeights, TensorWeights

VIT = "timm:vit_tiny_patch16_224,img_size=8,patch_size=4,depth=1,embed_dim=24,num_heads=3"
NAMES = ("ship", "frog", "truck")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.ones(2, dtype=torch.float16)}, path)
    return path


def shards(folder: Path) -> Path:
    save_file({"a": torch.zeros(1)}, folder / "model-1-of-2.safetensors")
    save_file({"b": torch.ones(2)}, folder / "model-2-of-2.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}))
    return index


def test_a_file_is_read_by_name(file: Path) -> None:
    weights = FileWeights(file)
    assert sorted(weights.names()) == ["fc.bias", "fc.weight"]
    assert weights.shape("fc.weight") == (2, 3)
    assert weights.dtype("fc.bias") == torch.float16
    assert weights.load("fc.weight").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_a_directory_holds_a_file(file: Path) -> None:
    assert FileWeights(file.parent).shape("fc.bias") == (2,)


def test_names_may_be_changed(file: Path) -> None:
    weights = RenamedWeights(FileWeights(file), {"head.weight": "fc.weight", "head.bias": "fc.wieght"})
    assert sorted(weights.names()) == ["head.bias", "head.weight"]
    assert weights.shape("head.weight") == (2, 3)
    with pytest.raises(ModelError, match=r"fc\.wieght.*; did you mean fc\.weight"):
        weights.load("head.bias")


def test_shards_are_one(tmp_path: Path) -> None:
    index = shards(tmp_path)
    for path in (index, tmp_path):
        weights = FileWeights(path)
        assert [weights.load(name).tolist() for name in ("a", "b")] == [[0.0], [1.0, 1.0]]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = shards(tmp_path)
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 of 2 shards .*model-2-of-2\.safetensors"):
        FileWeights(index)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd"])
def test_shard_must_be_next_to_its_index(tmp_path: Path, name: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="folder of their index"):
        FileWeights(index)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_a_strange_index_is_refused(tmp_path: Path, text: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(ModelError, match="is not an index of shards"):
        FileWeights(index)


def test_bad_files_get_one_line_each(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "cut.safetensors").write_bytes(file.read_bytes()[:-3])
    (other / "text.safetensors").write_text("hello")
    (other / "empty.safetensors").write_bytes(b"")
    (other / "model.pth").write_bytes(b"")
    with pytest.raises(ModelError, match=r"none\.safetensors not found"):
        FileWeights(other / "none.safetensors")
    for name in ("cut", "text", "empty"):
        with pytest.raises(ModelError, match=r"not a whole safetensors file \(.*\)"):
            FileWeights(other / f"{name}.safetensors")
    with pytest.raises(ModelError, match=r"penstock convert .*model\.pth -o .*model\.safetensors$"):
        FileWeights(other / "model.pth")
    with pytest.raises(ModelError, match=r"3 candidates \(cut\.safetensors, .*\)"):
        FileWeights(other)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no \.safetensors file and no index"):
        FileWeights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"penstock convert .*pytorch_model\.bin"):
        FileWeights(tmp_path)


def test_a_missing_tensor_is_named(file: Path) -> None:
    with pytest.raises(ModelError, match=r"fc\.wieght.*; did you mean fc\.weight"):
        FileWeights(file).load("fc.wieght")


def test_saved_weights_come_back(tmp_path: Path) -> None:
    tensors = {
        "flag": torch.tensor([True, False, True]), "half": torch.randn(3, 5).bfloat16(), "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4), "strided": torch.arange(6.0).reshape(2, 3).t(),
        "double": torch.randn(2, dtype=torch.float64),
    }  # fmt: skip
    target = tmp_path / "out.safetensors"
    assert save_weights(TensorWeights(tensors), target) == 3 + 30 + 4 + 24 + 16
    loaded = load_file(target)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]
    assert target.stat().st_mode & 0o400


def test_a_target_that_cannot_be_written(tmp_path: Path) -> None:
    weights = TensorWeights({"w": torch.ones(1)})
    with pytest.raises(ModelError, match=r"out\.safetensors cannot be written"):
        save_weights(weights, tmp_path / "none" / "out.safetensors")
    with pytest.raises(ModelError, match="no tensor v"):
        save_weights(weights, tmp_path / "out.safetensors", ["v"])
    assert list(tmp_path.iterdir()) == []


def test_writing_leaves_the_umask_of_the_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that other threads make meanwhile would be writable for everybody."""

    def refuse(_mask: int) -> int:
        raise AssertionError("the umask of the whole process was changed")

    monkeypatch.setattr(os, "umask", refuse)
    save_weights(TensorWeights({"w": torch.ones(2)}), tmp_path / "w.safetensors")
    (tmp_path / "plain").touch()
    assert (tmp_path / "w.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


class Lying(TensorWeights):
    """Announces other shapes than it loads."""

    def shape(self, name: str) -> tuple[int, ...]:
        return (3, *super().shape(name)[1:])


def test_an_earlier_file_stays_if_the_new_one_could_not_be_read(tmp_path: Path) -> None:
    save_weights(TensorWeights({"w": torch.ones(2, 2)}), tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=r"w is torch\.float32 \(2, 2\).*\(3, 2\)"):
        save_weights(Lying({"w": torch.zeros(2, 2)}), tmp_path / "w.safetensors")
    assert torch.equal(FileWeights(tmp_path / "w.safetensors").load("w"), torch.ones(2, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The weights of a model of three classes, which say so."""
    model = load_model(f"{VIT},num_classes=3")
    save_weights(model.weights, tmp_path / "three.safetensors", metadata=write_classes(NAMES))
    return tmp_path / "three.safetensors"


def test_class_names_set_the_number_of_classes(weights: Path) -> None:
    for name in (VIT, f"{VIT},num_classes=3"):
        found = load_model(name, weights=weights, whole=True)
        assert found.name == name
        assert found.class_names == NAMES
        assert found.module(found.example_args[0]).shape == (2, 3)
    with pytest.raises(ModelError) as caught:
        load_model(f"{VIT},num_classes=10", weights=weights)
    assert "num_classes" in str(caught.value)


def test_class_names_work_for_hugging_face_models(tmp_path: Path) -> None:
    options = "image_size=8,patch_size=4,hidden_size=8,num_hidden_layers=1,num_attention_heads=2,intermediate_size=8"
    name = f"hf:vit,{options}"
    model = load_model(f"{name},num_labels=3", head="images")
    save_weights(model.weights, tmp_path / "w.safetensors", metadata=write_classes(NAMES))
    found = load_model(name, weights=tmp_path / "w.safetensors", head="images", whole=True)
    assert found.class_names == NAMES
    assert found.module(**found.example_kwargs).logits.shape == (2, 3)


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}', '["' + "x" * 2000 + '"]', "null"])
def test_invalid_class_names_are_refused(text: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "w.safetensors", metadata={"penstock.classes": text})
    with pytest.raises(ModelError):
        read_classes(FileWeights(tmp_path / "w.safetensors").metadata)


def test_model_without_classes_has_no_metadata() -> None:
    assert write_classes(None) == write_classes(()) == {}
    assert read_classes({}) is None
    assert with_classes("tests.models:gpt2", 3) == "tests.models:gpt2"


def test_training_keeps_the_order_of_class_names(tmp_path: Path) -> None:
    digits = open_images("digits")
    other_way_round = tuple(reversed(digits.classes))
    model = load_model(f"{VIT},num_classes=10")
    save_weights(model.weights, tmp_path / "w.safetensors", metadata=write_classes(other_way_round))
    settings = FitSettings(model=VIT, data="digits", num_rows=30, output=str(tmp_path))
    assert json.loads(make_task(settings).metadata["penstock.classes"]) == list(digits.classes)
    task = make_task(settings.replace(weights=str(tmp_path / "w.safetensors")))
    assert json.loads(task.metadata["penstock.classes"]) == list(other_way_round)
    plain = make_task(settings)
    for row in range(5):
        assert task.training[row][1] == 9 - plain.training[row][1]
    assert load_file(tmp_path / "w.safetensors").keys() == set(task.weights.names())
    assert classes_of(model, digits) == digits.classes
