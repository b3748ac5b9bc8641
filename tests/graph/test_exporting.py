"""Attention on PyTorch's fast path is reported when it is captured; what older versions of PyTorch lack."""

from collections.abc import Callable, Iterator

import pytest
import sympy
import torch
from torch import nn
from torch.utils._sympy.functions import Max, Min, MinMaxBase

from penstock.graph.capture import capture
from penstock.graph.exporting import fast_layers, ordered_multiples
from tests.fewer import first


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.backends.mha.set_fastpath_enabled(True)


FAST: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
    "within": lambda: nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)),
}
SLOW: dict[str, Callable[[], nn.Module]] = {
    "sequence first": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "odd heads": lambda: nn.TransformerEncoderLayer(9, 3, 16, batch_first=True),
    "activation": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation=torch.tanh),
    "training": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).train(),
}


@pytest.mark.parametrize("case", first(1, [*FAST]))
def test_a_capture_names_the_fast_path(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = FAST[case]().eval()
    capture(model, (torch.randn(3, 5, 8),))
    assert "set_fastpath_enabled(False)" in capsys.readouterr().err
    torch.backends.mha.set_fastpath_enabled(False)
    capture(model, (torch.randn(3, 5, 8),))
    assert "fastpath" not in capsys.readouterr().err


@pytest.mark.parametrize("case", SLOW)
def test_layers_without_fast_path_are_not_listed(case: str) -> None:
    model = SLOW[case]()
    assert fast_layers(model if case == "training" else model.eval()) == []


def test_attention_alone_has_a_fast_path() -> None:
    assert fast_layers(nn.MultiheadAttention(8, 2, batch_first=True).eval()) == ["MultiheadAttention"]


def test_the_smaller_of_two_multiples_is_known_within_the_context() -> None:
    size, any_number = sympy.Symbol("size", positive=True, integer=True), sympy.Symbol("any_number", integer=True)
    before = vars(MinMaxBase)["_collapse_arguments"].__func__
    with ordered_multiples():
        assert (Min(12 * size, 24 * size), Max(12 * size, 24 * size)) == (12 * size, 24 * size)
        assert Min(12 * any_number, 24 * any_number) not in {12 * any_number, 24 * any_number}
        assert Min(12 * size, any_number).args
    assert vars(MinMaxBase)["_collapse_arguments"].__func__ is before
