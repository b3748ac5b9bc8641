"""GGUF files: the tokens of the model that was written, and one line for what is no such file."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.errors import ModelError
from penstock.recipes.texts import answer_ends, open_generator
from penstock.spec.settings import TextSettings
from penstock.zoo.models.gguf_models import gguf_file
from tests.generate.tokens import TEMPLATE, save_model

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")


def permuted(weight: Any, heads: int) -> Any:
    """Order rows of queries and keys as llama.cpp has them, whose rotary embedding pairs neighbours."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, rows, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder: Path, target: Path) -> Any:
    """Write the small Llama of a folder as GGUF; returns it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
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
    model.resize_token_embeddings(len(tokenizer))
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
    for path, tensor in model.state_dict().items():
        name = path.replace("model.layers.", "blk.")
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        values = tensor.numpy().astype(np.float32)
        if "attn_q" in name or "attn_k" in name:
            heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
            values = permuted(values, heads)
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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


def test_what_is_no_such_file(tmp_path: Path) -> None:
    for name in (f"gguf:{tmp_path / 'none.gguf'}", "gguf:json", "gguf:no_such_package", "gguf:"):
        with pytest.raises(ModelError):
            gguf_file(name)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 20)
    with pytest.raises(ModelError, match="broken"):
        open_generator(TextSettings(model=f"gguf:{broken}"))
