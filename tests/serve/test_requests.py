"""Requests as real clients send them: what they mean is done, and what is wrong is named with its index."""

import json
from typing import Any

import h11
import pytest
from openai.types.chat import ChatCompletionMessage

from penstock.serve.options import IGNORED
from tests.serve.apps import App, app_fixture

KEY = "a-key-of-this-test"
USER = {"role": "user", "content": "water"}

app = app_fixture(keys=[KEY], origins=["https://a.example"], headers={"api-key": KEY})


@pytest.mark.parametrize(
    ("message", "place", "reason"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]},
         "messages[1].content[1].type", "image_url"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0].type", "input_audio"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text", "required"),
        ({"role": "user", "content": [{"text": "a"}]}, "messages[1].content[0].type", "required"),
        ({"role": "user", "content": ["a"]}, "messages[1].content[0]", ""),
        ({"role": "user", "content": 5}, "messages[1].content", "list of parts"),
        ({"role": "user", "content": [[1]]}, "messages[1].content[0]", ""),
        ({"role": "user"}, "messages[1].content", "'user'"),
        ({"role": "user", "content": None}, "messages[1].content", "'user'"),
        ({"role": "tool", "content": "4", "tool_call_id": "a"}, "messages[1].role", "'tool'"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}, "messages[1].tool_calls", "supported"),
        ({"role": "assistant", "content": "a", "audio": {"id": "a"}}, "messages[1].audio", "supported"),
        ("water", "messages[1]", ""),
    ],
)  # fmt: skip
def test_a_message_that_is_wrong_is_named_with_its_place(app: App, message: Any, place: str, reason: str) -> None:
    error = wrong(app, "/v1/chat/completions", {"messages": [USER, message]})
    assert error["param"] == "messages"
    assert error["message"].startswith(f"{place}: ")
    assert reason in error["message"]
    assert " or " not in error["message"].replace("or assistant", "").replace("text or a list", "")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"prompt": ["a", 1]}, "prompt[1]"), ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [[1], [-1]]}, "prompt[1][0]"),
        ({"prompt": {"a": 1}}, "prompt"), ({"prompt": None}, "prompt"), ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop_token_ids": [1, "a"]}, "stop_token_ids[1]"), ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"logit_bias": {"5": "a"}}, "logit_bias.5"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"guided_json": {"type": "object"}}, "guided_json"), ({"bad_words": ["a"]}, "bad_words"),
        ({"max_tokens": -2}, "max_tokens"), ({"suffix": "end"}, "suffix"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
    ],
)  # fmt: skip
def test_a_field_that_is_wrong_is_named_with_its_place(app: App, change: dict[str, Any], place: str) -> None:
    error = wrong(app, "/v1/completions", {"prompt": "a"} | change)
    assert error["param"] == place.partition("[")[0].partition(".")[0]
    assert error["message"].startswith(f"{place}: ")


def wrong(app: App, path: str, body: Any) -> dict[str, Any]:
    answer = app.post(path, body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_fields_that_are_null_or_empty_mean_the_default(app: App) -> None:
    schema = app.request("GET", "/openapi.json").json()["components"]["schemas"]
    plain = app.complete()["text"]
    needed = {"prompt", "temperature"}
    for name in schema["CompletionBody"]["properties"].keys() - needed:
        assert app.complete(**{name: None})["text"] == plain
    empty = {"stop": [], "stop_token_ids": [], "logit_bias": {}, "metadata": {}, "suffix": "", "guided_json": {},
             "stream_options": {}}  # fmt: skip
    assert app.complete(**empty)["text"] == plain
    for name in schema["ChatBody"]["properties"].keys() - {"messages", "temperature"}:
        app.chat("water", **{name: None, "max_tokens": 1})
    app.chat(tools=[], functions=[], modalities=[], max_tokens=1, chat_template_kwargs={}, top_logprobs=0)
    app.chat(response_format={"type": "text", "json_schema": None}, max_tokens=1)


def test_an_unknown_field_is_named_once_for_each_client(app: App, capsys: pytest.CaptureFixture[str]) -> None:
    ask = {"prompt": "A pipe", "temperature": 0, "best_guess": 1, "x\r\n\u20ac": 2, "stream_options": None}
    answers = [app.post("/v1/completions", ask) for _ in range(2)]
    for answer in answers:
        assert answer.status_code == 200
        assert answer.headers[IGNORED] == r"best_guess, x\r\n\u20ac"
        assert answer.json()["choices"][0]["text"] == app.complete()["text"]
    err = capsys.readouterr().err
    assert err.count("best_guess") == 1
    for name in ("", " ", " a ", "\t", "\u2028"):
        told = app.post("/v1/completions", {"prompt": "a", "max_tokens": 1, name: 1}).headers[IGNORED]
        h11.Response(status_code=200, headers=[(IGNORED, told)])  # as the server sends it
        assert told
    chat = {"messages": [USER | {"mood": 1}, USER | {"mood": 2}], "stream": True, "max_tokens": 1}
    assert app.post("/v1/chat/completions", chat).headers[IGNORED] == "messages[].mood"
    assert IGNORED not in app.post("/v1/completions", {"prompt": "a"}).headers


def test_a_strict_server_refuses_unknown_fields(app: App) -> None:
    error = wrong(app.changed(strict=True), "/v1/completions", {"prompt": "a", "best_guess": 1})
    assert error["param"] == "best_guess"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"content": None, "refusal": "no"},
        {"annotations": [], "tool_calls": [], "reasoning_content": "hm"},
        {"content": [{"type": "refusal", "refusal": "no"}]},
        {"content": []},
    ],
)
def test_an_answer_is_a_message_of_the_next_request(app: App, more: dict[str, Any]) -> None:
    found = app.chat(max_tokens=4)["message"]
    dumped = ChatCompletionMessage.model_validate(found).model_dump() | more
    answer = app.post("/v1/chat/completions", {"messages": [USER, dumped, USER], "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert IGNORED not in answer.headers


def test_values_of_other_servers_are_accepted(app: App) -> None:
    plain = app.complete(max_tokens=12)["text"]
    assert app.complete(max_tokens=12, temperature=1, top_p=0)["text"] == plain
    for stop in ("", [""], ["", "\x00"]):
        assert app.complete(max_tokens=12, stop=stop)["text"] == plain
    room = app.generator.max_length
    whole = app.post("/v1/completions", {"prompt": "A pipe", "max_tokens": -1, "ignore_eos": True}).json()["usage"]
    assert whole["total_tokens"] == room
    limits = {"messages": [USER], "ignore_eos": True, "max_completion_tokens": -1}
    assert app.post("/v1/chat/completions", limits).json()["usage"]["total_tokens"] == room
    texts = {app.complete(max_tokens=12, temperature=2, seed=-1)["text"] for _ in range(4)}
    assert len(texts) > 1


def test_stops_and_their_text(app: App) -> None:
    plain = app.complete(max_tokens=12, ignore_eos=True, logprobs=0)
    stop = plain["text"][2:4]
    before = plain["text"][: plain["text"].index(stop)]
    assert app.complete(max_tokens=12, ignore_eos=True, stop=stop)["text"] == before
    found = app.complete(max_tokens=12, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert (found["text"], found["finish_reason"]) == (before + stop, "stop")
    tokens = app.post("/v1/tokenize", {"prompt": "A pipe" + plain["text"]}).json()["tokens"]
    own = app.generator.submit("A pipe", max_new_tokens=12, do_sample=False, eos_token_id=None).result()
    end = own[3]
    short = app.complete(max_tokens=12, ignore_eos=True, stop_token_ids=[end])
    whole = app.complete(max_tokens=12, ignore_eos=True, stop_token_ids=[end], include_stop_str_in_output=True)
    assert short["finish_reason"] == whole["finish_reason"] == "stop"
    decode = app.generator.tokenizer.decode
    at = own.index(end)
    assert (short["text"], whole["text"]) == (decode(own[:at]), decode(own[: at + 1]))
    assert tokens


def test_a_schema_in_other_places(app: App) -> None:
    schema = {"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"],
              "additionalProperties": False}  # fmt: skip
    for given in ({"type": "json_object", "schema": schema}, {"type": "json_schema", "schema": schema},
                  {"type": "json_schema", "json_schema": {"schema": schema}}):  # fmt: skip
        chat = app.chat(response_format=given, max_tokens=90, temperature=1, seed=0)["message"]["content"]
        text = app.complete(response_format=given, max_tokens=90, temperature=1, seed=0)["text"]
        for answer in (chat, text):
            assert json.loads(answer).keys() == {"wet"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"api-key": KEY}, 200), ({"x-api-key": KEY}, 200), ({"authorization": f"Bearer {KEY}"}, 200),
     ({"api-key": "another"}, 401), ({"authorization": "Bearer no", "api-key": KEY}, 401)],
)  # fmt: skip
def test_keys_in_other_headers(app: App, headers: dict[str, str], status: int) -> None:
    assert app.changed(headers).request("GET", "/v1/models").status_code == status


def test_pages_of_an_origin_may_ask(app: App) -> None:
    own, other = {"origin": "https://a.example"}, {"origin": "https://b.example"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    name = "access-control-allow-origin"
    assert app.request("GET", "/v1/models", headers=own).headers[name] == own["origin"]
    assert name not in app.request("GET", "/v1/models", headers=other).headers
    keyless = app.changed({})
    before = keyless.request("OPTIONS", "/v1/completions", headers=own | asked)
    assert (before.status_code, before.headers[name]) == (200, own["origin"])
    assert keyless.request("OPTIONS", "/v1/completions", headers=other | asked).status_code == 400
    refused = keyless.request("GET", "/v1/models", headers=own)
    assert (refused.status_code, refused.headers[name]) == (401, own["origin"])  # the page can read the error


def test_tokens_and_texts(app: App) -> None:
    tokenizer, text = app.generator.tokenizer, "A pipe \u20ac"
    for base in ("", "/v1"):
        found = app.post(f"{base}/tokenize", {"prompt": text, "return_token_strs": True}).json()
        assert found["tokens"] == tokenizer(text)["input_ids"]
        assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), app.generator.max_length)
        assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
        assert app.post(f"{base}/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = app.post("/v1/tokenize", {"messages": [USER]}).json()
    asked = app.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 1}).json()
    assert chat["count"] == asked["usage"]["prompt_tokens"]
    assert chat["token_strs"] is None
    assert wrong(app, "/tokenize", {})["param"] == "prompt"
    assert wrong(app, "/tokenize", {"prompt": "a", "messages": [USER]})["param"] == "prompt"
    assert wrong(app, "/detokenize", {"tokens": [5000]})["param"] == "tokens"
    assert app.request("GET", "/version").json()["version"]
    assert app.request("GET", "/v1/models").json()["data"][0]["max_model_len"] == app.generator.max_length


def test_a_final_message_is_continued(app: App) -> None:
    tokenizer = app.generator.tokenizer
    begun = [USER, {"role": "assistant", "content": "The pipe"}]
    tokens = app.post("/tokenize", {"messages": begun, "continue_final_message": True}).json()["tokens"]
    assert tokenizer.decode(tokens) == "<|user|>water<|end|><|assistant|>The pipe"
    answer = app.chat(messages=begun, continue_final_message=True, add_generation_prompt=False, max_tokens=5)
    assert answer["message"]["content"] == app.complete(tokens, max_tokens=5)["text"]
    bare = app.post("/tokenize", {"messages": begun, "add_generation_prompt": False}).json()["tokens"]
    assert tokenizer.decode(bare).endswith("The pipe<|end|>")
    both = {"messages": begun, "continue_final_message": True, "add_generation_prompt": True}
    assert wrong(app, "/v1/chat/completions", both)["param"] == "continue_final_message"


def test_variables_of_the_template(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = app.generator.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ mood }}" + tokenizer.chat_template)
    ask = {"messages": [USER], "chat_template_kwargs": {"mood": "calm"}}
    tokens = app.post("/tokenize", ask).json()["tokens"]
    assert tokenizer.decode(tokens).startswith("calm<|user|>")
    for name in ("chat_template", "tokenize", "tools"):
        error = wrong(app, "/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {name: "a"}})
        assert name in error["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
def test_later_endpoints_are_refused_by_name(app: App, path: str) -> None:
    answer = app.post(path, {"input": "a"})
    assert answer.status_code == 404
    assert path.rpartition("/")[2][:8].lower() in answer.json()["error"]["message"].lower()
