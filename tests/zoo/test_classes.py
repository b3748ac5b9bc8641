"""Weights that say which classes they tell apart."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import ModelError
from penstock.recipes.data_formats import make_task
from penstock.recipes.data_tasks import classes_of
from penstock.recipes.settings import FitSettings
from penstock.zoo.data.image_names import open_images
from penstock.zoo.models.models import load_model
from penstock.zoo.models.names import with_classes
from penstock.zoo.weights.classes import read_classes, write_classes
from penstock.zoo.weights.weight_files import FileWeights, save_weights

VIT = "timm:vit_tiny_patch16_224,img_size=8,patch_size=4,depth=1,embed_dim=24,num_heads=3"
NAMES = ("ship", "frog", "truck")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The weights of a model of three classes, which say so."""
    model = load_model(f"{VIT},num_classes=3")
    save_weights(model.weights, tmp_path / "three.safetensors", metadata=write_classes(NAMES))
    return tmp_path / "three.safetensors"


def test_they_decide_how_many_classes_a_model_has(weights: Path) -> None:
    for name in (VIT, f"{VIT},num_classes=3"):
        found = load_model(name, weights=weights, whole=True)
        assert found.name == name
        assert found.class_names == NAMES
        assert found.module(found.example_args[0]).shape == (2, 3)
    with pytest.raises(ModelError) as caught:
        load_model(f"{VIT},num_classes=10", weights=weights)
    assert "num_classes" in str(caught.value)


def test_of_hugging_face_too(tmp_path: Path) -> None:
    options = "image_size=8,patch_size=4,hidden_size=8,num_hidden_layers=1,num_attention_heads=2,intermediate_size=8"
    name = f"hf:vit,{options}"
    model = load_model(f"{name},num_labels=3", head="images")
    save_weights(model.weights, tmp_path / "w.safetensors", metadata=write_classes(NAMES))
    found = load_model(name, weights=tmp_path / "w.safetensors", head="images", whole=True)
    assert found.class_names == NAMES
    assert found.module(**found.example_kwargs).logits.shape == (2, 3)


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}', '["' + "x" * 2000 + '"]', "null"])
def test_what_is_no_list_of_names(text: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "w.safetensors", metadata={"penstock.classes": text})
    with pytest.raises(ModelError):
        read_classes(FileWeights(tmp_path / "w.safetensors").metadata)


def test_nothing_is_said_of_no_classes() -> None:
    assert write_classes(None) == write_classes(()) == {}
    assert read_classes({}) is None
    assert with_classes("tests.models:gpt2", 3) == "tests.models:gpt2"


def test_training_writes_them_and_goes_on_in_their_order(tmp_path: Path) -> None:
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
