"""Attention that PyTorch computes on its fast path in evaluation is pointed out when it is captured."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from penstock.graph.capture import capture
from penstock.graph.exporting import fast_layers
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
