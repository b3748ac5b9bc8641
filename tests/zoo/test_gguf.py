"""GGUF files: the tokens of the model that was written, and one line for what is no such file."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import transformers

from penstock.compress.measure import OnRuntimes
from penstock.errors import ModelError, PlanError, UsageError
from penstock.packing import packed_shape
from penstock.recipes.texts import answer_ends, open_generator
from penstock.spec.settings import TextSettings
from penstock.zoo.models.gguf_models import gguf_file
from penstock.zoo.models.models import load_model
from tests.generate.tokens import TEMPLATE, save_model
from tests.test_packing import raw_weight

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")


# of random blocks, for weights of about the size of a model's
_SCALES = {"Q8_0": 1e-3, "Q4_K": 3e-4, "Q5_K": 1e-4, "Q6_K": 1e-4}
# what llama.cpp calls Q4_K_M, with others for the rest
MIXTURE = {
    "token_embd": "Q6_K",
    "attn_q": "Q4_K",
    "attn_k": "Q5_K",
    "attn_v": "Q6_K",
    "attn_output": "Q4_1",
    "ffn_gate": "Q4_K",
    "ffn_up": "Q5_1",
    "ffn_down": "Q8_0",
    "output": "Q4_0",
}
HALVES = {**dict.fromkeys(MIXTURE, "BF16"), "attn_q": "F16", "ffn_down": "F16", "token_embd": "F16"}  # fmt: skip


def permuted(weight: Any, heads: int) -> Any:
    """Order rows of queries and keys as llama.cpp has them, whose rotary embedding pairs neighbours."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, rows, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path, target: Path, packings: Mapping[str, str] | None = None, more: Mapping[str, Any] | None = None,
    hole: Mapping[str, int] | None = None,
) -> Any:  # fmt: skip
    """Write the small Llama of a folder as GGUF; returns it.

    Weights whose name ends with a name in `packings` are random blocks instead; `more` are further tensors. With the
    sizes `hole`, the file is of such a model and has a hole where its tensors are, which reads as zeros.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    if hole:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**model.config.to_dict(), **hole}))
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    config = model.config
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    plain = tokenizer.backend_tokenizer.to_str()
    # transformers adds this token to such a vocabulary, if it is not there
    tokenizer.add_tokens(["<|endoftext|>"], special_tokens=True)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = json.loads(plain)["model"]["merges"]
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3 if word.startswith("<|") else 1 for word in words])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_eom_token_id(3)
    writer.add_chat_template(TEMPLATE)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
             "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}  # fmt: skip
    num_bytes = 0
    for path, tensor in model.state_dict().items():
        name = path.replace("model.layers.", "blk.")
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        packing = next((kind for end, kind in (packings or {}).items() if name.endswith(f"{end}.weight")), None)
        if hole:
            shape = packed_shape(packing, tuple(tensor.shape)) if packing else tuple(tensor.shape)
            stored = np.dtype(np.uint8 if packing else np.float32)
            kind = gguf.GGMLQuantizationType[packing or "F32"]
            writer.add_tensor_info(name, shape, stored, prod(shape) * stored.itemsize, kind)
            num_bytes += -(-prod(shape) * stored.itemsize // 32) * 32
            continue
        values = tensor.numpy().astype(np.float32)
        if "attn_q" in name or "attn_k" in name:
            heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
            values = permuted(values, heads)
        if packing is None:
            writer.add_tensor(name, np.ascontiguousarray(values))
            continue
        kind = gguf.GGMLQuantizationType[packing]
        rows, inputs = tensor.shape
        raw = raw_weight(packing, rows, inputs, _SCALES.get(packing, 0.01)).numpy()
        writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=kind)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file() if hole else writer.write_tensors_to_file()
    writer.close()
    if hole:
        os.truncate(target, -(-target.stat().st_size // 32) * 32 + num_bytes)
    return model


def test_the_tokens_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "small_model_package"
    package.mkdir()
    (package / "__init__.py").touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    save_model(folder)
    model = write_gguf(folder, package / "small.gguf")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (f"gguf:{package / 'small.gguf'}", "gguf:small_model_package"):
        with open_generator(TextSettings(model=name, stages=2, max_length=64)) as generator:
            ids = generator.tokenizer("A pipe")["input_ids"]
            found = generator.submit(ids, max_new_tokens=12, do_sample=False, eos_token_id=None).result()
            assert answer_ends(generator, name) == [0, 2, 3]
        wanted = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert found == wanted[0, len(ids) :].tolist()
    assert "small_model_package" not in sys.modules


def small_file(folder: Path, packings: Mapping[str, str]) -> Path:
    """Write a file of a small Llama in these formats."""
    save_model(folder, hidden_size=256, intermediate_size=512)
    write_gguf(folder, folder / "small.gguf", packings)
    return folder / "small.gguf"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in many formats."""
    return small_file(tmp_path_factory.mktemp("mixture"), MIXTURE)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in 16 bits."""
    return small_file(tmp_path_factory.mktemp("halves"), HALVES)


@pytest.mark.parametrize("file", ["mixture", "halves"])
def test_each_tensor_is_that_of_transformers(file: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(file)
    zoo = load_model(f"gguf:{path}")
    whole = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        assert torch.equal(zoo.weights.load(name), tensor.detach().float()), name


Answers: TypeAlias = list[tuple[list[int], list[float]]]


def answers(file: Path, runtime: str, stages: int) -> Answers:
    """Return tokens and log-probabilities of some prompts, together and one of them alone."""
    prompts = ["A pipe", "The turbine turns", "Water"]
    settings = TextSettings(model=f"gguf:{file}", max_length=64, runtime=runtime, stages=stages, slots=2)
    with open_generator(settings) as generator:
        asked = [generator.submit(prompt, max_new_tokens=12, do_sample=False) for prompt in prompts]
        together = [(request.result(), request.logprobs) for request in asked]
        alone = generator.submit(prompts[0], max_new_tokens=12, do_sample=False)
        assert (alone.result(), alone.logprobs) == together[0]
        (pipeline,) = generator.pipeline.deployment.pipelines
        held = sum(pipeline.stage_bytes) - sum(pipeline.cache_bytes)
        assert (held < file.stat().st_size * 1.2) == ("stored" in runtime)
    return together


def assert_equal_tokens(exact: Answers, wanted: Answers) -> None:
    """Compare tokens, and their log-probabilities within what an order of sums changes."""
    assert [tokens for tokens, _ in exact] == [tokens for tokens, _ in wanted]
    for (_, found), (_, scores) in zip(exact, wanted, strict=True):
        assert found == pytest.approx(scores, abs=1e-4)


def test_products_in_the_blocks_of_a_file(mixture: Path) -> None:
    wanted = answers(mixture, "eager", 1)
    assert_equal_tokens(answers(mixture, "onnxruntime:stored32", 2), wanted)
    one, two = answers(mixture, "onnxruntime:stored", 1), answers(mixture, "onnxruntime:stored", 2)
    assert one == two  # inputs are rounded to 8 bits: other numbers than eager's, the same whatever the cuts
    for (_, found), (_, scores) in zip(one, wanted, strict=True):
        assert found[0] == pytest.approx(scores[0], abs=0.1)


def test_products_of_16_bits_are_exact(halves: Path) -> None:
    assert_equal_tokens(answers(halves, "onnxruntime:stored", 2), answers(halves, "eager", 1))


def test_stored_refuses_weights_without_blocks(tmp_path: Path) -> None:
    save_model(tmp_path)
    with pytest.raises(UsageError, match="this model has none"):
        open_generator(TextSettings(model=f"hf:{tmp_path}", runtime="onnxruntime:stored"))
    layer = OnRuntimes(torch.nn.Linear(32, 32), (torch.randn(1, 32),))
    with pytest.raises(PlanError, match="this stage has none"):
        layer.load("onnxruntime:stored")


@pytest.mark.long
def test_first_process_stays_small_with_a_file_of_8_gb(tmp_path: Path) -> None:
    save_model(tmp_path)
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 44, "num_attention_heads": 32,
             "num_key_value_heads": 8}  # fmt: skip
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    write_gguf(tmp_path, tmp_path / "large.gguf", dict.fromkeys(names, "Q8_0"), hole=sizes)
    assert (tmp_path / "large.gguf").stat().st_size > 8e9
    imports = [sys.executable, "-c", "from transformers import LlamaForCausalLM"]
    split = [sys.executable, "-m", "penstock", "split", f"gguf:{tmp_path / 'large.gguf'}", "--stages", "4"]
    assert peak_bytes(split) < peak_bytes(imports) + 400e6


def peak_bytes(command: list[str]) -> int:
    """Run a command; return the most memory that it had resident."""
    measure = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=sys.stderr); "
    measure += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    return int(subprocess.check_output([sys.executable, "-c", measure, *command])) * 1024


def replaced(raw: bytes, at: int, form: str, value: int) -> bytes:
    """Return the bytes with a number written at a place."""
    number = struct.pack(form, value)
    return raw[:at] + number + raw[at + len(number) :]


def test_false_header_is_one_line(mixture: Path, tmp_path: Path) -> None:
    raw = mixture.read_bytes()
    words = raw.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")  # then: a type, its type, a length
    tensor = raw.index(b"blk.0.attn_k.weight") + len(b"blk.0.attn_k.weight")  # then: 2 dimensions, a type, an offset
    lies = {
        "tensors": replaced(raw, 8, "<Q", 2**60), "entries": replaced(raw, 16, "<Q", 2**60),
        "a string": replaced(raw, 24, "<Q", 2**60), "words": replaced(raw, words + 8, "<Q", 2**60),
        "type of words": replaced(raw, words + 4, "<I", 77), "a word": replaced(raw, words + 16, "<Q", 2**60),
        "a size": replaced(raw, tensor + 4, "<Q", 2**40), "another size": replaced(raw, tensor + 4, "<Q", 512),
        "a type": replaced(raw, tensor + 20, "<I", 99), "a place": replaced(raw, tensor + 24, "<Q", 2**50),
        "half": raw[: len(raw) // 2], "nothing": b"",
    }  # fmt: skip
    for lie, content in lies.items():
        file = tmp_path / f"{lie}.gguf"
        file.write_bytes(content)
        with pytest.raises(ModelError):
            load_model(f"gguf:{file}").weights.load("model.layers.0.self_attn.k_proj.weight")


def test_a_file_that_changes_is_refused(mixture: Path, tmp_path: Path) -> None:
    file = tmp_path / "changing.gguf"
    file.write_bytes(mixture.read_bytes())
    weights = load_model(f"gguf:{file}").weights
    os.truncate(file, mixture.stat().st_size - 100)
    with pytest.raises(ModelError, match="has changed"):
        weights.load("lm_head.weight")


def test_factors_of_rotary_frequencies(tmp_path: Path) -> None:
    save_model(tmp_path)
    factors = np.linspace(1, 8, 6, dtype=np.float32)
    write_gguf(tmp_path, tmp_path / "plain.gguf")
    write_gguf(tmp_path, tmp_path / "scaled.gguf", more={"rope_freqs.weight": factors})
    plain, scaled = (
        dict(load_model(f"gguf:{tmp_path}/{name}.gguf").module.named_buffers()) for name in ("plain", "scaled")
    )
    for name, buffer in plain.items():
        if name.endswith("inv_freq"):
            assert torch.allclose(scaled[name] * torch.from_numpy(factors), buffer)
    write_gguf(tmp_path, tmp_path / "other.gguf", more={"blk.0.attn_q_norm.weight": factors})
    with pytest.raises(ModelError, match="attn_q_norm"):
        load_model(f"gguf:{tmp_path}/other.gguf")


def test_invalid_gguf_file_is_refused(tmp_path: Path) -> None:
    for name in (f"gguf:{tmp_path / 'none.gguf'}", "gguf:json", "gguf:no_such_package", "gguf:"):
        with pytest.raises(ModelError):
            gguf_file(name)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 20)
    with pytest.raises(ModelError, match="broken"):
        open_generator(TextSettings(model=f"gguf:{broken}"))
