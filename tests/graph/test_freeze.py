"""A graph whose leading layers are frozen computes what the module does with those layers in evaluation mode."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from penstock.deploy.state import load_state
from penstock.errors import UsageError
from penstock.graph.call import bind_inputs, build_output
from penstock.graph.cuts import Cuts
from penstock.runtime.registry import EAGER
from penstock.tensors import HOST
from penstock.train.captured import Captured
from penstock.zoo.weights.weights import ModuleWeights
from tests.fewer import long
from tests.models import UNet, assert_same, bert, deit, gpt2, seeded, t5


def tokens(rows: int) -> Tensor:
    return torch.randint(3, 80, (rows, 9), generator=torch.Generator().manual_seed(1))


def images(rows: int, size: int) -> Tensor:
    return torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(1))


def vit() -> nn.Module:
    return seeded(
        VisionTransformer, img_size=32, patch_size=16, embed_dim=32, depth=3, num_heads=2, num_classes=10,
        proj_drop_rate=0.2, attn_drop_rate=0.1, drop_path_rate=0.2, pos_drop_rate=0.1,
    )  # fmt: skip


def resnet() -> nn.Module:
    import timm

    return seeded(timm.create_model, "resnet18", num_classes=10)


def gpt2_with_fixed_embedding() -> nn.Module:
    model = gpt2()  # with dropout
    model.get_submodule("transformer.wte").requires_grad_(False)
    return model


@dataclass(frozen=True)
class Case:
    """A model, its inputs for some rows, and the modules before its first layer's end and in each layer after."""

    make: Callable[[], nn.Module]
    call: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    layers: tuple[tuple[str, ...], ...]


RESNET_BLOCKS = tuple(f"layer{level}.{block}" for level in range(1, 5) for block in range(2))
CASES: dict[str, Case] = {
    "vit": Case(
        vit, lambda rows: ((images(rows, 32),), {}),
        (("patch_embed", "pos_drop", "patch_drop", "norm_pre", "blocks.0"), ("blocks.1",), ("blocks.2",)),
    ),
    "deit": Case(
        deit, lambda rows: ((images(rows, 32),), {}),
        (("patch_embed", "pos_drop", "patch_drop", "norm_pre", "blocks.0"), *((f"blocks.{n}",) for n in range(1, 4))),
    ),
    "bert": Case(
        bert, lambda rows: ((), {"input_ids": tokens(rows), "attention_mask": torch.ones(rows, 9, dtype=torch.long)}),
        (("bert.embeddings", "bert.encoder.layer.0"), ("bert.encoder.layer.1",), ("bert.encoder.layer.2",)),
    ),
    "resnet": Case(
        resnet, lambda rows: ((images(rows, 64),), {}),
        (("conv1", "bn1", "act1", "maxpool", RESNET_BLOCKS[0]), *((name,) for name in RESNET_BLOCKS[1:])),
    ),
    "gpt2": Case(
        gpt2_with_fixed_embedding, lambda rows: ((), {"input_ids": tokens(rows)}),
        (("transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0"),
         ("transformer.h.1",), ("transformer.h.2",)),
    ),
}  # fmt: skip


@cache
def made(name: str) -> tuple[nn.Module, Captured]:
    case = CASES[name]
    model = case.make().train()
    return model, Captured(model, *case.call(2))


def run(frozen: Captured, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Mapping[str, Tensor]]:
    """Run a captured model with copies of a module's tensors; returns what it puts out, and the tensors after."""
    weights = ModuleWeights(model)
    tensors = {s.value.name: load_state(frozen.graph, s, weights).clone() for s in frozen.graph.states}
    (part,) = frozen.parts([], None)
    given, sizes = bind_inputs(frozen.graph, args, kwargs)
    names = {v.name: tensor for v, tensor in zip(frozen.graph.tensor_inputs(), given, strict=True)}
    used = {s.value.name: tensors[s.value.name] for s in part.program.states}
    outputs = EAGER.load(part.program, used, HOST)(sizes, [names[value.name] for value in part.program.inputs])
    return build_output(frozen.graph, outputs, sizes), {s.source: tensors[s.value.name] for s in frozen.graph.states}


@pytest.mark.parametrize("name", [name if name in {"deit", "resnet"} else long(name) for name in CASES])
def test_frozen_layers_evaluate_and_later_ones_train(name: str) -> None:
    case, (model, captured) = CASES[name], made(name)
    assert len(captured.layers) == len(case.layers)
    for count in (len(case.layers) // 2, len(case.layers)):
        expected = copy.deepcopy(model)
        for path in (path for layer in case.layers[:count] for path in layer):
            expected.get_submodule(path).eval()
        args, kwargs = case.call(5)  # other rows than it was captured with
        torch.manual_seed(7)  # both draw the same dropout
        with torch.no_grad():
            wanted = expected(*args, **kwargs)
        torch.manual_seed(7)
        found, after = run(captured.frozen(count), model, *args, **kwargs)
        assert_same(wanted, found)
        for path, buffer in expected.named_buffers():
            assert path not in after or torch.equal(after[path], buffer), path


def test_statistics_of_frozen_layers_stay_and_those_after_change() -> None:
    model, captured = made("resnet")
    _, after = run(captured.frozen(3), model, images(4, 64))
    changed = {name for name, buffer in model.named_buffers() if not torch.equal(after[name], buffer)}
    frozen = ("bn1.", "layer1.", "layer2.0.")
    behind = {name for name, _ in model.named_buffers() if not name.startswith(frozen)}
    assert changed == behind


@pytest.mark.parametrize("name", CASES)
def test_frozen_model_keeps_names_of_cuts_and_operations(name: str) -> None:
    _, captured = made(name)
    count = len(captured.layers) // 2
    frozen = captured.frozen(count)
    cut, cuts = captured.layers[count - 1], Cuts(frozen.graph)
    assert cuts.find(cut.name).position == frozen.frozen_end
    after = [op.name for op in captured.graph.ops[cut.position :]]
    assert [op.name for op in frozen.graph.ops[frozen.frozen_end :]] == after
    shift = frozen.frozen_end - cut.position
    for layer in captured.layers[count - 1 :]:
        assert cuts.find(layer.name).position == layer.position + shift
        assert [v.name for v in cuts.find(layer.name).crossing] == [v.name for v in layer.crossing]
    for layer in frozen.layers[:count]:
        assert cuts.find(layer.name).position <= frozen.frozen_end
    assert len({op.name for op in (*frozen.graph.prelude, *frozen.graph.ops)}) == len(
        [*frozen.graph.prelude, *frozen.graph.ops]
    )


@pytest.mark.parametrize("name", CASES)
def test_trainable_parameters_exclude_those_of_frozen_layers(name: str) -> None:
    case, (_, captured) = CASES[name], made(name)
    for count in range(1, len(case.layers) + 1):
        paths = tuple(f"{path}." for layer in case.layers[:count] for path in layer)
        own = {"cls_token", "pos_embed"}  # a ViT's parameters that belong to no module within
        assert captured.frozen(count).trainable == {
            name for name in captured.trainable if not name.startswith(paths) and name not in own
        }


def test_a_model_is_as_it_was_after_a_part_of_it_was_frozen() -> None:
    model, captured = made("vit")
    operations, trainable = [op.name for op in captured.graph.ops], set(captured.trainable)
    captured.frozen(2)
    assert [op.name for op in captured.graph.ops] == operations
    assert captured.trainable == trainable
    assert captured.frozen_layers == 0
    assert captured.frozen(0) is captured
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(("make", "shared"), [(gpt2, "transformer.wte.weight"), long(t5, "shared.weight")])
def test_a_weight_that_layers_after_share_is_named(make: Callable[[], nn.Module], shared: str) -> None:
    ids = tokens(2)
    more = {"decoder_input_ids": ids} if make is t5 else {}
    captured = Captured(make().train(), (), {"input_ids": ids, **more})
    for count in range(1, len(captured.layers) + 1):
        with pytest.raises(UsageError, match=f"share {shared} with layers that still train") as refusal:
            captured.frozen(count)
        assert "\n" not in str(refusal.value)


def test_more_layers_than_there_are() -> None:
    _, captured = made("vit")
    with pytest.raises(UsageError, match=r"VisionTransformer .*3 layers.*\b4\b"):
        captured.frozen(4)


def test_a_model_of_which_nothing_would_train() -> None:
    model = vit()
    model.requires_grad_(False)
    model.get_submodule("blocks.1").requires_grad_(True)
    captured = Captured(model.train(), (images(2, 32),))
    assert captured.frozen(1).trainable == captured.trainable
    with pytest.raises(UsageError, match=r"VisionTransformer .*2 of 3 layers"):
        captured.frozen(2)


def test_a_model_without_blocks_freezes_by_its_pieces() -> None:
    model = seeded(UNet, 4, False).train()
    captured = Captured(model, (torch.zeros(2, 3, 8, 8),))
    cuts = [cut.name for cut in captured.layers]
    assert "down2:before" in cuts
    assert "head:before" in cuts
    for stage, paths in (("down2:before", ("down1",)), ("head:before", ("down", "bottom", "up"))):
        frozen = captured.frozen(cuts.index(stage) + 1)
        expected = copy.deepcopy(model)
        for name, module in expected.named_modules():
            if name.startswith(paths):
                module.eval()
        with torch.no_grad():
            wanted = expected(images(3, 8))
        found, after = run(frozen, model, images(3, 8))
        assert_same(wanted, found)
        for path, buffer in expected.named_buffers():
            assert torch.equal(after[path], buffer), path
        assert not any(name.startswith(paths) for name in frozen.trainable)
