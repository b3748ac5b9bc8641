"""Text to numbers: a byte-pair tokenizer, found with a model or trained on the text at hand."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.errors import DataError
from penstock.text import one_line
from penstock.zoo.optional import optional_import

PAD, CLS = "<pad>", "<cls>"


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Any:
    """Train a byte-level byte-pair tokenizer (Sennrich et al. 2016) of at most so many tokens.

    Any text can be encoded, since every byte is a token. Number 0 is for padding, 1 begins a sentence.

    >>> train_tokenizer(["so it is", "is it so"], 300).decode(train_tokenizer(["so it is"], 300).encode("is").ids)
    'is'

    Raises `DataError` for fewer tokens than there are bytes.
    """
    library = optional_import("tokenizers", "text", DataError)
    bytes_ = library.pre_tokenizers.ByteLevel.alphabet()
    if vocabulary_size < len(bytes_) + 2:
        raise DataError(
            f"a byte-pair tokenizer needs at least {len(bytes_) + 2} tokens, not {vocabulary_size}; "
            "give the model a larger vocabulary, as in hf:gpt2,vocab_size=1024"
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
        return library.Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises Exception itself
        raise DataError(f"{path} is no tokenizer ({one_line(problem)}); give the one that belongs to it") from problem
