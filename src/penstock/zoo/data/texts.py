"""Byte-pair tokenizers, and labelled sentences from sentiment trees.

The trees have the format of the Stanford Sentiment Treebank:

    (3 (2 It) (4 (2 's) (4 lovely)))      one tree on each line; the first number is the sentence's
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import DataError
from penstock.text import one_line
from penstock.zoo.optional import optional_import, without_panics

PAD, CLS = "<pad>", "<cls>"
_LEAF = re.compile(r"\(\d ([^()]+)\)")
_BRACKETS = {"-LRB-": "(", "-RRB-": ")", "\\/": "/", "\\*": "*"}
NEUTRAL = 2


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Any:
    """Train a byte-level byte-pair tokenizer (Sennrich et al. 2016) of at most n tokens.

    Any text can be encoded, since every byte is a token. Number 0 is for padding, 1 begins a sentence.

    >>> train_tokenizer(["so it is", "is it so"], 300).decode(train_tokenizer(["so it is"], 300).encode("is").ids)
    'is'

    Raises `DataError` for fewer tokens than there are bytes.
    """
    library = optional_import("tokenizers", "text", DataError)
    bytes_ = library.pre_tokenizers.ByteLevel.alphabet()
    if vocabulary_size < len(bytes_) + 2:
        raise DataError(
            f"a byte-pair tokenizer needs at least {len(bytes_) + 2} tokens; got {vocabulary_size}; give the model a "
            "larger vocabulary, as in hf:gpt2,vocab_size=1024"
        )
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary_size, special_tokens=[PAD, CLS], initial_alphabet=bytes_, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_tokenizer(path: Path) -> Any:
    """Read a tokenizer.json; raises `DataError` for anything else.

    >>> read_tokenizer(Path("model/tokenizer.json")).get_vocab_size()  # doctest: +SKIP
    50257
    """
    library = optional_import("tokenizers", "text", DataError)
    try:
        with without_panics():
            return library.Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises Exception itself
        raise DataError(f"{path} is not a tokenizer ({one_line(problem)}); give the model's own") from problem


@dataclass(frozen=True, slots=True)
class Sentences:
    """Sentences and their labels: 0 for negative, 1 for positive."""

    texts: list[str]
    labels: list[int]


def is_trees(path: Path) -> bool:
    """Return True if a file's first line is a tree.

    >>> is_trees(Path("sst2/train.txt"))  # doctest: +SKIP
    True
    """
    try:
        with path.open(encoding="utf-8") as file:
            return re.match(r"\(\d [(\S]", file.readline()) is not None
    except (OSError, UnicodeDecodeError):
        return False


def read_trees(path: Path) -> Sentences:
    """Read a file of trees; sentences that are neither positive nor negative are left out, as in SST-2.

    >>> read_trees(Path("sst2/dev.txt")).texts[0]  # doctest: +SKIP
    "It 's a lovely film with lovely performances by Buy and Accorsi ."

    Raises `DataError` for a file that cannot be read, and for a line that is no tree.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); give a file of trees") from None
    texts, labels = [], []
    for number, line in enumerate(lines, 1):
        words = _LEAF.findall(line)
        if not line.strip():
            continue
        if not words or not line.startswith("(") or not line[1:2].isdigit():
            raise DataError(f"line {number} of {path} is no tree; a line is like (3 (2 It) (4 works))")
        label = int(line[1])
        if label != NEUTRAL:
            texts.append(_plain(" ".join(words)))
            labels.append(int(label > NEUTRAL))
    return Sentences(texts, labels)


def _plain(text: str) -> str:
    for written, meant in _BRACKETS.items():
        text = text.replace(written, meant)
    return text
