"""Run with `python -m benchmarks.generation.decoders --json FILE [--only NAME ...]`.

Every decoder that this version of transformers has generates with random weights in a small size, by `model.generate`
and by a `Generator`: prompts of 5, 33 and 70 tokens together, with a window of 8 and of 40 tokens if the model has one.
Each runs in a process of its own, for at most 150 seconds. The last lines are the table of docs/generation.md.
"""

import argparse
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import torch
import transformers

from penstock.errors import UsageError
from penstock.generate.generator import Generator
from penstock.text import one_line
from tests.generate.decoders import FAMILIES, expected, prompts, spread

_LIMIT_S, _MOST_PARAMETERS = 150, 30_000_000
_LENGTHS, _NEW, _ROOM = (5, 33, 70), 24, 128
_WINDOWS = (8, 40)
_WINDOW_FIELDS = {"window_size", "sliding_window", "attention_chunk_size", "local_attention"}
# sizes, for those of these fields that a configuration has
_SMALL = {
    "vocab_size": 120, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 48),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3), "encoder_layers": 2,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                     "decoder_attention_heads"), 4), "decoder_layers": 2,
    "num_key_value_heads": 2, "head_dim": 16, "d_kv": 12, "rotary_dim": 8, "state_size": 8, "mamba_d_state": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    "vocab_size_per_layer_input": 120, "hidden_size_per_layer_input": 16, "laurel_rank": 8, "depth": 2,
    "image_size": 32, "patch_size": 16, "base_channels": 32, "codebook_size": 64, "attention_heads": 4,
    **dict.fromkeys(("vision_output_dim", "out_hidden_size", "adapter_out_dim", "projection_dim"), 48),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "adapter_in_dim", "output_proj_dims"), 48),
}  # fmt: skip
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_HEADS = {"head_dim": 12}
_MIXED = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
_SHARED = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
}
# by the type of a model or of a part of it; None leaves the configuration's own value
_CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "longcat_flash", "glm4_moe_lite", "glm_moe_dsa",
                     "minicpm3"), _LATENT),
    "deepseek_v2": _LATENT | {"topk_method": "greedy", "num_experts_per_tok": 2},
    "bamba": {"mamba_n_heads": 12, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "granitemoehybrid": _MIXED | {"mamba_n_heads": 12, "mamba_d_head": 8},
    "kimi_linear": _MIXED | _LATENT | {"linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": _MIXED | _LATENT,
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), _HEADS),
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "max_window_layers": 1},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 96, "hidden_size": 48}},
    "cohere_compass_text": {"layer_types": ["full_attention", "sliding_attention", "full_attention"],
                            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0}
                                                for kind in ("full_attention", "sliding_attention")}},
    "dots3_note_text": _LATENT | {
        "num_attention_heads": 4, "use_dsa": False, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 16,
        "swa_q_lora_rank": 24, "swa_kv_lora_rank": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4},
    "encoder-decoder": {"decoder_start_token_id": 1},
    "gemma3n_text": _SHARED | {"activation_sparsity_pattern": None, "intermediate_size": 96},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _SHARED | {"num_attention_heads": 4, "head_dim": 16}),
    "longt5": {"decoder_start_token_id": 0}, "switch_transformers": {"decoder_start_token_id": 0},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), _MIXED),
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "youtu": _LATENT, "zaya": {"num_experts_per_tok": 1}, "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba"]},
    "xlstm": {"v_head_dim": None}, "reformer": {"axial_pos_embds": False}, "xmod": {"default_language": "en_XX"},
}  # fmt: skip


def main() -> None:
    """Try every decoder, and print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.generation.decoders", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write rows; those in it are not run again")
    parser.add_argument("--only", nargs="*", help="names of model types")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(given.json.read_text()) if given.json.exists() else []
    known = {row["decoder"] for row in rows}
    for name, (kind, encodes) in decoders().items():
        if name in (given.only or [name]) and name not in known:
            rows.append(apart(name, kind, encodes))
            given.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(*table(rows), sep="\n")


def decoders() -> dict[str, tuple[Any, bool]]:
    """Return the configuration of every decoder, and whether it has an encoder."""
    found = {kind.model_type: (kind, False) for kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING}
    for kind in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        found.setdefault(f"{kind.model_type} (with encoder)", (kind, True))
    return dict(sorted(found.items()))


def apart(name: str, kind: Any, encodes: bool) -> dict[str, str]:
    """Try one decoder in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_LIMIT_S)
        os.write(writer, json.dumps(attempt(kind, encodes)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    result, reason = json.loads(data) if data else ("not tried", f"no result within {_LIMIT_S} s in its default size")
    return {"decoder": name, "result": result, "reason": reason}


def attempt(kind: Any, encodes: bool) -> tuple[str, str]:
    """Compare tokens; returns the result and its reason."""
    # a survey records whatever goes wrong
    try:
        for window in _WINDOWS:
            model = small(kind, window, encodes)
            if sum(parameter.numel() for parameter in model.parameters()) > _MOST_PARAMETERS:
                return "not tried", "its parts besides the decoder cannot be made small"
            given = prompts(*_LENGTHS)
            wanted = [expected(model, prompt, max_new_tokens=_NEW, do_sample=False) for prompt in given]
            try:
                with Generator(model, stages=1, slots=len(given), max_length=_ROOM) as generator:
                    requests = [generator.submit(prompt, max_new_tokens=_NEW) for prompt in given]
                    found = [request.result() for request in requests]
            except UsageError as error:
                return "refused", one_line(error).partition(";")[0]
            if found != wanted:
                return "differs", f"with a window of {window}"
    except Exception as error:
        return "not tried", f"{type(error).__name__}: {one_line(error)}"[:200]
    return "equal", ""


def small(kind: Any, window: int, encodes: bool) -> Any:
    """Make a small model with random weights and logits far apart."""
    families = dict(reversed(FAMILIES.values()))
    base = kind()
    fields = dict(families[kind.__name__]) if kind.__name__ in families else sizes(base, window)
    fields |= {field: window for field in _WINDOW_FIELDS if _is_number(base, field) or field in fields}
    torch.manual_seed(0)
    auto = transformers.AutoModelForSeq2SeqLM if encodes else transformers.AutoModelForCausalLM
    model = auto.from_config(kind(**fields)).eval()
    own = model.generation_config
    own.eos_token_id, own.pad_token_id, own.forced_eos_token_id, own.encoder_no_repeat_ngram_size = None, 0, None, 0
    spread(model)
    return model


def sizes(base: Any, window: int) -> dict[str, Any]:
    """Return the fields that make a model small, with those of its parts."""
    fields: dict[str, Any] = {field: value for field, value in _SMALL.items() if _is_number(base, field)}
    fields |= {field: window for field in _WINDOW_FIELDS if _is_number(base, field)}
    for field in base.sub_configs:
        part = getattr(base, field)
        if part is not None:
            fields[field] = {"model_type": part.model_type, **sizes(part, window)}
    fields |= _CHANGES.get(base.model_type, {})
    return {field: value for field, value in fields.items() if value is not None}


def _is_number(base: Any, field: str) -> bool:
    try:
        return isinstance(getattr(base, field, None), (bool, int))
    except RuntimeError:  # one of a layer, which differs between layers
        return False


def table(rows: list[dict[str, str]]) -> list[str]:
    """Return the lines of the table: names by result, and by reason where there is one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        reason = re.sub(r"^\w+ (cannot|asks|keeps|has|does)\b", r"\1", row["reason"])
        groups.setdefault((row["result"], reason), []).append(row["decoder"])
    lines = ["| result | decoders | reason |", "| --- | --- | --- |"]
    order = ["equal", "refused", "differs", "not tried"]
    for (result, reason), names in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), -len(item[1]))):
        lines.append(f"| {result} ({len(names)}) | {', '.join(names)} | {reason} |")
    return lines


if __name__ == "__main__":
    main()
