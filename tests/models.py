"""Small models with random weights for tests, and how stages are run as if between processes."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.deploy.split import SplitModel
from penstock.deploy.state import load_state
from penstock.graph.call import bind_inputs, build_output
from penstock.graph.cuts import Cut, Cuts
from penstock.graph.graph import Graph, count_work
from penstock.transport.messages import DATA, Format, Message
from penstock.values import Value
from penstock.zoo.weights.weights import ModuleWeights

# docs/limits.md says what PyTorch 2.10 cannot do, which is the last with a CPU build for boards on the usual index
OLD_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11)


def seeded(model_class: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Build a model in evaluation mode with the weights of seed 0."""
    torch.manual_seed(0)
    model: nn.Module = model_class(*args, **kwargs)
    return model.eval()


def deit(depth: int = 4) -> nn.Module:
    import timm

    return seeded(timm.create_model, "deit_tiny_patch16_224", img_size=32, patch_size=8, depth=depth, num_classes=10)


def swin() -> nn.Module:
    import timm

    return seeded(
        timm.create_model, "swin_tiny_patch4_window7_224",
        img_size=32, patch_size=2, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=10,
    )  # fmt: skip


def gpt2(**settings: Any) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        n_embd=32, n_layer=3, n_head=2, vocab_size=80, n_positions=64, use_cache=False, **settings
    )
    return seeded(transformers.GPT2LMHeadModel, config)


def t5(**settings: Any) -> nn.Module:
    import transformers

    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=80, use_cache=False, **settings
    )
    return seeded(transformers.T5ForConditionalGeneration, config)


def bert(**settings: Any) -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, vocab_size=80, num_labels=3,
        **settings,
    )  # fmt: skip
    return seeded(transformers.BertForSequenceClassification, config)


def albert() -> nn.Module:
    import transformers

    config = transformers.AlbertConfig(
        hidden_size=32, embedding_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64,
        vocab_size=80,
    )  # fmt: skip
    return seeded(transformers.AlbertForMaskedLM, config)


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=80, use_cache=False,
    )  # fmt: skip
    return seeded(transformers.LlamaForCausalLM, config)


class _Block(nn.Module):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width_in, width_out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width_out)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.act(self.norm(self.conv(x)))
        return result


class UNet(nn.Module):
    """Convolutions down and up with skip connections, BatchNorm with statistics, and writes in place."""

    def __init__(self, width: int = 8, add_in_place: bool = True) -> None:
        super().__init__()
        self.add_in_place = add_in_place  # to what autograd still needs: such a model cannot be trained
        self.down1, self.down2 = _Block(3, width), _Block(width, 2 * width)
        self.bottom = _Block(2 * width, 2 * width)
        self.up2, self.up1 = _Block(4 * width, width), _Block(2 * width, width)
        self.head = nn.Conv2d(width, 2, 1)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean = torch.randn(module.num_features)
                module.running_var = torch.rand(module.num_features) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        lowest = self.bottom(F.max_pool2d(second, 2))
        lowest = F.interpolate(lowest, scale_factor=2.0)
        middle = self.up2(torch.cat([lowest, second], 1))
        highest = self.up1(torch.cat([F.interpolate(middle, scale_factor=2.0), first], 1))
        if self.add_in_place:
            highest += first
        else:
            highest = highest + first
        result: Tensor = self.head(highest)
        return result


def split_at(model: nn.Module, graph: Graph, cuts: Sequence[Cut]) -> SplitModel:
    """Split a captured model at given cuts."""
    weights = ModuleWeights(model)
    tensors = {state.value.name: load_state(graph, state, weights) for state in graph.states}
    return SplitModel(graph, cuts, tensors, count_work(graph, graph.sizes(graph.fixed_batch or 1)))


def as_messages(split: SplitModel, *args: Any, **kwargs: Any) -> Any:
    """Call a split model with every stage's tensors written to bytes and read back, as between processes."""
    tensors, sizes = bind_inputs(split.graph, args, kwargs)
    tensors = _through_bytes(split.stages[0].program.inputs, tensors, sizes)
    with torch.inference_mode():
        for stage in split.stages:
            tensors = _through_bytes(stage.program.outputs, stage.runtime(sizes, tensors), sizes)
    return build_output(split.graph, tensors, sizes)


def _through_bytes(values: Sequence[Value], tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> list[Tensor]:
    layout = Format(values, tuple(sizes), sizes)
    buffer = torch.zeros(layout.largest(sizes), dtype=torch.uint8)
    layout.write(Message(DATA, 0, tuple(sizes.values()), list(tensors)), buffer)
    return layout.read(buffer).tensors


def random_cuts(cuts: Cuts, seed: int) -> list[Cut]:
    """Draw one to five of all allowed cuts."""
    choice = random.Random(seed)
    return sorted(choice.sample(list(cuts), min(choice.randint(1, 5), len(cuts))), key=lambda cut: cut.position)


def assert_same(expected: object, given: object) -> None:
    """Assert the same structure, types, dtypes and bits."""
    first, second = pytree.tree_flatten(expected), pytree.tree_flatten(given)
    assert first[1] == second[1]
    for a, b in zip(first[0], second[0], strict=True):
        if isinstance(a, Tensor):  # a parameter that the model returns comes as a plain tensor
            assert isinstance(b, Tensor)
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        else:
            assert type(a) is type(b)
            assert a == b
