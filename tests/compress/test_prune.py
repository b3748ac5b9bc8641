"""Pruned models: ordinary modules that run, capture, save and load."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import penstock
from penstock.compress.prune import Pruning, prune, save_pruned
from penstock.errors import ModelError, UsageError
from penstock.zoo.models.models import load_model
from penstock.zoo.weights.fit import KEY
from tests.fewer import long

TIMM = "timm:vit_tiny_patch16_224,depth=2,img_size=32,patch_size=8,num_classes=4"


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(4, 3, 32, 32, generator=generator), torch.randint(0, 4, (4,), generator=generator))
        for _ in range(2)
    ]


def images() -> Tensor:
    return batches()[0][0]


@pytest.fixture(scope="module")
def timm_model() -> nn.Module:
    return load_model(TIMM, whole=True).module


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("importance", ["magnitude", "taylor", "hessian"])
@pytest.mark.parametrize("everywhere", [True, long(False)])
def test_pruned_model_is_smaller_and_still_runs(importance: str, everywhere: bool, timm_model: nn.Module) -> None:
    before = copy.deepcopy(timm_model.state_dict())
    how = Pruning(ratio=0.3, importance=importance, everywhere=everywhere)  # type: ignore[arg-type]
    smaller = prune(timm_model, images(), how, batches())
    assert size(smaller) < 0.8 * size(timm_model)
    assert smaller(images()).shape == (4, 4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in timm_model.state_dict().items())
    assert type(smaller) is type(timm_model)
    widths = [layer.out_features for name, layer in smaller.named_modules() if isinstance(layer, nn.Linear)][:-1]
    assert all(width % 8 == 0 for width in widths)


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_layer_that_would_lose_all_keeps_a_few(everywhere: bool, timm_model: nn.Module) -> None:
    model = copy.deepcopy(timm_model)
    mlp = model.blocks[1].mlp  # type: ignore[index, union-attr]
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.fill_(0.01)  # importances are those of a layer's mean: none of its channels stands out
    ratio = 0.8 if everywhere else 0.99
    smaller = prune(model, images(), Pruning(ratio=ratio, importance="magnitude", everywhere=everywhere))
    assert smaller.blocks[1].mlp.fc1.out_features == 8  # type: ignore[index, union-attr]
    assert smaller.blocks[1].attn.head_dim >= 8  # type: ignore[index, union-attr]
    assert smaller(images()).shape == (4, 4)


def test_pruning_removes_whole_heads(timm_model: nn.Module) -> None:
    smaller = prune(timm_model, images(), Pruning(ratio=0.0, heads=0.33, importance="magnitude", everywhere=False))
    assert [smaller.blocks[i].attn.num_heads for i in (0, 1)] == [2, 2]  # type: ignore[index, union-attr]
    assert smaller(images()).shape == (4, 4)


def test_nothing_pruned_is_the_model_itself(timm_model: nn.Module) -> None:
    same = prune(timm_model, images(), Pruning(ratio=0.0, importance="magnitude"))
    assert torch.equal(same(images()), timm_model(images()))


def test_pruned_model_is_saved_loaded_and_streamed(timm_model: nn.Module, tmp_path: Path) -> None:
    smaller = prune(timm_model, images(), Pruning(ratio=0.3), batches())
    file = tmp_path / "pruned.safetensors"
    save_pruned(smaller, timm_model, file)
    loaded = load_model(TIMM, weights=file)
    meta = loaded.module
    assert {name: p.shape for name, p in meta.named_parameters()} == {n: p.shape for n, p in smaller.named_parameters()}
    whole = load_model(TIMM, weights=file, whole=True).module
    with torch.no_grad():
        wanted = smaller(images())
        assert torch.equal(whole(images()), wanted)
    with penstock.Pipeline(meta, (images(),), stages=2, weights=loaded.weights, threads=1) as pipe:
        torch.testing.assert_close(next(iter(pipe.stream([images()]))), wanted, rtol=1e-5, atol=1e-6)


def test_a_model_of_transformers(tmp_path: Path) -> None:
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8,
        num_labels=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = ViTForImageClassification(config).eval()
    smaller = prune(model, {"pixel_values": images()}, Pruning(ratio=0.3), batches())
    assert size(smaller) < 0.8 * size(model)
    model.save_pretrained(tmp_path / "whole")
    file = tmp_path / "pruned.safetensors"
    save_pruned(smaller, model, file)
    loaded = load_model(f"hf:{tmp_path / 'whole'}", weights=file, whole=True).module
    assert torch.equal(loaded(images()).logits, smaller(images()).logits)


def test_gradients_need_batches(timm_model: nn.Module) -> None:
    with pytest.raises(UsageError, match="hessian needs gradients"):
        prune(timm_model, images(), Pruning(ratio=0.3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"ratio": 1.0}, "a ratio to prune must be from 0 to under 1; got 1"), ({"ratio": 0.1, "round_to": 0}, "got 0"),
     ({"ratio": 0.1, "heads": -1.0}, "a heads to prune")],
)  # fmt: skip
def test_invalid_pruning_is_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Pruning(**fields)  # type: ignore[arg-type]


class Stops(nn.Module):
    """A layer that does not take what it is given."""

    def forward(self, _x: Tensor) -> Tensor:
        raise ValueError("no such images")


def test_a_model_that_cannot_be_traced_names_the_layer() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), Stops(), nn.Linear(8, 4))
    with pytest.raises(ModelError, match=r"in 2 \(no such images\)"):
        prune(model, images(), Pruning(ratio=0.3, importance="magnitude"))


def with_metadata(file: Path, text: str, target: Path) -> Path:
    save_file(load_file(file), target, {"format": "pt", KEY: text})
    return target


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "cannot be read"),
        ('{"blocks.9": {"num_heads": 1}}', "narrowed at 'blocks.9', which the model does not have"),
        long('{"blocks.0.attn": {"num_heads": 99}}', "narrow blocks.0.attn.num_heads from 3 to 99"),
        ('{"blocks.0.attn": {"__class__": 1}}', "narrow blocks.0.attn.__class__ from None to 1"),
        long('{"blocks.0.attn": {"fused_attn": 1}}', "narrow blocks.0.attn.fused_attn"),
        long('{"blocks.0.norm1": {"normalized_shape": 4}}', "narrow blocks.0.norm1.normalized_shape"),
    ],
)
def test_forged_pruning_header_is_refused(text: str, message: str, timm_model: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "pruned.safetensors"
    save_pruned(prune(timm_model, images(), Pruning(ratio=0.3, importance="magnitude")), timm_model, file)
    with safe_open(file, framework="pt") as opened:
        assert KEY in opened.metadata()
    with pytest.raises(ModelError, match=message):
        load_model(TIMM, weights=with_metadata(file, text, tmp_path / "forged.safetensors"))


def test_weights_that_grow_are_refused(timm_model: nn.Module, tmp_path: Path) -> None:
    state = timm_model.state_dict() | {"blocks.0.mlp.fc1.weight": torch.zeros(4096, 192)}
    save_file(state, tmp_path / "w.safetensors", {KEY: "{}"})
    with pytest.raises(ModelError, match=r"blocks\.0\.mlp\.fc1\.weight .*\(768, 192\) to \(4096, 192\)"):
        load_model(TIMM, weights=tmp_path / "w.safetensors")


class ConvolutionalHead(nn.Module):
    """A head of convolutions, which is made first, and a linear layer elsewhere, which is made last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(32, 16, 1)
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.gate = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu()).relu()
        x = x * self.gate(x.mean((2, 3)))[:, :, None, None].sigmoid()
        scores: Tensor = self.head(x).mean((2, 3))
        return scores


class HeadFirst(nn.Module):
    """A linear head that is made first, with a norm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(32, 16), nn.LayerNorm(16)
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.norm(self.head(self.body(x)))
        return scores


class TwoHeads(nn.Module):
    """Two heads whose scores are added."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(32, 16), nn.Linear(32, 16)
        self.body = nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).relu()
        scores: Tensor = (self.one(x) + self.other(x)).view(-1, 16)
        return scores


@pytest.mark.parametrize(
    ("model", "shape"), [(ConvolutionalHead, (2, 3, 8, 8)), (HeadFirst, (2, 8)), (TwoHeads, (2, 8))]
)
def test_output_layer_keeps_its_channels(model: type[nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, example = model(), torch.randn(shape)
    smaller = prune(module, example, Pruning(ratio=0.5, importance="magnitude", round_to=1))
    assert smaller(example).shape == (2, 16)
    assert sum(p.numel() for p in smaller.parameters()) < 0.6 * sum(p.numel() for p in module.parameters())
