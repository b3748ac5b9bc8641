"""How models are written, and what is said about wrong names."""

import subprocess
import sys

import pytest

from penstock.errors import DataError, ModelError
from penstock.text import nearest, one_line
from penstock.zoo.models.names import parse_name
from penstock.zoo.optional import optional_import


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
