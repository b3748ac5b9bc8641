"""Places of tokens in the text, end tokens, and the sampling that a model recommends."""

from typing import Any

import pytest

from tests.serve.apps import App, app_fixture

app = app_fixture(ends=False)


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("prompt", ["A \u20ac pipe", "\u00e9\u20ac\U0001f600"])
def test_places_of_tokens_are_those_of_the_text(app: App, prompt: str, echo: bool) -> None:
    for seed in range(3):  # random bytes: some are whole characters, most are not
        found = app.complete(prompt, max_tokens=30, echo=echo, logprobs=0, temperature=2, seed=seed, ignore_eos=True)
        tokens, offsets = found["logprobs"]["tokens"], found["logprobs"]["text_offset"]
        assert len(tokens) == len(offsets)
        assert offsets == sorted(offsets)
        for token, offset in zip(tokens, offsets, strict=True):
            if "\ufffd" not in token and token not in app.generator.tokenizer.all_special_tokens:
                assert found["text"][offset:].startswith(token)


def test_bytes_of_tokens_are_those_of_the_text(app: App) -> None:
    found = app.chat("\u20ac", max_tokens=20, logprobs=True, top_logprobs=3, temperature=2, seed=1, ignore_eos=True)
    entries = found["logprobs"]["content"]
    special = app.generator.tokenizer.all_special_tokens
    data = b"".join(bytes(each["bytes"]) for each in entries if each["token"] not in special)
    assert data.decode(errors="replace") == found["message"]["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert all(other["bytes"] for other in entry["top_logprobs"])


def test_the_tokenizers_end_token_ends_answers_of_the_server_alone(app: App) -> None:
    ask: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "logit_bias": {0: 1e4}}
    assert app.generator.submit([5], **ask).result() == [0, 0]  # as model.generate
    bias: dict[str, Any] = {"logit_bias": {"0": 100}, "max_tokens": 5}
    assert app.complete([5], **bias)["finish_reason"] == "stop"
    assert app.chat(**bias)["finish_reason"] == "stop"
    assert app.complete([5], **bias, ignore_eos=True)["finish_reason"] == "length"


@pytest.mark.parametrize("asked", [{}, {"min_p": None}, {"min_p": 1.0}])
def test_the_models_own_min_p(app: App, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = app.generator.model.generation_config
    likeliest = app.complete(max_tokens=12)["text"]
    for name, value in (("do_sample", True), ("min_p", 1.0), ("top_k", 0)):
        monkeypatch.setattr(config, name, value)
    assert app.complete(max_tokens=12, **asked, temperature=2, seed=1)["text"] == likeliest
    other = app.complete(max_tokens=12, **asked | {"min_p": 0.0}, temperature=2, seed=1)["text"]
    assert other != likeliest
