"""Sequence classification: sentences of sentiment trees, batches of like lengths so that padding is small."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import DataError
from penstock.recipes.images import with_classes
from penstock.recipes.language import find_tokenizer, text_config
from penstock.recipes.settings import FitSettings
from penstock.recipes.tasks import Rows, Task, class_accuracy, class_loss, keep_some, load_for, spread
from penstock.zoo.data.texts import CLS, Sentences, read_trees, train_tokenizer

_POOL = 50  # batches whose rows are sorted together


def sentence_task(settings: FitSettings) -> Task:
    """Prepare to classify sentences; raises `DataError` for files that are no trees."""
    path = Path(settings.data)
    training = read_trees(path / "train.txt" if path.is_dir() else path)
    beside = path / "dev.txt"
    other = Path(settings.validation) if settings.validation else beside if beside.is_file() else None
    name = with_classes(settings.model, 2)
    zoo, weights, new = load_for(settings, name, "sentences")
    config = text_config(zoo, settings.model)
    tokenizer = find_tokenizer(settings.model) or train_tokenizer(training.texts, config.vocab_size)
    limit = min(settings.length, getattr(config, "max_position_embeddings", None) or settings.length)
    rows = [(encode(tokenizer, text, limit), label) for text, label in _pairs(training, settings.num_rows)]
    if other is not None:
        kept = [(encode(tokenizer, text, limit), label) for text, label in _pairs(read_trees(other), None)]
    else:
        learned, held = keep_some(len(rows))
        rows, kept = [rows[i] for i in learned], [rows[i] for i in held]
    example, _ = pad([max(rows, key=lambda row: len(row[0]))] * 2)
    return Task(
        unit="sentences", module=zoo.module.train(), weights=weights, example=((), example),
        dynamic={"length": {"input_ids": 1, "attention_mask": 1}}, training=_Encoded(rows), validation=_Encoded(kept),
        loss_fn=class_loss, accuracy=class_accuracy, collate=pad, batches=Buckets, new_tensors=new,
    )  # fmt: skip


def encode(tokenizer: Any, text: str, limit: int) -> list[int]:
    """Return a sentence's tokens, with the one that begins a sentence where the tokenizer has it."""
    first = tokenizer.token_to_id(CLS)
    ids: list[int] = ([] if first is None else [first]) + tokenizer.encode(text).ids
    return ids[:limit] or [0]


def pad(rows: Sequence[tuple[list[int], int]]) -> tuple[dict[str, Tensor], Tensor]:
    """Put rows into tensors as long as the longest of them.

    >>> pad([([5, 6], 1), ([7], 0)])[0]["attention_mask"].tolist()
    [[1, 1], [1, 0]]
    """
    longest = max(len(ids) for ids, _ in rows)
    inputs = {
        "input_ids": torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
    }
    return inputs, torch.tensor([label for _, label in rows])


class _Encoded(Rows):
    """Encoded sentences, with their lengths for those who sort them."""

    def __init__(self, rows: Sequence[tuple[list[int], int]]) -> None:
        super().__init__(range(len(rows)), rows.__getitem__)
        self.lengths = [len(ids) for ids, _ in rows]


class Buckets:
    """Batches of sentences of like lengths, in random order if shuffled.

    Rows are shuffled, sorted by length within pools of some batches, and the batches shuffled again; the
    order depends on seed and epoch only.

    >>> list(Buckets(encoded, 2, False))  # doctest: +SKIP
    [[3, 0], [1, 2]]
    """

    def __init__(self, data: Any, batch_size: int, shuffle: bool, seed: int = 0) -> None:
        self.epoch = 0
        self._lengths: list[int] = data.lengths
        self._batch_size, self._shuffle, self._seed = batch_size, shuffle, seed

    def __len__(self) -> int:
        """Count the batches."""
        return -(-len(self._lengths) // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Return the rows of each batch; a smaller one comes last."""
        chance = random.Random(self._seed * 1_000_003 + self.epoch)  # noqa: S311 -- an order, no secret
        rows = list(range(len(self._lengths)))
        if self._shuffle:
            chance.shuffle(rows)
        pool = self._batch_size * (_POOL if self._shuffle else max(1, len(self)))
        batches: list[list[int]] = []
        for start in range(0, len(rows), pool):
            ordered = sorted(rows[start : start + pool], key=self._lengths.__getitem__)
            batches += [ordered[i : i + self._batch_size] for i in range(0, len(ordered), self._batch_size)]
        if self._shuffle:
            whole = [batch for batch in batches if len(batch) == self._batch_size]
            short = [batch for batch in batches if len(batch) < self._batch_size]
            chance.shuffle(whole)
            batches = whole + short
        return iter(batches)


def _pairs(sentences: Sentences, limit: int | None) -> list[tuple[str, int]]:
    pairs = [(sentences.texts[row], sentences.labels[row]) for row in spread(len(sentences.texts), limit)]
    if not pairs:
        raise DataError("the trees hold no sentence that is positive or negative; give others")
    return pairs
