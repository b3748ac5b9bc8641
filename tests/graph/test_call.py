import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.graph.call import bind_inputs, build_output, read_sizes
from penstock.graph.capture import capture
from penstock.graph.graph import Graph
from penstock.values import Size, Value


class Model(nn.Module):
    def forward(self, x: Tensor, *, ids: Tensor, scale: float = 2.0, mask: Tensor | None = None) -> Any:
        y = x * scale + ids.unsqueeze(1)
        return {"y": y, "size": x.shape[0] + 1, "none": mask, "pair": (y, x)}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(Model(), (torch.randn(3, 4),), {"ids": torch.arange(3), "scale": 3.0, "mask": None})


def test_a_call_is_flattened_in_the_order_of_the_capture(graph: Graph) -> None:
    x, ids = torch.randn(5, 4), torch.arange(5)
    for keywords in ({"ids": ids, "scale": 3.0, "mask": None}, {"mask": None, "scale": 3.0, "ids": ids}):
        tensors, sizes = bind_inputs(graph, (x,), keywords)
        assert tensors[0] is x
        assert tensors[1] is ids
        assert sizes == {"batch": 5}


def test_results_get_their_structure_back(graph: Graph) -> None:
    y, x = torch.randn(5, 4), torch.randn(5, 4)
    result = build_output(graph, [y, x], {"batch": 5})
    assert list(result) == ["y", "size", "none", "pair"]
    assert result["y"] is result["pair"][0] is y
    assert result["pair"][1] is x
    assert (result["size"], result["none"]) == (6, None)


@pytest.mark.parametrize(
    ("args", "changes", "message"),
    [
        ((torch.ones(5, 4),), {"scale": 2.0},
         "Model was captured with scale=3.0 but called with 2.0; capture it again with the value that you want"),
        ((torch.ones(5, 4),), {"scale": 3},
         "Model was captured with scale=3.0 but called with 3; capture it again with the value that you want"),
        ((torch.ones(5, 4),), {"mask": torch.ones(5)},
         "Model was captured with mask=None but called with float32 [5]; "
         "capture it again with the value that you want"),
        ((torch.ones(5, 4),), {"ids": torch.arange(4)}, "the input 'ids' must be int64 [batch]; got int64 [4]"),
        ((torch.ones(5, 7),), {}, "the input 'x' must be float32 [batch, 4]; got float32 [5, 7]"),
        ((torch.ones(5, 4).double(),), {}, "the input 'x' must be float32 [batch, 4]; got float64 [5, 4]"),
        ((torch.ones(5),), {}, "the input 'x' must be float32 [batch, 4]; got float32 [5]"),
        ((7,), {}, "the input 'x' must be float32 [batch, 4]; got 7"),
        ((), {}, "Model was captured with 1 positional inputs and ids, scale, mask but called with "
                 "0 positional inputs and ids, scale, mask; call it as in the example"),
    ],
)  # fmt: skip
def test_calls_unlike_the_example(graph: Graph, args: tuple[Any, ...], changes: dict[str, Any], message: str) -> None:
    keywords = {"ids": torch.arange(5), "scale": 3.0, "mask": None} | changes
    with pytest.raises(UsageError) as caught:
        bind_inputs(graph, args, keywords)
    assert str(caught.value) == message


def test_sizes_are_read_from_shapes() -> None:
    values = [
        Value("a", torch.float32, (Size(("*", 197, "batch")), 4)),
        Value("b", torch.float32, (Size(("+", "batch", "sequence")), 4)),
        Value("c", torch.float32, (Size("sequence"),)),
    ]
    tensors = [torch.ones(197 * 3, 4), torch.ones(10, 4), torch.ones(7)]
    assert read_sizes(("batch", "sequence"), values, tensors) == {"batch": 3, "sequence": 7}
    assert read_sizes(("batch",), [], []) == {"batch": 1}


def test_tensors_that_do_not_fit_a_stage() -> None:
    value = Value("a", torch.float32, (Size(("*", 197, "batch")), 4))
    with pytest.raises(UsageError, match=r"^the input 'a' must be float32 \[197\*batch, 4\]; got float32 \[198, 4\]$"):
        read_sizes(("batch",), [value], [torch.ones(198, 4)])
    with pytest.raises(UsageError, match=r"^expected 1 input tensors, got 2$"):
        read_sizes(("batch",), [value], [torch.ones(197, 4)] * 2)


def test_tokens_of_another_length_are_told_of_dynamic() -> None:
    ids = Value("input_ids", torch.int64, (Size("batch"), 32))
    with pytest.raises(UsageError) as caught:
        read_sizes(("batch",), [ids], [torch.zeros(2, 20, dtype=torch.long)])
    assert str(caught.value) == (
        "the input 'input_ids' must be int64 [batch, 32]; got int64 [2, 20]; if that varies, capture it with "
        'dynamic={"length": {"input_ids": 1}}'
    )


class Tokens(nn.Module):
    """Takes tokens with their mask and labels, as a model of Hugging Face's, and a size that does not vary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, features: Tensor) -> Tensor:
        found: Tensor = self.table(input_ids) * attention_mask[..., None] + features[:, None, :4]
        return found


def test_the_advice_for_another_length_works_when_it_is_followed() -> None:
    def given(length: int) -> dict[str, Tensor]:
        ids = torch.ones(2, length, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": ids, "features": torch.ones(2, 6)}

    with pytest.raises(UsageError) as raised:
        bind_inputs(capture(Tokens().eval(), (), given(6)), (), given(9))
    advice = json.loads(str(raised.value).split("dynamic=")[1])
    assert advice == {"length": {"input_ids": 1, "attention_mask": 1}}
    _, sizes = bind_inputs(capture(Tokens().eval(), (), given(6), dynamic=advice), (), given(9))
    assert sizes == {"batch": 2, "length": 9}
