"""Requests that ask for much: they get their answer, and others are served beside them."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pydantic
import pytest

from penstock.serve import options, protocol, trial
from penstock.serve.options import JsonGrammar
from tests.fewer import first, long
from tests.serve.apps import App, app_fixture

MANY = 300_000
JSON = {"Content-Type": "application/json"}

app = app_fixture()


@pytest.fixture(autouse=True)
def end_trial(app: App) -> Iterator[None]:
    yield
    app.service.trial.close()


def beside(app: App, number: int, path: str, body: Any) -> tuple[list[httpx.Response], float]:
    """Return the answers to a request sent `number` times, and the longest wait of another client meanwhile."""

    async def run() -> tuple[list[httpx.Response], float]:
        transport = httpx.ASGITransport(app.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            sent = [asyncio.create_task(client.post(path, content=body, headers=JSON)) for _ in range(number)]
            worst_s = 0.0
            while not all(each.done() for each in sent):
                begun_s = time.perf_counter()
                assert (await client.get("/health")).status_code == 200
                answer = await client.post("/v1/completions", json={"prompt": "A pipe", "max_tokens": 2})
                assert answer.status_code == 200
                worst_s = max(worst_s, time.perf_counter() - begun_s)
                await asyncio.sleep(0.01)
            return [await each for each in sent], worst_s

    return asyncio.run(run())


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("CompletionBody", {"prompt": [-1] * MANY}), ("CompletionBody", {"prompt": [[-1] * MANY]}),
    ("CompletionBody", {"prompt": [1] + ["a"] * MANY}), ("CompletionBody", {"prompt": ["a"] + [1] * MANY}),
    ("CompletionBody", {"prompt": [[]] * MANY}), ("CompletionBody", {"prompt": "a", "stop": [1] * MANY}),
    ("CompletionBody", {"prompt": "a", "stop_token_ids": [-1] * MANY}),
    ("CompletionBody", {"prompt": "a", "metadata": {str(i): 1 for i in range(MANY)}}),
    ("CompletionBody", {"prompt": "a", "logit_bias": {str(i): "a" for i in range(MANY)}}),
    ("CompletionBody", {"prompt": "a"} | {f"x{i}": 1 for i in range(MANY)}),
    ("ChatBody", {"messages": [1] * 10_000}), ("ChatBody", {"messages": [{}] * 10_000}),
    ("ChatBody", {"messages": [{"role": "user", "content": [1] * MANY}]}),
    ("ChatBody", {"messages": [{"role": "user", "content": "a"}], "modalities": ["a"] * MANY}),
    ("DetokenizeBody", {"tokens": [-1] * MANY}), ("TokenizeBody", {"messages": [{"role": 1}] * 10_000}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body"), first(6, WRONG), ids=[f"{kind}-{sorted(body)[-1]}" for kind, body in WRONG])
def test_the_first_error_ends_a_body(kind: str, body: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        getattr(protocol, kind).model_validate_json(json.dumps(body))
    assert caught.value.error_count() < 5


LARGE: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/completions", {"prompt": [-1] * MANY}, None),
    ("/v1/completions", {"prompt": [1] * MANY}, "context_length_exceeded"),
    ("/v1/completions", {"prompt": "water " * MANY}, "context_length_exceeded"),
    ("/v1/completions", {"prompt": ["water " * 9000] * 4}, "context_length_exceeded"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "water " * MANY}]}, "context_length_exceeded"),
    ("/v1/tokenize", {"prompt": "water " * MANY}, "context_length_exceeded"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [-1] * MANY}, None),
]


@pytest.mark.parametrize(("path", "body", "code"), LARGE, ids=[f"{path}-{sorted(body)[-1]}" for path, body, _ in LARGE])
def test_large_bodies_do_not_delay_other_clients(app: App, path: str, body: dict[str, Any], code: str | None) -> None:
    answers, worst_s = beside(app, 4, path, json.dumps(body).encode())
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert worst_s < 1


REFS = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(3000)}
SCHEMAS: list[tuple[dict[str, Any], int]] = [
    ({"enum": [f"value {i}" for i in range(20_000)]}, 200),
    ({"type": "integer", "multipleOf": 99_999_989}, 400),  # takes memory without end
    ({"$ref": "#/$defs/d0", "$defs": REFS | {"d3000": {"type": "string"}}}, 400),  # overflows a stack
    ({"type": "string", "pattern": "(a|b)*c" * 14_000}, 200),
    ({"type": "nothing"}, 400),
]


@pytest.mark.parametrize(("schema", "status"), SCHEMAS, ids=["enum", "multiple", "refs", "pattern", "wrong"])
def test_grammars_are_built_once_and_within_limits(
    app: App, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any], status: int
) -> None:
    built: list[Any] = []
    monkeypatch.setattr(options, "JsonGrammar", lambda *args: built.append(args) or JsonGrammar(*args))  # type: ignore[func-returns-value]
    body = {"prompt": "a", "max_tokens": 2, "n": 8, "response_format": {"type": "json_object", "schema": schema}}
    answers, worst_s = beside(app, 1, "/v1/completions", json.dumps(body).encode())
    assert (answers[0].status_code, len(built) <= 1) == (status, True)
    assert worst_s < 1


@pytest.mark.parametrize(
    "template",
    ["{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ 'a' * 10 ** 7 }}",
     long("{% set a = namespace(s='ab') %}{% for i in range(60) %}{% set a.s = a.s ~ a.s %}{% endfor %}{{ a.s }}"),
     long("{{ 'a' * 10 ** 9 }}")],
    ids=["loops", "writes", "doubles", "multiplies"],
)  # fmt: skip
def test_templates_have_limits(app: App, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(trial, "LIMIT_S", 0.5)
    own = app.generator.tokenizer.chat_template
    app.generator.tokenizer.chat_template = template
    try:
        answers, worst_s = beside(app, 2, "/v1/chat/completions", json.dumps({"messages": [USER]}).encode())
    finally:
        app.generator.tokenizer.chat_template = own
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert worst_s < 1
    assert app.chat("water", max_tokens=1)


USER = {"role": "user", "content": "water"}


def test_a_full_queue_refuses_before_any_work(app: App) -> None:
    long_text = "water " * MANY  # tokenized, it would be refused with 400
    bodies = {
        "/v1/completions": {"prompt": long_text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": long_text}]},
    }

    async def run() -> list[int]:
        held = app.service.admission.enter("another", 2 + 8)  # all slots, and the whole queue
        answers = [await app.send("POST", path, json=body) for path, body in bodies.items()]
        for ticket in held:
            ticket.leave()
        return [answer.status_code for answer in answers]

    assert asyncio.run(run()) == [429, 429]
