"""Models of timm by name."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from penstock.errors import ModelError
from penstock.zoo.models.models import load_model

timm = pytest.importorskip("timm")
TINY = "timm:vit_tiny_patch16_224,depth=2,num_classes=10,img_size=32"


def tiny(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"depth": 2, "num_classes": 10, "img_size": 32, **options}
    return timm.create_model("vit_tiny_patch16_224", **sizes).eval()


def test_a_model_has_meta_parameters_and_all_that_belongs_to_it() -> None:
    model = load_model(TINY)
    assert {parameter.device.type for parameter in model.module.parameters()} == {"meta"}
    assert not model.module.training
    assert [tuple(arg.shape) for arg in model.example_args] == [(2, 3, 32, 32)]
    assert (model.task, model.class_names, model.example_kwargs) == ("image", None, {})
    assert model.weights.shape("head.weight") == (10, 192)
    assert model.transform is not None
    assert model.transform(Image.new("RGB", (50, 40))).shape == (3, 32, 32)


def test_class_names_come_with_the_classes_of_the_checkpoint() -> None:
    names = load_model("timm:test_vit").class_names
    assert names is not None
    assert (len(names), names[0]) == (1000, "tench, Tinca tinca")


def test_whole_models_of_one_seed_are_equal_and_others_are_not() -> None:
    first, same, other = (load_model(TINY, seed=seed, whole=True) for seed in (0, 0, 1))
    with torch.no_grad():
        outputs = [model.module(*first.example_args) for model in (first, same, other)]
    assert torch.isfinite(outputs[0]).all()
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    for name, parameter in first.module.named_parameters():
        assert torch.equal(parameter, load_model(TINY).weights.load(name)) if "head" in name else True


def test_buffers_are_real() -> None:
    model = load_model("timm:test_resnet")
    assert {buffer.device.type for buffer in model.module.buffers()} == {"cpu"}
    grey = load_model("timm:test_vit,in_chans=1")
    assert grey.example_args[0].shape == (2, 1, 160, 160)
    assert grey.transform is not None
    assert grey.transform(Image.new("RGB", (50, 40))).shape == (1, 160, 160)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "test_resnet"])
def test_a_checkpoint_of_the_models_own_names(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    source = timm.create_model(name, num_classes=7).eval()
    for buffer in source.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    model = load_model(f"timm:{name},num_classes=7", weights=tmp_path / "w.safetensors", whole=True)
    with torch.no_grad():
        assert torch.equal(model.module(*model.example_args), source(*model.example_args))


def test_a_checkpoint_that_timm_maps(tmp_path: Path) -> None:
    # a DINO-like layout: no head, other names, and a position embedding of another size
    source = tiny(img_size=64)
    state = {f"module.{key}": value for key, value in source.state_dict().items()}
    save_file(
        {"model." + key.removeprefix("module."): value for key, value in state.items()}, tmp_path / "w.safetensors"
    )
    with pytest.raises(ModelError, match=r"w\.safetensors .*timm:vit_tiny_patch16_224: .*lack"):
        load_model(TINY, weights=tmp_path / "w.safetensors")
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    model = load_model(TINY, weights=tmp_path / "w.safetensors")
    expected = timm.models.vision_transformer.checkpoint_filter_fn(source.state_dict(), tiny())
    assert model.weights.shape("pos_embed") == (1, 5, 192)
    assert torch.equal(model.weights.load("pos_embed"), expected["pos_embed"])
    assert torch.equal(model.weights.load("blocks.1.mlp.fc1.weight"), source.blocks[1].mlp.fc1.weight)


def test_a_checkpoint_in_its_original_names(tmp_path: Path) -> None:
    source = timm.create_model("convnext_atto", num_classes=3).eval()
    changed = {}
    for key, value in source.state_dict().items():
        key = key.replace("stem.", "downsample_layers.0.").replace("stages.0.blocks.", "stages.0.")
        key = key.replace("conv_dw", "dwconv").replace("mlp.fc1", "pwconv1").replace("mlp.fc2", "pwconv2")
        changed[key.replace("head.fc", "head").replace("head.norm", "norm")] = value
    for stage in (1, 2, 3):
        changed = {
            key.replace(f"stages.{stage}.blocks.", f"stages.{stage}.").replace(
                f"stages.{stage}.downsample.", f"downsample_layers.{stage}."
            ): value
            for key, value in changed.items()
        }
    save_file(changed, tmp_path / "w.safetensors")
    model = load_model("timm:convnext_atto,num_classes=3", weights=tmp_path / "w.safetensors")
    for name, parameter in source.named_parameters():
        assert torch.equal(model.weights.load(name), parameter)


def test_wrong_names_and_options_are_one_line() -> None:
    with pytest.raises(
        ModelError, match=r"^model vit_tiny_patch16_225 not found in timm; did you mean vit_tiny_patch16_224"
    ):
        load_model("timm:vit_tiny_patch16_225")
    with pytest.raises(ModelError, match=r"vit_tiny_patch16_224 .*'dept'"):
        load_model("timm:vit_tiny_patch16_224,dept=2")


@pytest.mark.parametrize(
    "option", ["checkpoint_path=weights.pth", "pretrained=true", "cache_dir=/", "pretrained_cfg=x"]
)
def test_model_name_reads_no_files(option: str) -> None:
    """A plan may carry the name, and timm reads pickles."""
    with pytest.raises(ModelError, match=r"--weights or --pretrained; got \w+"):
        load_model(f"timm:resnet18,{option}")


def test_a_fetched_checkpoint_is_used(tmp_path: Path, serve_hub: Callable[[Path], list[str]]) -> None:
    torch.save({"state_dict": tiny(num_classes=1000).state_dict()}, tmp_path / "pytorch_model.bin")
    serve_hub(tmp_path)
    with pytest.raises(ModelError, match=r"float32\[1000, 192\] in the weights"):
        load_model(TINY, pretrained=True)
    model = load_model(TINY.replace("10", "1000"), pretrained=True)
    assert torch.equal(model.weights.load("head.weight"), tiny(num_classes=1000).head.weight)


def test_timm_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModelError, match=r"^timm is not installed; pip install 'penstock\[vision\]'$"):
        load_model(TINY)
