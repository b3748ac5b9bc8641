"""Causal language modelling: a text file in blocks of tokens."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.errors import DataError, UsageError
from penstock.recipes.settings import FitSettings
from penstock.recipes.tasks import SHARE_KEPT, Rows, Task, load_for, logits_of
from penstock.zoo.data.texts import read_tokenizer, train_tokenizer
from penstock.zoo.models.models import ZooModel, parse_hf


def language_task(settings: FitSettings) -> Task:
    """Prepare to learn a text; raises `DataError` for a text that is too short, `UsageError` for other models."""
    zoo, weights, new = load_for(settings, settings.model, "language")
    text = read_text(settings.data)
    config = text_config(zoo, settings.model)
    positions = getattr(config, "max_position_embeddings", None) or settings.length
    if settings.length > positions:
        raise UsageError(f"{settings.model} takes at most {positions} tokens, not {settings.length}; lower --length")
    tokenizer = find_tokenizer(settings.model) or train_tokenizer(text.splitlines(keepends=True), config.vocab_size)
    if settings.validation:
        blocks, kept = _blocks(tokenizer, text, settings), _blocks(tokenizer, read_text(settings.validation), settings)
    else:
        edge = len(text) * (SHARE_KEPT - 1) // SHARE_KEPT
        blocks, kept = _blocks(tokenizer, text[:edge], settings), _blocks(tokenizer, text[edge:], settings)
    blocks = blocks[: settings.num_rows] if settings.num_rows else blocks
    return Task(
        unit="tokens", module=zoo.module.train(), weights=weights, example=((), {"input_ids": blocks[:1].repeat(2, 1)}),
        training=_rows(blocks), validation=_rows(kept), loss_fn=next_token_loss, accuracy=next_token_accuracy,
        units_per_row=settings.length, new_tensors=new,
    )  # fmt: skip


def next_token_loss(output: Any, ids: Tensor) -> tuple[Tensor, int]:
    """Cross entropy of every token but the first of each row, as a sum."""
    logits, wanted = logits_of(output)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    return functional.cross_entropy(logits.float(), wanted, reduction="sum"), len(wanted)


def next_token_accuracy(output: Any, ids: Tensor) -> tuple[Tensor, int]:
    """Count the tokens that are the most probable ones."""
    wanted = ids[:, 1:]
    return (logits_of(output)[:, :-1].argmax(-1) == wanted).sum().double(), wanted.numel()


def read_text(path: str) -> str:
    """Read a text file; raises `DataError`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text ({error}); give a text file in UTF-8") from None


def text_config(zoo: ZooModel, name: str) -> Any:
    """Return the configuration of a model of text; raises `UsageError` for other models."""
    config = getattr(zoo.module, "config", None)
    if zoo.task != "text" or config is None:
        raise UsageError(f"{name} takes no text but the data is text; name a model such as hf:gpt2 or hf:bert")
    return config.get_text_config()


def find_tokenizer(name: str) -> Any:
    """Return the tokenizer that lies beside a model in a directory, or None."""
    file = Path(parse_hf(name.removeprefix("hf:"))[0]).expanduser() / "tokenizer.json"
    return read_tokenizer(file) if file.is_file() else None


def _blocks(tokenizer: Any, text: str, settings: FitSettings) -> Tensor:
    ids = torch.tensor(tokenizer.encode(text).ids)
    count = len(ids) // settings.length
    if not count:
        raise DataError(f"a part of the text has {len(ids)} tokens, a row has {settings.length}; lower --length")
    return ids[: count * settings.length].view(count, settings.length)


def _rows(blocks: Tensor) -> Rows:
    def make(index: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"input_ids": blocks[index]}, blocks[index]

    return Rows(range(len(blocks)), make)
