"""Random weights of a seed are those of the model's own constructor in one process."""

import errno
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.zoo.models.meta import build_on_meta, draw
from penstock.zoo.models.models import load_model, parse_name
from tests.disks import Disk

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

TIMM = [
    "test_vit", "test_vit2", "test_vit3", "test_resnet", "test_convnext", "test_efficientnet", "test_efficientnet_gn",
    "test_mambaout", "test_nfnet", "test_byobnet", "vit_tiny_patch16_224,depth=2,num_classes=300",
    "deit_tiny_distilled_patch16_224,depth=1,img_size=32", "beit_base_patch16_224,depth=1,embed_dim=48,num_heads=4",
    "pit_ti_224", "levit_128s", "resmlp_12_224",
    "xcit_nano_12_p16_224", "eva02_tiny_patch14_224,depth=1", "crossvit_tiny_240", "mobilenetv3_small_050",
    "ghostnet_050", "convit_tiny,depth=2",
]  # fmt: skip
DECODER = "hidden_size=32,intermediate_size=48,num_hidden_layers=1,num_attention_heads=4,num_key_value_heads=2"
HF = {
    "gpt2,n_layer=2,n_embd=32,n_head=4,vocab_size=300,resid_pdrop=0.0": "CausalLM",
    f"llama,{DECODER},vocab_size=300": "CausalLM",
    f"mixtral,{DECODER},vocab_size=300,num_local_experts=3": "CausalLM",
    "gpt_neox,hidden_size=32,intermediate_size=48,num_hidden_layers=1,num_attention_heads=4,vocab_size=90": "CausalLM",
    "bloom,hidden_size=32,n_layer=1,n_head=4,vocab_size=90": "CausalLM",
    "bert,hidden_size=32,num_hidden_layers=1,num_attention_heads=4,intermediate_size=48": "MaskedLM",
    "t5,d_model=32,d_kv=8,d_ff=48,num_layers=1,num_heads=4,vocab_size=50": "Seq2SeqLM",
    "bart,d_model=32,encoder_layers=1,decoder_layers=1,encoder_ffn_dim=32,vocab_size=60": "Seq2SeqLM",
    "vit,hidden_size=32,intermediate_size=48,num_hidden_layers=1,num_attention_heads=4": "ImageClassification",
    "swin,embed_dim=24,image_size=56,window_size=7": "ImageClassification",
    "dinov2,hidden_size=32,num_hidden_layers=1,num_attention_heads=4,image_size=28": "ImageClassification",
    "convnext,num_labels=7": "ImageClassification",
}


def from_timm(name: str) -> nn.Module:
    base, options = parse_name(name)
    return timm.create_model(base, **options)  # type: ignore[no-any-return]


def from_transformers(name: str) -> nn.Module:
    base, options = parse_name(name)
    config = transformers.CONFIG_MAPPING[base](**options)
    return getattr(transformers, f"AutoModelFor{HF[name]}").from_config(config)  # type: ignore[no-any-return]


def seeded(build: Any, seed: int) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build()
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def differing(weights: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    assert sorted(weights.names()) == sorted(expected)
    return [name for name, tensor in expected.items() if not torch.equal(weights.load(name), tensor)]


@pytest.mark.parametrize("name", [*(f"timm:{name}" for name in TIMM), *(f"hf:{name}" for name in HF)])
def test_random_weights_are_the_constructor_s(name: str) -> None:
    rest = name.partition(":")[2]
    build = partial(from_timm if name.startswith("timm:") else from_transformers, rest)
    state = torch.get_rng_state()
    model = load_model(name, seed=5)
    expected = seeded(build, 5)
    assert differing(model.weights, expected) == []
    assert [n for n, buffer in model.module.named_buffers() if not torch.equal(buffer, expected[n])] == []
    assert torch.equal(torch.get_rng_state(), state)


class Net(nn.Module):
    """Draws, reads and copies as constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(3))
        self.register_buffer("noise", torch.randn(2, 3), persistent=False)
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(3, 300))
        self.first, self.second = nn.Linear(300, 250), nn.Linear(300, 250)
        self.second.load_state_dict(self.first.state_dict())
        self.first.weight.data[3:5].normal_(std=float(self.first.weight.detach().abs().max()))
        self.head = nn.Linear(250, 300, bias=False)
        self.head.weight = nn.Parameter(self.first.weight.t())
        nn.init.orthogonal_(self.second.weight)
        self.turned = nn.Parameter(torch.empty(8, 64, 32, 32).to(memory_format=torch.channels_last))
        nn.init.trunc_normal_(self.turned)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_constructors_may_read_copy_and_share() -> None:
    module, weights = build_on_meta(Net, 3)
    expected = seeded(Net, 3)
    assert differing(weights, expected) == []
    assert torch.equal(module.get_buffer("noise"), expected["noise"])
    assert weights.load("turned").stride() == expected["turned"].stride()
    assert {p.device.type for p in module.parameters()} == {"meta"}


def test_large_tensors_are_in_files_without_names(temporary: Path) -> None:
    module = draw(lambda: nn.Linear(300, 300), 0)
    assert str(temporary) in Path("/proc/self/maps").read_text()
    assert list(temporary.iterdir()) == []
    del module
    assert str(temporary) not in Path("/proc/self/maps").read_text()


def test_a_full_disk_is_one_line(disk: Disk) -> None:
    disk.fail("posix_fallocate", errno.ENOSPC)
    weights = load_model("timm:vit_tiny_patch16_224,depth=1").weights
    with pytest.raises(ModelError, match="TMPDIR"):
        weights.load("head.weight")


def test_a_constructor_that_changes_is_refused() -> None:
    sizes = iter((3, 4))
    _, weights = build_on_meta(lambda: nn.Linear(next(sizes), 2), 0)
    with pytest.raises(ModelError, match=r"\(2, 3\), then as .*\(2, 4\)"):
        weights.load("weight")
