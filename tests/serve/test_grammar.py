"""JSON answers: valid whenever they end by themselves, whatever else is asked for."""

import json
from typing import Any

import pytest

from penstock.errors import DataError
from penstock.serve.grammar import JsonGrammar
from tests.fewer import long
from tests.generate.tokens import spaced
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
def test_a_number_that_could_go_on(app: App, more: dict[str, Any]) -> None:
    found = app.chat(response_format=formatted({"type": "integer", "maximum": 10**9}), max_tokens=60, **more)
    assert found["finish_reason"] == "stop"
    json.loads(found["message"]["content"])


def test_a_tokenizer_that_the_grammar_does_not_take() -> None:
    with pytest.raises(DataError, match="tokenizer"):
        JsonGrammar(spaced(), SCHEMA)
