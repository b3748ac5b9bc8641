"""Classifiers of the user's own, and of torchvision, with what they need to take pictures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file

from penstock.errors import DataError, ModelError
from penstock.zoo.models.models import classes_in, load_model, with_classes
from tests.fewer import long

SOURCE = """
import timm, torch, transformers
from torch import nn
from torchvision import transforms

class Net(nn.Module):
    def __init__(self, num_classes=3, channels=3):
        super().__init__()
        self.head = nn.Linear(channels * 16, num_classes)
    def forward(self, images):
        return self.head(images.flatten(1))

prepare = transforms.Compose([transforms.Resize((4, 4)), transforms.ToTensor()])

def whole(num_classes=3):
    return {"module": Net(num_classes), "example": torch.zeros(1, 3, 4, 4), "transform": prepare,
            "class_names": ["ant", "bee", "cow"]}
def without_example():
    return {"module": Net(), "transform": prepare}
def bare():
    return Net()
def of_timm():
    return timm.create_model("resnet10t", num_classes=3)
def of_transformers():
    config = transformers.ViTConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, image_size=32,
                                    intermediate_size=12, id2label={0: "a", 1: "b", 2: "c"})
    return transformers.ViTForImageClassification(config)
def of_torchvision():
    import torchvision
    return torchvision.models.resnet18(num_classes=3)
def failing():
    def transform(image):
        raise OSError("no disk")
    return {"module": Net(), "example": torch.zeros(1, 3, 4, 4), "transform": transform}
def other_size():
    return {"module": Net(), "example": torch.zeros(1, 3, 8, 8), "transform": prepare}
def two_names():
    return {"module": Net(), "transform": prepare, "class_names": ["a", "b"]}
def part(part, value="text"):
    return {"module": Net(), part: value}
def no_module():
    return {"module": 3}
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"classifiers_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return name


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8))


def test_a_dict_has_all_that_a_classifier_needs(source: str) -> None:
    model = load_model(f"{source}:whole")
    assert not model.is_random  # as far as anybody knows
    assert (model.task, model.num_classes, model.class_names) == ("image", 3, ("ant", "bee", "cow"))
    assert model.pictures()(picture()).shape == (3, 4, 4)
    assert model.example_args[0].shape == (1, 3, 4, 4)


@pytest.mark.parametrize(
    ("name", "preprocess", "shape", "names"),
    [
        ("without_example", None, (3, 4, 4), None),
        ("bare", "size=4,mean=0.5,std=0.5", (3, 4, 4), None),
        ("of_timm", None, (3, 176, 176), None),
        ("of_transformers", None, (3, 32, 32), ("a", "b", "c")),
        ("of_torchvision", "size=64,mean=0.5,std=0.5", (3, 64, 64), None),
    ],
)
def test_function_uses_defaults_of_its_library(
    source: str, name: str, preprocess: str | None, shape: tuple[int, ...], names: Any
) -> None:
    model = load_model(f"{source}:{name}", preprocess=preprocess, whole=True)
    pixels = model.pictures()(picture())
    (example,) = [*model.example_args, *model.example_kwargs.values()]
    assert (pixels.shape, example.shape, model.num_classes, model.class_names) == (shape, (2, *shape), 3, names)
    with torch.no_grad():
        output = model.module(pixels[None])
    assert getattr(output, "logits", output).shape == (1, 3)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", long("vit_b_16"), long("swin_t")])
def test_torchvision_s_own_transforms_and_names(name: str) -> None:
    model = load_model(f"torchvision.models:{name}")
    weights = torchvision.models.get_model_weights(name).DEFAULT
    assert torch.equal(model.pictures()(picture()), weights.transforms()(picture()))
    assert model.class_names == tuple(weights.meta["categories"])
    assert model.is_random
    few = load_model(f"torchvision.models:{name},num_classes=5")
    assert (few.num_classes, few.class_names) == (5, None)
    assert with_classes(f"torchvision.models:{name}", 7) == f"torchvision.models:{name},num_classes=7"


def test_torchvision_s_preparation_can_be_changed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = torchvision.models.ResNet50_Weights.IMAGENET1K_V1.transforms()(picture())
    name = "torchvision.models:resnet50"
    assert torch.equal(load_model(name, preprocess="crop_pct=0.875").pictures()(picture()), first)
    assert capsys.readouterr().err == ""
    assert not torch.equal(load_model(name).pictures()(picture()), first)
    assert "ResNet50_Weights.IMAGENET1K_V2" in capsys.readouterr().err
    small = torchvision.models.squeezenet1_1(num_classes=3)
    save_file(small.state_dict(), tmp_path / "a.safetensors")
    found = load_model("torchvision.models:squeezenet1_1,num_classes=3", weights=tmp_path / "a.safetensors", whole=True)
    assert not found.is_random
    pixels = found.pictures()(picture())[None]
    with torch.no_grad():
        assert torch.equal(found.module(pixels), small.eval()(pixels))


def test_the_option_of_a_function_for_the_number_of_classes(source: str) -> None:
    assert with_classes(f"{source}:whole", 5) == f"{source}:whole,num_classes=5"
    assert with_classes(f"{source}:bare", 5) == f"{source}:bare"
    assert classes_in(f"{source}:whole,num_classes=5") == 5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("part,part=tranform", "part 'tranform'; the parts of a model are module, example, transform, class_names"),
        ("part,part=transform", "transform that .* must be a function from a PIL image to a tensor; got str"),
        ("part,part=class_names,value=3", "class_names that .* must be a list of texts; got int"),
        ("part,part=example,value=3", "example that .* must be a tensor, a tuple"),
        ("no_module", "module that .* must be a torch.nn.Module; got int"),
        ("two_names", "2 class_names for 3 outputs"),
    ],
)
def test_a_wrong_part_is_named(source: str, name: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_model(f"{source}:{name}")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bare", "no transform of images; return a dict with module and transform"),
        ("failing", "cannot be prepared .*no disk"),
        ("other_size", "takes inputs of 3x8x8, but images become 3x4x4"),
    ],
)
def test_missing_image_preparation_is_named(source: str, name: str, said: str) -> None:
    model = load_model(f"{source}:{name}")
    with pytest.raises(ModelError, match=said):
        model.pictures()


def test_a_preparation_that_is_not_used_or_not_whole(source: str) -> None:
    with pytest.raises(ModelError, match="its own transform of images; leave preprocess out"):
        load_model(f"{source}:whole", preprocess="mean=0.5")
    with pytest.raises(ModelError, match="needs size, mean and std"):
        load_model(f"{source}:bare", preprocess="mean=0.5")
    model = load_model(f"{source}:failing")
    assert model.transform is not None
    with pytest.raises(DataError, match="no disk"):  # of one picture, whose row tells it
        model.transform(picture())


def test_classifier_of_the_documentation_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "own-models.md").read_text()
    name = f"page_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)
    model = load_model(f"{name}:classifier")
    assert (model.pictures()(picture()).shape, model.num_classes) == ((3, 224, 224), 3)
    assert load_model(f"{name}:classifier,num_classes=5").class_names is None
