"""The name of a model to the model: functions and what is common to all sources; how names are written."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import DataError, ModelError
from penstock.text import nearest, one_line
from penstock.zoo.models.models import load_model, parse_name
from penstock.zoo.optional import optional_import

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.ones(2), persistent=False)
    def forward(self, x, scale=1):
        return self.norm(self.fc(x)) * self.table * scale

def bare():
    return Net()
def with_args():
    return Net(), (torch.ones(4, 3),)
def with_kwargs():
    return Net(), [torch.ones(4, 3)], {"scale": 2}
def wide(width=2, name="none"):
    return nn.Linear(3, width), (torch.ones(4, 3),), {}
def number():
    return 3
def wrong_args():
    return Net(), 3
def fails():
    raise KeyError("what")
not_a_function = 3
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("import nosuchthing")
    (tmp_path / "bad.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_function_gives_a_module_with_its_own_values(source: str) -> None:
    model = load_model(f"{source}:with_args")
    assert {parameter.device.type for parameter in model.module.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.module.buffers()} == {"cpu"}
    assert not model.module.training
    assert [tuple(arg.shape) for arg in model.example_args] == [(4, 3)]
    assert (model.example_kwargs, model.task, model.transform, model.class_names) == ({}, "other", None, None)
    assert sorted(model.weights.names()) == [
        "fc.bias", "fc.weight", "norm.bias", "norm.num_batches_tracked", "norm.running_mean",
        "norm.running_var", "norm.weight", "table",
    ]  # fmt: skip
    again = load_model(f"{source}:with_args")
    assert torch.equal(model.weights.load("fc.weight"), again.weights.load("fc.weight"))
    other = load_model(f"{source}:with_args", seed=1)
    assert not torch.equal(model.weights.load("fc.weight"), other.weights.load("fc.weight"))


def test_a_function_may_give_keyword_arguments_or_none(source: str) -> None:
    model = load_model(f"{source}:with_kwargs", whole=True)
    assert model.example_kwargs == {"scale": 2}
    assert model.module(*model.example_args, **model.example_kwargs).shape == (4, 2)
    assert load_model(f"{source}:bare").example_args == ()


def test_options_are_keyword_arguments_of_a_function(source: str) -> None:
    assert load_model(f"{source}:wide,width=5,name=x").weights.shape("weight") == (5, 3)
    assert load_model(f"{source}:wide").weights.shape("weight") == (2, 3)


def test_a_file_serves_parameters_and_persistent_buffers(source: str, tmp_path: Path) -> None:
    state = {
        "fc.weight": torch.full((2, 3), 2.0, dtype=torch.float64),
        "fc.bias": torch.zeros(2),
        "norm.weight": torch.ones(2),
        "norm.bias": torch.ones(2),
        "norm.running_mean": torch.full((2,), 5.0),
        "norm.running_var": torch.ones(2),
    }
    save_file(state, tmp_path / "w.safetensors")
    model = load_model(f"{source}:with_args", weights=tmp_path / "w.safetensors", whole=True)
    assert model.module.get_buffer("norm.running_mean").tolist() == [5.0, 5.0]
    assert model.module.get_parameter("fc.weight").dtype == torch.float32
    assert model.module(torch.ones(1, 3)).tolist() == [pytest.approx([2.0, 2.0], abs=1e-4)]
    del state["norm.running_mean"]
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=r"lack norm\.running_mean"):
        load_model(f"{source}:bare", weights=tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}:wiht_args", r"function wiht_args not found in .*; did you mean with_args"),
        ("{}:not_a_function", "function not_a_function not found in "),
        ("{}:number", "returned int; it must return a module"),
        ("{}:wrong_args", r"returned \(Net, int\); it must return"),
        ("{}:fails", r"failed \(KeyError: 'what'\)"),
        ("{}:wide,depth=5", r"wide,depth=5 failed \(TypeError: .*'depth'"),
        ("{}:wide,width", "an option of a model must be key=value"),
        ("nosuchmodule:f", "module nosuchmodule not found in "),
        ("broken:f", r"broken cannot be imported \(No module named 'nosuchthing'\)"),
        ("bad:f", r"bad cannot be imported \(ZeroDivisionError: division by zero\)"),
    ],
)
def test_faulty_model_function_is_one_line(source: str, name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_model(name.format(source))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["resnet18", "timm:", ":f", ""])
def test_model_name_needs_a_source(name: str) -> None:
    with pytest.raises(ModelError, match=r"timm:NAME, hf:NAME_OR_PATH, gguf:FILE or package"):
        load_model(name)


def test_weights_come_from_one_place(source: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="give either --weights or --pretrained"):
        load_model("timm:resnet18", weights=tmp_path, pretrained=True)
    with pytest.raises(ModelError, match="has no published checkpoint"):
        load_model(f"{source}:bare", pretrained=True)


def test_nearest_names() -> None:
    assert nearest("resnet19", ["resnet18", "vit"]) == "; did you mean resnet18?"
    assert nearest("zzz", ["resnet18"]) == ""


def test_options_are_read_by_kind() -> None:
    assert parse_name("vit,depth=2,rate=1e-1,flag=True,act=gelu,none=none") == (
        "vit",
        {"depth": 2, "rate": 0.1, "flag": True, "act": "gelu", "none": None},
    )
    assert parse_name("vit") == ("vit", {})


@pytest.mark.parametrize("text", ["vit,depth", "vit,=2", "vit,a=1,a=2", "vit,a b=1", "vit,"])
def test_a_strange_option_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="key=value"):
        parse_name(text)


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModelError, match=r"penstock\[vision\]"):
        optional_import("timm.data", "vision")
    with pytest.raises(DataError, match=r"^nosuchlibrary is not installed"):
        optional_import("nosuchlibrary", "data", DataError)


def test_one_line_shortens_an_error() -> None:
    assert one_line(ValueError("a\n b")) == "a b"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 999), 50)) == 50


@pytest.mark.fresh
def test_zoo_imports_no_optional_library() -> None:
    code = (
        "import sys, penstock.zoo\n"
        "optional = ('timm', 'transformers', 'torchvision', 'PIL', 'sklearn')\n"
        "print([name for name in optional if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"
