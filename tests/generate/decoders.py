"""Small decoders of many families with random weights, which transformers itself generates with."""

from typing import Any

import torch
import transformers

_SIZE = {
    "vocab_size": 120, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GROUPED = _SIZE | {"num_key_value_heads": 2}
_WIDE = _GROUPED | {"head_dim": 16}
_SLIDING = {"sliding_window": 24}
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
    "qwen3-moe": ("Qwen3MoeConfig", _WIDE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}  # fmt: skip


def decoder(name: str) -> Any:
    """Make a family's model in evaluation mode, with the weights of seed 0 and logits far apart."""
    kind, fields = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = (
        None,
        0,
    )  # only a test that asks ends early
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1 and not any(word in path for word in ("embed", "wte", "wpe", "head", "embd")):
                parameter.mul_(6.0)
    return model


def prompts(*lengths: int) -> list[list[int]]:
    """Make prompts of tokens that end nothing."""
    random = torch.Generator().manual_seed(1)
    return [torch.randint(3, 120, (length,), generator=random).tolist() for length in lengths]


def expected(model: Any, prompt: list[int], **kwargs: Any) -> list[int]:
    """What transformers generates, without the prompt."""
    found: list[int] = model.generate(torch.tensor([prompt]), **kwargs)[0, len(prompt) :].tolist()
    return found
