"""Attention is captured whole, so that torch chooses its kernel where a stage runs."""

from typing import Any

import pytest
import torch

from penstock.generate.cached_decoder import CachedDecoder
from penstock.graph.capture import capture
from penstock.graph.graph import Graph
from tests.fewer import first, long
from tests.generate.decoders import decoder
from tests.models import albert, bert, deit, gpt2, llama

_ATTENTION = "aten.scaled_dot_product_attention.default"
MODELS: dict[str, Any] = {"deit": lambda: deit(2), "gpt2": gpt2, "bert": bert, "llama": llama, "albert": albert}


def attentions(graph: Graph) -> int:
    assert not [op for op in graph.ops if "softmax" in op.target]
    return sum(op.target == _ATTENTION for op in graph.ops)


@pytest.mark.parametrize("trains", [False, long(True)])
@pytest.mark.parametrize("name", first(1, list(MODELS)))
def test_attention_of_a_model(name: str, trains: bool) -> None:
    model: Any = MODELS[name]().train(trains)
    layers = 2 if name == "deit" else model.config.num_hidden_layers
    example = torch.randn(2, 3, 32, 32) if name == "deit" else torch.randint(3, 80, (2, 9))
    assert attentions(capture(model, (example,))) == layers


@pytest.mark.parametrize("name", first(1, ["llama", "gpt2", "gemma3"]))
def test_attention_of_a_decoder_with_caches(name: str) -> None:
    model = decoder(name)
    cached = CachedDecoder(model, slots=2, length=64).eval()
    graph = capture(cached, (), cached.example(2, 8), dynamic=cached.dynamic, largest=cached.largest)
    assert attentions(graph) == model.config.get_text_config().num_hidden_layers
