"""A small tokenizer of bytes, as people's own have them, whose characters may need several tokens."""

from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = "A pipe that carries water to a turbine is a penstock. The water flows, the turbine turns. " * 4


def tokenizer() -> Any:
    """Make one of 300 tokens with a chat template, whose text ends at <|end|>."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain.train_from_iterator([_TEXT], trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<|end|>", bos_token="<|end|>", additional_special_tokens=special[1:]
    )
    made.chat_template = TEMPLATE
    return made


def save_model(folder: Path, *, ends: bool = True, **sizes: int) -> None:
    """Save a small decoder with random weights and the tokenizer; its answers end at <|end|> if `ends`."""
    import torch

    made = tokenizer()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(made), bos_token_id=0, eos_token_id=0, pad_token_id=0,
        **{"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
           "num_key_value_heads": 2, "max_position_embeddings": 512, **sizes},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in path and "head" not in path:
                parameter.mul_(6.0)
    model.generation_config.eos_token_id = 0 if ends else None
    made.save_pretrained(folder)
    model.save_pretrained(folder)


def spaced() -> Any:
    """Make a tokenizer whose tokens begin with their space, as SentencePiece's, and whose texts lose the first one."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.Metaspace()
    plain.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<s>", "</s>"], show_progress=False)
    plain.train_from_iterator([_TEXT], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>")
