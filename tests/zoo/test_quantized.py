"""Quantized checkpoints: the numbers of each layout bit by bit, tokens in the file's integers, refusals."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.errors import ModelError, UsageError
from penstock.packing import unpacked
from penstock.recipes.texts import open_generator
from penstock.spec.settings import TextSettings
from penstock.zoo.models.models import load_model
from penstock.zoo.weights.quantized import read_quantized
from penstock.zoo.weights.weights import TensorWeights, fingerprint_of
from tests.fewer import long
from tests.generate.tokens import save_model

Encoded = tuple[dict[str, Tensor], Tensor]  # a layer's tensors, and its weight by the definition of the layout


def drawn(least: int, most: int, *shape: int) -> Tensor:
    return torch.randint(least, most + 1, shape)


def scales_of(*shape: int) -> Tensor:
    """Return scales in half precision, as files have them, for weights of about the size of a model's."""
    return (0.002 + 0.004 * torch.rand(shape)).half()


def words(rows: Tensor, bits: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Put the numbers of each row into words of 32 bits, the first of `order` lowest."""
    count, made = 32 // bits, []
    for row in rows.tolist():
        row = row + [0] * (-len(row) % count)
        values = [sum(row[begin + order[i]] << bits * i for i in range(count)) for begin in range(0, len(row), count)]
        made.append([value - 2**32 if value >= 2**31 else value for value in values])
    return torch.tensor(made, dtype=torch.int32)


def weight_of(
    numbers: Tensor, zeros: Tensor, scales: Tensor, group_of: Callable[[int, int], tuple[int, int]]
) -> Tensor:
    """Return (number - zero) * scale in float32, one number at a time."""
    made = torch.empty(numbers.shape)
    for o, row in enumerate(numbers.float().tolist()):
        places = [group_of(o, i) for i in range(len(row))]
        each = torch.tensor([value - zeros[place].item() for value, place in zip(row, places, strict=True)])
        made[o] = each * torch.stack([scales[place] for place in places]).float()
    return made


def gptq(outputs: int, inputs: int, bits: int = 4, group: int = 128, form: str = "gptq", act: bool = False) -> Encoded:
    width = inputs if group == -1 else group
    count = -(-inputs // width)
    q, z, s = drawn(0, 2**bits - 1, outputs, inputs), drawn(1, 2**bits - 1, outputs, count), scales_of(outputs, count)
    order = torch.arange(inputs) // width
    if act:
        order = order[torch.randperm(inputs)]
    tensors = {
        "qweight": words(q, bits).t().contiguous(),
        "qzeros": words(z.t() - int(form == "gptq"), bits),
        "scales": s.t().contiguous(),
        "g_idx": order.int(),
    }
    return tensors, weight_of(q, z, s, lambda o, i: (o, int(order[i])))


def awq(outputs: int, inputs: int, group: int = 128) -> Encoded:
    q, z = drawn(0, 15, outputs, inputs), drawn(0, 15, outputs, inputs // group)
    s, order = scales_of(outputs, inputs // group), (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(q.t(), 4, order), "qzeros": words(z.t(), 4, order), "scales": s.t().contiguous()}
    return tensors, weight_of(q, z, s, lambda o, i: (o, i // group))


def packed(
    outputs: int, inputs: int, bits: int = 4, group: int = 128, zeros: bool = False, act: bool = False
) -> Encoded:
    half, count = 2 ** (bits - 1), -(-inputs // group)
    q, s = drawn(-half, half - 1, outputs, inputs), scales_of(outputs, count).bfloat16()
    z = drawn(-half, half - 1, outputs, count) if zeros else torch.zeros(outputs, count, dtype=torch.long)
    order = torch.arange(inputs) // group
    tensors = {
        "weight_packed": words(q + half, bits),
        "weight_scale": s,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if zeros:
        tensors["weight_zero_point"] = words((z + half).t(), bits).t().contiguous()
    if act:
        order = order[torch.randperm(inputs)]
        tensors["weight_g_idx"] = order.int()
    return tensors, weight_of(q, z, s, lambda o, i: (o, int(order[i])))


def int8(outputs: int, inputs: int, group: int = 0, zeros: bool = False) -> Encoded:
    width = group or inputs
    q, s = drawn(-128, 127, outputs, inputs), scales_of(outputs, inputs // width) / 16
    z = drawn(-128, 127, *s.shape) if zeros else torch.zeros(s.shape)
    tensors = {"weight": q.to(torch.int8), "weight_scale": s, "input_scale": torch.ones(1)}
    tensors |= {"weight_zero_point": z.to(torch.int8)} if zeros else {}
    return tensors, weight_of(q, z, s, lambda o, i: (o, i // width))


def float8(outputs: int, inputs: int, high: int, wide: int, scale: str = "weight_scale", flat: bool = False) -> Encoded:
    q = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    s = 0.02 + 0.02 * torch.rand(-(-outputs // high), -(-inputs // wide))
    tensors = {"weight": q, scale: s.reshape(1) if flat else s}
    return tensors, weight_of(q, torch.zeros(s.shape), s, lambda o, i: (o // high, i // wide))


def bnb(outputs: int, inputs: int) -> Encoded:
    q, s = drawn(-127, 127, outputs, inputs), 0.1 * torch.rand(outputs)
    tensors = {"weight": q.to(torch.int8), "SCB": s, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, weight_of(q, torch.zeros(outputs, 1), (s / 127)[:, None], lambda o, _: (o, 0))


def ct(form: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
BNB = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
PACKED = ct("pack-quantized", num_bits=4, strategy="group", group_size=128)
# settings, the layout's numbers, and the format of their blocks
LAYOUTS: dict[str, tuple[Mapping[str, Any], Callable[[int, int], Encoded], str]] = {
    "gptq": (GPTQ, gptq, "U4_128"),
    "gptq of 32": (GPTQ | {"group_size": 32}, lambda o, i: gptq(o, i, group=32), "U4_32"),
    "gptq of 16": (GPTQ | {"group_size": 16}, lambda o, i: gptq(o, i, group=16), ""),
    "gptq of 8 bits": (GPTQ | {"bits": 8, "group_size": 64}, lambda o, i: gptq(o, i, 8, 64), "U8_64"),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda o, i: gptq(o, i, form="gptq_v2"), "U4_128"),
    "gptq of rows": (GPTQ | {"group_size": -1}, lambda o, i: gptq(o, i, group=-1), "U4_128"),
    "gptq in order of activations": (GPTQ, lambda o, i: gptq(o, i, act=True), ""),
    "awq": (AWQ, awq, "U4_128"),
    "awq of 64": (AWQ | {"group_size": 64}, lambda o, i: awq(o, i, 64), "U4_64"),
    "packed": (PACKED, packed, "U4_128"),
    "packed with zeros": (PACKED, lambda o, i: packed(o, i, zeros=True), "U4_128"),
    "packed in order of activations": (PACKED, lambda o, i: packed(o, i, act=True), ""),
    "packed in 8 bits": (
        ct("pack-quantized", strategy="channel"), lambda o, i: packed(o, i, 8, i, zeros=True), "U8_128"
    ),
    "int8": (ct("int-quantized", strategy="channel"), int8, "U8_128"),
    "int8 with zeros": (
        ct("int-quantized", group_size=64, symmetric=False), lambda o, i: int8(o, i, 64, zeros=True), "U8_64"
    ),
    "float8 of rows": (
        ct("float-quantized", type="float", strategy="channel"), lambda o, i: float8(o, i, 1, i), "F8_128"
    ),
    "float8 of all": (
        ct("float-quantized", type="float", strategy="tensor"), lambda o, i: float8(o, i, o, i, flat=True), "F8_128"
    ),
    "float8 of blocks": (
        ct("float-quantized", type="float", block_structure=[16, 128]), lambda o, i: float8(o, i, 16, 128), "F8_128"
    ),
    "fp8": (FP8, lambda o, i: float8(o, i, 128, 128, "weight_scale_inv"), "F8_128"),
    "fp8 of a scale": (
        {"quant_method": "fp8"}, lambda o, i: float8(o, i, o, i, flat=True), "F8_128"
    ),
    "bitsandbytes": (BNB, bnb, "U8_128"),
}  # fmt: skip


def opened(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """Return a checkpoint of a layer `up` and a plain layer `norm`."""
    named = {f"up.{leaf}": tensor for leaf, tensor in tensors.items()}
    return read_quantized("hf:m", TensorWeights({**named, "norm.weight": torch.ones(3)}), settings)


@pytest.mark.parametrize("case", LAYOUTS)
def test_numbers_of_a_layout(case: str) -> None:
    torch.manual_seed(0)
    settings, encode, packing = LAYOUTS[case]
    tensors, wanted = encode(136, 256)
    weights = opened(settings, tensors | {"bias": torch.ones(136)})
    assert sorted(weights.names()) == ["norm.weight", "up.bias", "up.weight"]
    assert (weights.shape("up.weight"), weights.dtype("up.weight")) == ((136, 256), torch.float32)
    assert torch.equal(weights.load("up.weight"), wanted)
    assert (weights.packing("up.weight"), weights.packing("norm.weight")) == (packing, "")
    if packing:
        assert torch.equal(unpacked(weights.load_packed("up.weight"), packing), wanted)
    changed = {leaf: x if leaf == "weight_shape" else x.flip(0) for leaf, x in tensors.items()}
    assert fingerprint_of(weights) != fingerprint_of(opened(settings, changed))


def test_rows_of_one_or_partial_blocks_are_unpacked() -> None:
    torch.manual_seed(0)
    cases: list[tuple[dict[str, Any], Encoded]] = [
        (FP8, float8(200, 300, 128, 128, "weight_scale_inv")), (GPTQ, gptq(16, 200)), (BNB, bnb(5, 20)),
        (PACKED, packed(13, 20, group=20, zeros=True)), (PACKED, packed(1, 128, zeros=True)), (GPTQ, gptq(8, 128)),
        (GPTQ, gptq(2, 128)), (BNB, bnb(1, 128)),
    ]  # fmt: skip
    for settings, (tensors, wanted) in cases:
        weights = opened(settings, tensors)
        packing = weights.packing("up.weight")
        assert torch.equal(weights.load("up.weight"), wanted)
        assert (packing == "") == (wanted.shape[1] != 128)
        if packing:
            assert torch.equal(unpacked(weights.load_packed("up.weight"), packing), wanted)


def test_zero_points_of_gptq_carry() -> None:
    """A zero point of 0 borrows from the next one, as in the library that writes them."""
    torch.manual_seed(0)
    tensors, _ = gptq(8, 128)
    tensors["qzeros"] = torch.tensor([[0x11111110 - 0x11111111]], dtype=torch.int32)
    _, zeros, _ = opened(GPTQ, tensors)._find("up.weight").by_output()
    assert zeros.flatten().tolist() == [0, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quant_method": "hqq"}, "hqq"), ({"quant_method": "mxfp4"}, "mxfp4"), ({}, "unknown"),
        ({"load_in_4bit": True}, "load_in_4bit"), (BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        (GPTQ | {"bits": 3}, "gptq, 3 bits"), (GPTQ | {"group_size": 0}, "group_size 0"),
        (GPTQ | {"bits": "4"}, "bits 4"),
        (GPTQ | {"group_size": -2}, "group_size -2"), (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
        (AWQ | {"version": "gemv"}, "awq, gemv"), (AWQ | {"bits": 8}, "awq, 8 bits"),
        (FP8 | {"weight_block_size": [128]}, "fp8"), (FP8 | {"weight_block_size": [0, 128]}, "block 0"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"), (ct("nvfp4-pack-quantized"), "nvfp4"),
        (ct("pack-quantized", num_bits=3), "int of 3 bits"),
        (ct("float-quantized", type="float", num_bits=4), "float of 4"),
        (PACKED | {"transform_config": {"config_groups": {}}}, "transforms"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
    ],
)  # fmt: skip
def test_other_methods_are_refused_by_name(settings: dict[str, Any], method: str) -> None:
    with pytest.raises(ModelError, match=method) as caught:
        opened(settings, {})
    assert "\n" not in str(caught.value)


def without(leaf: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(leaf)


def with_(leaf: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({leaf: tensor})


@pytest.mark.parametrize(
    ("case", "change", "named"),
    [
        ("gptq", without("scales"), "up.scales"),
        ("gptq", without("qweight"), "up.qweight"),
        ("gptq", with_("extra", torch.ones(1)), "up.extra"),
        ("gptq", with_("weight", torch.ones(8, 256)), "up.weight"),
        ("gptq", with_("qzeros", torch.ones(1, 1).int()), "up.qzeros"),
        ("gptq", with_("qweight", torch.ones(0, 8).int()), "up.qweight"),
        ("gptq", with_("qweight", torch.ones(32, 8)), "up.qweight"),
        ("gptq", with_("qweight", torch.ones(4).int()), "up.qweight"),
        ("gptq", with_("g_idx", torch.full((256,), 2).int()), "up.g_idx"),
        ("gptq", with_("g_idx", torch.full((256,), -1).int()), "up.g_idx"),
        ("gptq", with_("g_idx", torch.zeros(7).int()), "up.g_idx"),
        ("awq", with_("g_idx", torch.zeros(256).int()), "up.g_idx"),
        ("awq", with_("scales", torch.ones(3, 8)), "up.scales"),
        ("packed", with_("weight_shape", torch.tensor([8, 2**60])), "up.weight_packed"),
        ("packed", with_("weight_shape", torch.tensor([8, -256])), "up.weight_packed"),
        ("packed", with_("weight_global_scale", torch.ones(1)), "up.weight_global_scale"),
        ("packed", with_("weight_zero_point", torch.ones(8, 2)), "up.weight_zero_point"),
        ("int8", with_("weight", torch.ones(8, 256).to(torch.float8_e4m3fn)), "up.weight"),
        ("int8", with_("weight_scale", torch.ones(3, 1)), "up.weight_scale"),
        ("int8 with zeros", without("weight_zero_point"), "up.weight_zero_point"),
        ("fp8", without("weight_scale_inv"), "up.weight"),
        ("fp8", with_("weight_scale", torch.ones(1)), "weight_scale"),
        ("fp8", with_("weight", torch.ones(8, 256, dtype=torch.int8)), "up.weight"),
        ("bitsandbytes", with_("weight_format", torch.tensor(2, dtype=torch.uint8)), "up.weight_format"),
        ("bitsandbytes", without("weight"), "up.weight"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(case: str, change: Callable[[Any], None], named: str) -> None:
    settings, encode, _ = LAYOUTS[case]
    tensors, _ = encode(8, 256)
    change(tensors)
    with pytest.raises(ModelError, match=named.replace(".", r"\.")) as caught:
        opened(settings, tensors).packing("up.weight")
    assert "\n" not in str(caught.value)


def save_quantized(folder: Path, case: str) -> None:
    """Save the small Llama of `save_model` with its linear layers quantized, and in `plain` with their numbers."""
    settings, encode, _ = LAYOUTS[case]
    (folder / "plain").mkdir(parents=True)
    for each in (folder, folder / "plain"):
        save_model(each, hidden_size=128, intermediate_size=256)
    tensors, plain = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if "_proj" in name]:
        made, plain[name] = encode(*tensors.pop(name).shape)
        tensors |= {f"{name.removesuffix('weight')}{leaf}": tensor for leaf, tensor in made.items()}
        if case == "gptq":
            tensors[name.replace("weight", "bias")] = torch.zeros(plain[name].shape[0])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = folder / "plain" / "model.safetensors"
    save_file(load_file(file) | plain, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def answers(folder: Path, runtime: str, stages: int) -> list[tuple[list[int], list[float]]]:
    settings = TextSettings(model=f"hf:{folder}", max_length=64, runtime=runtime, stages=stages, slots=2)
    with open_generator(settings) as generator:
        prompts = ["A pipe", "The turbine turns", "Water"]
        asked = [generator.submit(prompt, max_new_tokens=12, do_sample=False) for prompt in prompts]
        together = [(request.result(), request.logprobs) for request in asked]
        alone = generator.submit(prompts[0], max_new_tokens=12, do_sample=False)
        assert (alone.result(), alone.logprobs) == together[0]
    return together


@pytest.mark.parametrize("case", ["packed with zeros", long("gptq"), long("awq"), long("int8")])
def test_products_in_the_integers_of_a_checkpoint(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_quantized(tmp_path, case)
    wanted = answers(tmp_path / "plain", "eager", 1)
    exact = answers(tmp_path, "onnxruntime:stored32", 2)
    assert [tokens for tokens, _ in exact] == [tokens for tokens, _ in wanted]
    for (_, found), (_, scores) in zip(exact, wanted, strict=True):
        assert found == pytest.approx(scores, abs=1e-4)
    if case == "gptq":
        assert answers(tmp_path, "eager", 2) == wanted
    if case == "packed with zeros":
        assert answers(tmp_path, "onnxruntime:stored", 2) == answers(tmp_path, "onnxruntime:stored", 1)


def test_floats_of_8_bits_are_unpacked_or_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_quantized(tmp_path, "fp8")
    assert answers(tmp_path, "eager", 2) == answers(tmp_path / "plain", "eager", 1)
    with pytest.raises(UsageError, match="no products in F8_128"):
        answers(tmp_path, "onnxruntime:stored", 1)


def test_experts_are_joined_from_quantized_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    tensors, plain = load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in tensors if "experts." in name]:
        made, plain[name] = LAYOUTS["fp8"][1](*tensors.pop(name).shape)
        tensors |= {f"{name.removesuffix('weight')}{leaf}": tensor for leaf, tensor in made.items()}
    assert plain
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": FP8}))
    found = load_model(f"hf:{tmp_path}").weights
    joined = [found.load(name) for name in found.names() if "experts." in name]
    ours, wanted = (torch.cat([x.flatten() for x in each]).sort()[0] for each in (joined, list(plain.values())))
    assert torch.equal(ours, wanted)


def test_scales_that_no_layer_takes_are_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, "awq")
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.act_fn"
    tensors = load_file(file)
    for more, taken in (("model.layers.0.self_attn.k_scale", True), ("score.weight", True), (f"{name}.scales", False),
                        ("model.layers.0.mlp.up_proj.bias", False)):  # fmt: skip
        save_file(tensors | {more: torch.ones(2)}, file, {"format": "pt"})
        if taken:
            assert more not in load_model(f"hf:{tmp_path}").weights.names()
        else:
            with pytest.raises(ModelError, match=more.rpartition(".")[0]):
                load_model(f"hf:{tmp_path}")
