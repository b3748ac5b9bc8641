"""Text, bytes and places of single tokens, for each kind of vocabulary."""

from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.serve.token_texts import TokenTexts
from tests.generate.tokens import spaced, tokenizer


def fallback() -> Any:
    """Make a tokenizer of SentencePiece's kind, with tokens for single bytes."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581A", "\u2581pipe", "s"]
    plain = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    plain.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", unk_token="<unk>")


def wordpiece() -> Any:
    words = {"[UNK]": 0, "pipe": 1, "##s": 2, "a": 3}
    plain = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")


@pytest.mark.parametrize("text", ["A pipe", "\u00e9\u20ac\U0001f600", " \n\t\x00", "turns. The"])
def test_bytes_of_a_byte_level_vocabulary(text: str) -> None:
    made = tokenizer()
    texts, tokens = TokenTexts(made), made(text)["input_ids"]
    assert b"".join(map(texts.data, tokens)) == text.encode()
    assert texts.data(0) == b"<|end|>"


def test_bytes_of_byte_fallback() -> None:
    made = fallback()
    texts = TokenTexts(made)
    words = ["\u2581A", "\u2581pipe", "s", "<0xE2>", "<0x82>", "<0xAC>", "</s>"]
    tokens = made.convert_tokens_to_ids(words)
    assert b"".join(map(texts.data, tokens)) == " A pipes\u20ac</s>".encode()
    assert [texts.text(token) for token in tokens[:4]] == [" A", " pipe", "s", "\ufffd"]


def test_the_space_that_a_token_begins_with() -> None:
    made = spaced()
    texts = TokenTexts(made)
    tokens = made("A pipe that carries water")["input_ids"]
    assert "".join(map(texts.text, tokens)) == " A pipe that carries water"
    assert b"".join(map(texts.data, tokens)) == b" A pipe that carries water"


def test_pieces_of_words() -> None:
    texts = TokenTexts(wordpiece())
    assert [texts.data(token) for token in (1, 2)] == [b" pipe", b"s"]


def test_a_token_beyond_the_vocabulary() -> None:
    assert TokenTexts(tokenizer()).data(100_000) == b""
