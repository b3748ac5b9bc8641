"""The precision bfloat16 of the eager runtime."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import PlanError, UsageError
from penstock.runtime import bfloat16
from penstock.runtime.bfloat16 import Bfloat16Runtime, read_by_products
from penstock.runtime.registry import RuntimeChoice
from tests.runtime.test_onnx import parts


class Model(nn.Module):
    """One weight that products alone read, one that others read too, and attention with a mask."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.register_buffer("mask", torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -3.4e38))

    def forward(self, x: Tensor) -> Tensor:
        h = self.tied(self.first(x)) * self.tied.weight.sum()
        return functional.scaled_dot_product_attention(h, h, h, attn_mask=self.mask)


@pytest.fixture(autouse=True)
def _any_processor(set_bfloat16: Callable[[bool], None]) -> None:
    set_bfloat16(True)


def test_products_are_rounded_and_the_rest_is_not() -> None:
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(2, 4, 8)
    program, tensors = parts(model, x)
    names = {state.value.name: state.source for state in program.states}
    assert {names[name] for name in read_by_products(program)} == {"first.weight", "first.bias"}
    runtime = Bfloat16Runtime(program, tensors)
    (found,) = runtime({"batch": 2}, [x])
    assert runtime.weight_bytes < sum(tensor.nbytes for tensor in tensors.values())

    def rounded(*given: Tensor) -> list[Tensor]:
        return [tensor.bfloat16() for tensor in given]

    with torch.no_grad():
        h = functional.linear(*rounded(x, model.first.weight, model.first.bias)).float()
        h = functional.linear(*rounded(h, model.tied.weight)).float() * model.tied.weight.sum()
        wanted = functional.scaled_dot_product_attention(h, h, h, attn_mask=model.mask)
    assert torch.equal(found, wanted)
    assert torch.equal(runtime.copied()({"batch": 2}, [x])[0], wanted)


def test_a_tied_weight_is_rounded_once_and_not_if_it_is_written_to() -> None:
    class Written(nn.Module):
        weight: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.eye(8))

        def forward(self, x: Tensor) -> Tensor:
            self.weight.add_(1.0)
            return functional.linear(x, self.weight)

    x = torch.ones(2, 8)
    program, tensors = parts(Written(), x)
    runtime = Bfloat16Runtime(program, {name: tensor.clone() for name, tensor in tensors.items()})
    found = [runtime({"batch": 2}, [x])[0] for _ in range(2)]
    assert [float(each[0, 0]) for each in found] == [9.0, 17.0]
    model = Model().eval()
    program, tensors = parts(model, torch.randn(2, 4, 8))
    plain = sum(tensor.nbytes for tensor in tensors.values())
    halved = model.first.weight.nbytes // 2 + model.first.bias.nbytes // 2
    assert Bfloat16Runtime(program, tensors).weight_bytes == plain - halved + model.tied.weight.nbytes // 2


def test_a_model_that_is_in_16_bits_or_64_stays_so() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).to(dtype).eval()
        x = torch.randn(2, 8, dtype=dtype)
        program, tensors = parts(model, x)
        (found,) = Bfloat16Runtime(program, tensors)({"batch": 2}, [x])
        assert torch.equal(found, model(x))


def test_processor_without_bfloat16_is_refused(set_bfloat16: Callable[[bool], None]) -> None:
    set_bfloat16(False)
    program, tensors = parts(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(PlanError, match=r"instructions .*float32"):
        RuntimeChoice("eager", "bfloat16").load(program, tensors)


@pytest.mark.parametrize(
    ("text", "has"),
    [("flags\t: fpu avx512_bf16\n", True), ("flags\t: fpu avx2\n", False), ("Features\t: fp asimd bf16\n", True),
     ("Features\t: fp asimd\n", False), ("", True)],
)  # fmt: skip
def test_bfloat16_is_found_in_the_processor_flags(text: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_named: text)
    assert bfloat16.has_bfloat16() == has


def test_bfloat16_runtime_refuses_training() -> None:
    with pytest.raises(UsageError, match="the runtime eager:bfloat16 cannot train"):
        RuntimeChoice("eager", "bfloat16").load_training(None, {})  # type: ignore[arg-type]
