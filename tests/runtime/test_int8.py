"""The precision int8 of the eager runtime: near the float32 results, each row by itself, tied weights twice."""

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.generate.generator import Generator
from penstock.runtime.int8 import Int8Runtime, quantize
from penstock.runtime.registry import parse_runtime
from tests.generate.decoders import decoder, prompts
from tests.runtime.test_onnx import parts


class Model(nn.Module):
    """An embedding tied to the last layer, layers of the same input, one with a bias, and a width that is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 40), nn.Linear(40, 50, bias=False)
        self.head.weight = self.embed.weight
        self.query, self.key, self.out = nn.Linear(40, 24), nn.Linear(40, 24, bias=False), nn.Linear(24, 40)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        mixed = self.query(h) * self.key(h)
        h.mul_(0.5)
        result: Tensor = self.head(h + self.out(mixed) + self.key(h).sum(-1, keepdim=True))
        return result


def weights_in_8_bits(model: Model) -> None:
    """Round the weights as the runtime does."""
    for layer in (model.query, model.key, model.out):
        values, scale = quantize(layer.weight)
        layer.weight.data = values[:, : layer.weight.shape[1]].float() * scale.float()[:, None]


@torch.no_grad()
def test_results_are_those_of_rounded_weights() -> None:
    torch.manual_seed(0)
    model, ids = Model().eval(), torch.randint(0, 50, (3, 7))
    program, tensors = parts(model, ids)
    runtime = Int8Runtime(program, tensors)
    plain = sum(tensor.nbytes for tensor in tensors.values())
    layers = sum(layer.weight.nbytes for layer in (model.query, model.key, model.out))
    assert runtime.weight_bytes < plain - layers / 2 + model.embed.weight.nbytes / 2  # the tied one is there twice
    exact = model(ids)
    weights_in_8_bits(model)
    rounded = model(ids)
    for each in (runtime, runtime.copied()):
        for _ in range(2):
            (found,) = each({"batch": 3}, [ids])
            assert float((found - exact).norm() / exact.norm()) < 0.03
            assert float((found - rounded).norm() / rounded.norm()) < 0.02
            for row in range(3):  # alone
                assert torch.equal(each({"batch": 1}, [ids[row : row + 1]])[0][0], found[row])


def test_layers_that_are_kept() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)).eval(), torch.randn(2, 32)
    program, tensors = parts(model, x)
    with torch.no_grad():
        exact = model(x)
    assert torch.equal(parse_runtime("eager:int8+0+2").load(program, tensors)({"batch": 2}, [x])[0], exact)
    assert not torch.equal(parse_runtime("eager:int8").load(program, tensors)({"batch": 2}, [x])[0], exact)
    with pytest.raises(PlanError, match="meta"):
        Int8Runtime(program, tensors, torch.device("meta"))


@pytest.mark.parametrize("weight", [torch.zeros(3, 4), torch.full((2, 40), 1e-30), torch.tensor([[3e38, -1.0]])])
def test_weights_at_the_ends(weight: Tensor) -> None:
    values, scale = quantize(weight)
    assert values.shape[1] % 32 == 0
    found = values[:, : weight.shape[1]].float() * scale.float()[:, None]
    assert bool(found.isfinite().all())
    assert float((found - weight).abs().amax()) <= float(weight.abs().amax()) / 100


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_language_model_has_the_same_bits_in_any_company(name: str) -> None:
    model, given = decoder(name), prompts(5, 33, 12, 1)
    found = []
    for stages, slots in ((1, 3), (2, 3)):
        with Generator(model, stages=stages, slots=slots, max_length=64, runtime="eager:int8") as generator:
            requests = [generator.submit(prompt, max_new_tokens=20) for prompt in given]
            found.append([(request.result(), request.logprobs) for request in requests])
    assert found[0] == found[1]
