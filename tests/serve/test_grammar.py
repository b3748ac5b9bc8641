"""JSON answers: valid whenever they end by themselves, whatever else is asked for."""

import json
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.errors import DataError
from penstock.serve.options import JsonGrammar, TokenTexts
from tests.fewer import long
from tests.generate.tokens import spaced, tokenizer
from tests.serve.apps import App, app_fixture

SCHEMA = {"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"],
          "additionalProperties": False}  # fmt: skip
app = app_fixture(ends=False)  # the tokenizer alone has an end token


def formatted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}


@pytest.mark.parametrize(
    "more",
    [
        {"min_tokens": 60},
        long({"min_tokens": 60, "seed": 3}),
        {"ignore_eos": True},
        long({"logit_bias": {"0": -100}}),
        long({"repetition_penalty": 5}),
        {"n": 2},
        {},
    ],
)
def test_a_grammar_that_has_ended_ends_the_answer(app: App, more: dict[str, Any]) -> None:
    found = app.chat(response_format=formatted(SCHEMA), max_tokens=100, **{"temperature": 1, "seed": 0} | more)
    assert json.loads(found["message"]["content"]).keys() == {"wet"}
    assert found["finish_reason"] == "stop"


@pytest.mark.parametrize("more", [{"min_tokens": 5}, {"ignore_eos": True}, {}])
def test_answers_with_a_number_are_complete_json(app: App, more: dict[str, Any]) -> None:
    found = app.chat(response_format=formatted({"type": "integer", "maximum": 10**9}), max_tokens=60, **more)
    assert found["finish_reason"] == "stop"
    json.loads(found["message"]["content"])


def test_a_tokenizer_that_the_grammar_does_not_take() -> None:
    with pytest.raises(DataError, match="tokenizer"):
        JsonGrammar(spaced(), SCHEMA)


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


def test_token_texts_keep_their_leading_space() -> None:
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
