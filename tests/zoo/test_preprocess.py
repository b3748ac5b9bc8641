"""Pictures become inputs as the model's library makes them, or as the options say."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from torch import Tensor

from penstock.errors import DataError, ModelError
from penstock.zoo.data.preprocess import Preprocess, bounded, read_preprocess
from penstock.zoo.models.models import load_model

VIT = "timm:vit_tiny_patch16_224,depth=1,embed_dim=12,num_heads=2"
HF_VIT = "hf:vit,num_hidden_layers=1,hidden_size=12,num_attention_heads=2,intermediate_size=12,image_size=32"


def picture(width: int = 90, height: int = 70) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width * 3, height * 3))


def prepared(name: str, **options: Any) -> Tensor:
    return load_model(name, **options).pictures()(picture())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mean=0.5", Preprocess(mean=(0.5,))),
        ("mean=0.1,0.2,0.3,size=224x320", Preprocess(mean=(0.1, 0.2, 0.3), size=(224, 320))),
        ("size=96, crop_pct=0.9,crop_mode=squash", Preprocess(size=(96, 96), crop_pct=0.9, crop_mode="squash")),
        (None, Preprocess()),
    ],
)
def test_options_are_read(text: str | None, expected: Preprocess) -> None:
    assert read_preprocess(text) == expected


@pytest.mark.parametrize(
    "text",
    ["0.5", "mean", "mean=a", "mean=0.5,mean=0.4", "std=0", "std=nan", "size=0", "size=2x3x4", "size=-1", "crop_pct=0",
     "crop_pct=1.1", "interpolation=cubic", "crop_mode=resize", "input_size=3", "crop_pct=0.5,0.6"],
)  # fmt: skip
def test_options_that_cannot_be_are_one_line(text: str) -> None:
    with pytest.raises(ModelError, match="preprocess must be") as caught:
        read_preprocess(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", [f"{VIT},img_size=32", "timm:resnet10t", "timm:convnext_atto", "timm:mobilenetv3_small_050"]
)
def test_models_of_one_channel_take_grey_pictures(name: str) -> None:
    grey = prepared(f"{name},in_chans=1")
    whole = load_model(name)
    config = timm.data.resolve_model_data_config(whole.module)
    size = (1, *whole.example_args[0].shape[2:])
    config |= {"input_size": size, **{key: (float(np.mean(config[key])),) for key in ("mean", "std")}}
    assert torch.equal(grey, timm.data.create_transform(**config, is_training=False)(picture().convert("L")))


@pytest.mark.parametrize(
    "name",
    [
        f"{VIT},img_size=32,in_chans=4",
        "timm:resnet10t,in_chans=4",
        "timm:convnext_atto,in_chans=2",
        f"{HF_VIT},num_channels=4",
    ],
)
def test_models_of_other_channels_are_one_line(name: str) -> None:
    model = load_model(name)  # other verbs need no pictures
    with pytest.raises(ModelError, match=r"takes inputs of [24]x.*give a model of 3 channels"):
        model.pictures()


def test_a_model_of_transformers_with_one_channel() -> None:
    found = prepared(f"{HF_VIT},num_channels=1")
    grey = np.asarray(picture().convert("L"))
    expected = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.5], image_std=[0.5], do_convert_rgb=False
    )(Image.fromarray(grey), return_tensors="pt")["pixel_values"][0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("mean=0.1,0.2,0.3,std=0.4", {"mean": (0.1, 0.2, 0.3), "std": (0.4,) * 3}),
        ("size=64x96,crop_pct=0.8", {"input_size": (3, 64, 96), "crop_pct": 0.8}),
        (
            "crop_mode=squash,interpolation=bilinear,crop_pct=1",
            {"crop_mode": "squash", "interpolation": "bilinear", "crop_pct": 1.0},
        ),
    ],
)
def test_options_replace_those_of_timm(text: str, changes: dict[str, Any]) -> None:
    module = timm.create_model("resnet10t")
    config = timm.data.resolve_model_data_config(module) | changes
    expected = timm.data.create_transform(**config, is_training=False)(picture())
    assert torch.equal(prepared("timm:resnet10t", preprocess=text), expected)
    assert load_model("timm:resnet10t", preprocess=text).example_args[0].shape[1:] == expected.shape


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("mean=0.1,0.2,0.3,std=0.4", {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4] * 3}),
        ("interpolation=bicubic", {"resample": Image.Resampling.BICUBIC}),
        (
            "crop_pct=0.5",
            {"size": {"shortest_edge": 64}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}},
        ),
    ],
)
def test_options_replace_those_of_transformers(text: str, arguments: dict[str, Any]) -> None:
    made = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    expected = made(picture(), return_tensors="pt", **arguments)["pixel_values"][0]
    assert torch.equal(prepared(HF_VIT, preprocess=text), expected)


def test_rectangular_sizes() -> None:
    for name, preprocess in (
        (f"{VIT},img_size=32x48", None),
        ("timm:resnet10t", "size=32x48"),
        (HF_VIT.replace("image_size=32", "image_size=32x48"), None),
        ("timm:convnext_atto", "size=32x48,crop_mode=squash"),
    ):
        model = load_model(name, preprocess=preprocess, whole=True)
        pixels = model.pictures()(picture())
        assert pixels.shape == (3, 32, 48)
        with torch.no_grad():
            assert len(model.module(pixels[None])) >= 1
    with pytest.raises(ModelError, match="but images become 3x32x32; give another size"):  # its processor crops squares
        load_model("hf:resnet", preprocess="size=32x48").pictures()
    for name, option in ((f"{VIT},img_size=32", "img_size=32x48"), (HF_VIT, "image_size=32x48")):
        with pytest.raises(ModelError, match=rf"give {option}"):
            load_model(name, preprocess="size=32x48")


def test_a_mean_has_a_number_for_each_channel() -> None:
    for name in ("timm:resnet10t", HF_VIT):
        with pytest.raises(ModelError, match="mean must be one number or 3; got 2"):
            load_model(name, preprocess="mean=0.5,0.5")
    with pytest.raises(ModelError, match="crop_mode=squash"):
        load_model(HF_VIT.replace("image_size=32", "image_size=32x48"), preprocess="crop_pct=0.9")


def test_the_configuration_of_a_directory_is_used(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, image_size=32, num_channels=1
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.2], image_std=[0.3]).save_pretrained(
        tmp_path
    )
    pixels = prepared(f"hf:{tmp_path}")
    assert pixels.shape == (1, 32, 32)
    assert (
        abs(float(pixels.min()) - (float(np.asarray(picture().convert("L").resize((32, 32))).min()) / 255 - 0.2) / 0.3)
        < 1
    )


@pytest.mark.parametrize("size", [(1, 16_000), (30_000, 1), (2, 2000)])
def test_a_narrow_picture_is_refused_before_it_is_resized(size: tuple[int, int]) -> None:
    with pytest.raises(DataError, match=f"{size[0]}x{size[1]}"):
        bounded(lambda image: torch.zeros(image.size), 224, Image.new("RGB", size))
    assert bounded(lambda image: torch.zeros(image.size), 224, Image.new("RGB", (1, 300))).shape == (1, 300)
