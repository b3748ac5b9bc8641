"""Small models of many families with random weights, which transformers itself generates with."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from penstock.deploy.state import load_state
from penstock.graph.graph import Graph
from penstock.zoo.weights.weights import ModuleWeights

_SIZE = {
    "vocab_size": 120, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GROUPED = _SIZE | {"num_key_value_heads": 2}
_WIDE = _GROUPED | {"head_dim": 16}
_SLIDING = {"sliding_window": 24}
_RECURRENT = {"vocab_size": 120, "hidden_size": 48, "num_hidden_layers": 3, "state_size": 8}
_BART = {
    "vocab_size": 120, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 2, "forced_eos_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
_T5 = {"vocab_size": 120, "d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 3, "num_heads": 4,
       "decoder_start_token_id": 0, "tie_word_embeddings": False}  # fmt: skip
# configuration, its fields
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"vocab_size": 120, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "llama": ("LlamaConfig", _GROUPED),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen2-sliding": ("Qwen2Config", _GROUPED | _SLIDING | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", _WIDE),
    "mistral": ("MistralConfig", _WIDE | _SLIDING),
    "mixtral": ("MixtralConfig", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("GemmaConfig", _WIDE),
    "gemma2": ("Gemma2Config", _WIDE | _SLIDING | {"query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", _WIDE | _SLIDING | {"query_pre_attn_scalar": 16, "sliding_window_pattern": 2}),
    "phi": ("PhiConfig", _SIZE),
    "phi3": ("Phi3Config", _GROUPED),
    "opt": ("OPTConfig", {"vocab_size": 120, "hidden_size": 48, "ffn_dim": 96, "num_hidden_layers": 3,
                          "num_attention_heads": 4, "max_position_embeddings": 256, "word_embed_proj_dim": 48}),
    "stablelm": ("StableLmConfig", _GROUPED | {"partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2Config", _GROUPED),
    "cohere": ("CohereConfig", _GROUPED),
    "smollm3": ("SmolLM3Config", _GROUPED),
    "granite": ("GraniteConfig", _GROUPED),
    "gpt-neox": ("GPTNeoXConfig", _SIZE),
    "falcon": ("FalconConfig", {"vocab_size": 120, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
                                "alibi": False, "new_decoder_architecture": False, "multi_query": True}),
    "starcoder2": ("Starcoder2Config", _GROUPED),
    "glm": ("GlmConfig", _WIDE),
    "nemotron": ("NemotronConfig", _GROUPED),
    "helium": ("HeliumConfig", _GROUPED | {"head_dim": 12}),
    "olmo": ("OlmoConfig", _GROUPED),
    "codegen": ("CodeGenConfig", {"vocab_size": 120, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256,
                                  "n_ctx": 256, "rotary_dim": 8}),
    "gpt-j": ("GPTJConfig", {"vocab_size": 120, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256,
                             "rotary_dim": 8}),
    "biogpt": ("BioGptConfig", _SIZE),
    "ernie": ("Ernie4_5Config", _WIDE),
    "exaone4": ("Exaone4Config", _GROUPED | _SLIDING),
    "bloom": ("BloomConfig", {"vocab_size": 120, "hidden_size": 48, "n_layer": 3, "n_head": 6,
                              "tie_word_embeddings": False}),
    "falcon-alibi": ("FalconConfig", {"vocab_size": 120, "hidden_size": 48, "num_hidden_layers": 3,
                                      "num_attention_heads": 4, "alibi": True, "multi_query": True}),
    "mpt": ("MptConfig", {"vocab_size": 120, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 256,
                          "tie_word_embeddings": False}),
    "llama4": ("Llama4TextConfig", _WIDE | {"attention_chunk_size": 24, "num_local_experts": 4,
                                            "intermediate_size_mlp": 96}),
    "mamba": ("MambaConfig", _RECURRENT),
    "mamba2": ("Mamba2Config", _RECURRENT | {"num_heads": 12, "head_dim": 8, "n_groups": 2, "chunk_size": 16}),
    "falcon-mamba": ("FalconMambaConfig", _RECURRENT),
    "jamba": ("JambaConfig", _GROUPED | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
                                         "expert_layer_period": 2, "num_experts": 4, "mamba_d_state": 8,
                                         "mamba_dt_rank": 4}),
    "lfm2": ("Lfm2Config", _GROUPED | {"layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3-next": ("Qwen3NextConfig", _WIDE | {
        "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32}),
    "t5": ("T5Config", _T5),
    "umt5": ("UMT5Config", _T5),
    "bart": ("BartConfig", _BART),
    "mbart": ("MBartConfig", _BART),
    "marian": ("MarianConfig", _BART | {"decoder_vocab_size": 120}),
    "pegasus": ("PegasusConfig", _BART),
    "m2m100": ("M2M100Config", _BART),
    "bart-decoder": ("BartConfig", {"vocab_size": 120, "d_model": 48, "decoder_layers": 3, "decoder_ffn_dim": 96,
                                    "decoder_attention_heads": 4, "max_position_embeddings": 256,
                                    "forced_eos_token_id": None, "is_encoder_decoder": False}),
    "bert": ("BertConfig", _SIZE | {"is_decoder": True}),
    "gpt-neo": ("GPTNeoConfig", {"vocab_size": 120, "hidden_size": 48, "num_layers": 4, "num_heads": 4,
                                 "max_position_embeddings": 256, "window_size": 16, "bos_token_id": 1,
                                 "eos_token_id": 2, "attention_types": [[["global", "local"], 2]]}),
    "phi3-longrope": ("Phi3Config", _GROUPED | {"original_max_position_embeddings": 128, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}}),
    "llama-dynamic": ("LlamaConfig", _GROUPED | {"max_position_embeddings": 128, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
    "qwen3-moe": ("Qwen3MoeConfig", _WIDE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}  # fmt: skip


_TABLES = ("embed", "wte", "wpe", "head", "embd", "shared")


def spread(model: Any) -> None:
    """Move a model's logits far apart, so that the likeliest token is not a matter of rounding."""
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1 and not any(word in path for word in _TABLES):
                parameter.mul_(6.0)


def decoder(name: str) -> Any:
    """Make a family's model in evaluation mode, with the weights of seed 0 and logits far apart."""
    kind, fields = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**fields)
    encodes = config.is_encoder_decoder
    kinds = transformers.AutoModelForSeq2SeqLM if encodes else transformers.AutoModelForCausalLM
    model = kinds.from_config(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = (
        None,
        0,
    )  # only a test that asks ends early
    spread(model)
    return model


def prompts(*lengths: int) -> list[list[int]]:
    """Make prompts of tokens that end nothing."""
    random = torch.Generator().manual_seed(1)
    return [torch.randint(3, 120, (length,), generator=random).tolist() for length in lengths]


def expected(model: Any, prompt: list[int], **kwargs: Any) -> list[int]:
    """What transformers generates, without the prompt or what an encoder-decoder begins with."""
    before = 1 if model.config.is_encoder_decoder else len(prompt)
    found: list[int] = model.generate(torch.tensor([prompt]), **kwargs)[0, before:].tolist()
    return found


def tensors_of(graph: Graph, model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a captured model's state, without caches."""
    weights = ModuleWeights(model)
    return {state.value.name: load_state(graph, state, weights) for state in graph.states if state.kind != "cache"}
