"""Shared keys and values are read without a copy for each head, with the same bits; norms are not cut."""

from collections import Counter

import pytest
import torch

from penstock.generate.cached_decoder import CachedDecoder
from penstock.graph import translate
from penstock.graph.capture import capture
from penstock.graph.cuts import divide
from penstock.graph.graph import Graph
from penstock.runtime.eager import Runtime
from tests.fewer import long
from tests.generate.decoders import decoder, tensors_of


@torch.no_grad()
@pytest.mark.parametrize(("family", "groups"), [("llama", True), long("mistral", True), ("gpt2", False)])
def test_shared_heads_change_no_bits(family: str, groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CachedDecoder(decoder(family), slots=2, length=64).eval()

    def captured() -> Graph:
        return capture(model, (), model.example(2, 32), dynamic=model.dynamic, largest=model.largest)

    shared = captured()
    monkeypatch.setattr(translate, "share_heads", lambda graph: graph)
    plain = captured()
    counts = [Counter(op.target for op in graph.ops)["aten.expand.default"] for graph in (plain, shared)]
    assert (counts[0] - counts[1] >= 2 * 3) == groups  # keys and values of three layers
    ids, positions = torch.arange(14).view(2, 7) + 3, torch.arange(7).expand(2, 7).contiguous()
    found = []
    for graph in (plain, shared):
        (program,) = divide(graph, [])
        runtime = Runtime(program, tensors_of(graph, model))
        sizes = {"batch": 2, "step": 7, "wanted": 1, "room": 64}
        found += runtime(sizes, [ids, positions, torch.arange(2), torch.tensor([6]), torch.arange(64)])
    assert torch.equal(*found)


def test_no_cut_inside_a_norm() -> None:
    model = CachedDecoder(decoder("gemma"), slots=2, length=64).eval()
    graph = capture(model, (), model.example(2, 32), dynamic=model.dynamic, largest=model.largest)
    kinds = [op.target.split(".")[1] for op in graph.ops]
    norms = [index for index, kind in enumerate(kinds) if kind == "rsqrt"]
    assert len(norms) == 2 * 3 + 1
    for norm in norms:
        begin = norm - kinds[norm::-1].index("pow")
        end = norm + [i for i, kind in enumerate(kinds[norm:]) if kind == "mul"][1]
        assert not set(graph.allowed) & set(range(begin + 1, end + 1))
        assert {begin, end + 1} & set(graph.allowed)
