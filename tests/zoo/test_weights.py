"""Sources of tensors: modules, several sources, and whether they fit."""

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.zoo.models.meta import meta_parameters
from penstock.zoo.weights.fit import check_weights
from penstock.zoo.weights.weights import JoinedWeights, ModuleWeights, RandomWeights, TensorWeights

F32 = torch.float32


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([2.0]), persistent=False)


def test_module_weights_have_every_name() -> None:
    weights = ModuleWeights(Tied())
    assert sorted(weights.names()) == ["embed.weight", "head.weight", "scale"]
    assert weights.load("head.weight").data_ptr() == weights.load("embed.weight").data_ptr()
    assert weights.shape("head.weight") == (5, 4)
    assert not weights.load("head.weight").requires_grad


def test_a_meta_parameter_has_no_values_to_load() -> None:
    with meta_parameters():
        module = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"^the tensor weight has a shape but no values"):
        ModuleWeights(module).load("weight")


def test_a_missing_tensor_is_named_with_the_nearest() -> None:
    for weights in (
        ModuleWeights(nn.Linear(2, 2)),
        RandomWeights(nn.Linear(2, 2, device="meta"), lambda: nn.Linear(2, 2)),
        JoinedWeights(ModuleWeights(nn.Linear(2, 2))),
        check_weights(ModuleWeights(nn.Linear(2, 2)), {"weight": ((2, 2), F32)}),
    ):
        with pytest.raises(ModelError, match=r"no tensor wieght; did you mean weight\?$"):
            weights.load("wieght")


def test_joined_weights_prefer_the_first() -> None:
    first = TensorWeights({"a": torch.tensor([1.0])})
    both = JoinedWeights(first, TensorWeights({"a": torch.tensor([2.0]), "b": torch.tensor([3.0])}))
    assert [both.load(name).item() for name in ("a", "b")] == [1.0, 3.0]
    assert both.shape("b") == (1,)
    assert both.dtype("b") == F32


def test_check_converts_floats_and_leaves_out_the_rest() -> None:
    source = TensorWeights({"w": torch.ones(2, dtype=torch.float16), "extra": torch.ones(1)})
    checked = check_weights(source, {"w": ((2,), F32)})
    assert list(checked.names()) == ["w"]
    assert checked.dtype("w") == F32
    assert checked.load("w").dtype == F32
    assert checked.shape("w") == (2,)


def test_check_serves_tied_names_from_one() -> None:
    expected = {"embed": ((2,), F32), "head": ((2,), F32)}
    for present in ("embed", "head"):
        checked = check_weights(TensorWeights({present: torch.ones(2)}), expected, {"head": "embed"})
        assert torch.equal(checked.load("head"), checked.load("embed"))


def test_check_ignores_optional_names() -> None:
    source = TensorWeights({"w": torch.ones(2), "index": torch.zeros(3, dtype=torch.int64)})
    expected = {"w": ((2,), F32), "index": ((4,), torch.int64), "count": ((), torch.int64)}
    assert list(check_weights(source, expected, optional=["index", "count"]).names()) == ["w"]


def test_check_names_what_is_missing() -> None:
    expected = {f"blocks.{index}.weight": ((2,), F32) for index in range(5)}
    with pytest.raises(ModelError) as caught:
        check_weights(TensorWeights({"block.0.weight": torch.ones(2)}), expected)
    assert str(caught.value) == (
        "the weights lack blocks.0.weight, blocks.1.weight, blocks.2.weight and 2 more of 5 tensors of the "
        "model; did you mean block.0.weight?"
    )


def test_names_of_other_depth_are_not_suggested() -> None:
    expected = {f"blocks.{index}.weight": ((2,), F32) for index in range(5)}
    with pytest.raises(ModelError, match=r"blocks\.2\.weight.*options"):
        check_weights(TensorWeights({f"blocks.{index}.weight": torch.ones(2) for index in range(2)}), expected)


def test_check_names_wrong_shapes_and_kinds() -> None:
    source = TensorWeights({"a": torch.ones(2, 3), "b": torch.ones(2, dtype=torch.int64)})
    with pytest.raises(ModelError) as caught:
        check_weights(source, {"a": ((3, 2), F32), "b": ((2,), F32)})
    assert str(caught.value) == (
        "the weights do not fit the model: a (float32[2, 3] in the weights, float32[3, 2] in the model), "
        "b (int64[2] in the weights, float32[2] in the model); "
        "give the model the options that the weights were made with"
    )
