"""What clients that nobody here wrote get: OpenAI's own library, a browser, Prometheus' reader."""

import asyncio
import json
import math
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
import torch
import transformers
from prometheus_client.parser import text_string_to_metric_families

from tests.generate.tokens import save_model
from tests.serve.servers import Server, serving

PROMPTS = ["A pipe", "water flows", "The turbine", "é€😀", "turns. The"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "small"
    path.mkdir()
    save_model(path)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(f"hf:{folder}", "--open", "--stages", 2, "--set", "slots=2", "--max-length", 256) as made:
        yield made
        ended = made.end()
        assert ended.status == 0, ended.stderr


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(folder: Path) -> tuple[Any, Any]:
    made = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return made, transformers.AutoTokenizer.from_pretrained(folder)


def wanted(model: tuple[Any, Any], prompt: str | list[int], count: int) -> tuple[list[int], str]:
    made, tokenizer = model
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    with torch.no_grad():
        found = made.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist()
    return found, str(tokenizer.decode([*ids, *found], skip_special_tokens=True))[
        len(tokenizer.decode(ids, skip_special_tokens=True)) :
    ]


def counts(server: Server) -> dict[str, float]:
    """Return the metrics that have no labels."""
    text = httpx.get(f"{server.url}/metrics").text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }


def test_completions_are_those_of_transformers(client: openai.OpenAI, model: tuple[Any, Any]) -> None:
    assert [each.id for each in client.models.list()] == ["small"]
    for prompt in PROMPTS:
        tokens, text = wanted(model, prompt, 20)
        found = client.completions.create(model="small", prompt=prompt, max_tokens=20, temperature=0)
        assert found.choices[0].text == text
        assert found.choices[0].finish_reason == ("stop" if tokens[-1] == 0 else "length")
        assert found.usage is not None
        assert found.usage.completion_tokens == len(tokens)
        assert found.usage.prompt_tokens == len(model[1](prompt)["input_ids"])
        parts = list(client.completions.create(
            model="small", prompt=prompt, max_tokens=20, temperature=0, stream=True,
            stream_options={"include_usage": True},
        ))  # fmt: skip
        assert "".join(part.choices[0].text for part in parts if part.choices) == text
        assert parts[-1].usage == found.usage
        assert [part.choices[0].finish_reason for part in parts[:-1]][-1] == found.choices[0].finish_reason
    # vLLM's own: counts in every chunk
    counted = [part.usage for part in client.completions.create(
        model="small", prompt=PROMPTS[0], max_tokens=20, temperature=0, stream=True,
        stream_options=cast(Any, {"include_usage": True, "continuous_usage_stats": True}),
    )]  # fmt: skip
    numbers = [usage.completion_tokens for usage in counted if usage is not None]
    assert len(numbers) == len(counted)
    assert numbers == sorted(numbers)
    assert numbers[-1] == len(wanted(model, PROMPTS[0], 20)[0])
    # several prompts, as text and as tokens, in one call
    found = client.completions.create(model="small", prompt=PROMPTS, max_tokens=9, temperature=0)
    assert [choice.text for choice in found.choices] == [wanted(model, prompt, 9)[1] for prompt in PROMPTS]
    rows = [model[1](prompt)["input_ids"] for prompt in PROMPTS]
    assert client.completions.create(model="small", prompt=rows, max_tokens=9, temperature=0).choices == found.choices


def test_chats_are_those_of_the_template(client: openai.OpenAI, model: tuple[Any, Any]) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "A pipe?"}]},
    ]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A pipe?"}]
    ids = list(model[1].apply_chat_template(plain, add_generation_prompt=True, return_dict=True)["input_ids"])
    _, text = wanted(model, ids, 15)
    found = client.chat.completions.create(model="small", messages=messages, max_tokens=15, temperature=0)
    assert found.choices[0].message.content == text
    parts = list(client.chat.completions.create(
        model="small", messages=messages, max_completion_tokens=15, temperature=0, stream=True,
        stream_options={"include_usage": True},
    ))  # fmt: skip
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
    assert found.usage is not None
    assert parts[-1].usage is not None
    assert parts[-1].usage.total_tokens == found.usage.total_tokens
    assert found.usage.prompt_tokens == len(ids)


def test_the_beginning_of_a_prompt_is_computed_once(
    client: openai.OpenAI, server: Server, model: tuple[Any, Any]
) -> None:
    prompt = "The turbine turns. " * 20
    before, asked, reused = counts(server), 0, []
    for ending in ("Water", "Water", "Pipes"):
        usage = client.completions.create(model="small", prompt=prompt + ending, max_tokens=9, temperature=0).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        asked += usage.prompt_tokens
        reused.append(usage.prompt_tokens_details.cached_tokens or 0)
    whole = len(model[1](prompt)["input_ids"]) // 32 * 32
    assert reused == [0, whole, whole]
    after = counts(server)
    assert after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"] == sum(reused)
    assert after["vllm:prefix_cache_queries_total"] - before["vllm:prefix_cache_queries_total"] == asked
    assert after["vllm:spec_decode_num_draft_tokens_total"] >= after["vllm:spec_decode_num_accepted_tokens_total"]


def test_log_probabilities(client: openai.OpenAI, model: tuple[Any, Any]) -> None:
    prompt = PROMPTS[0]
    ids = model[1](prompt)["input_ids"]
    tokens, _ = wanted(model, prompt, 6)
    with torch.no_grad():
        logprobs = model[0](torch.tensor([[*ids, *tokens]])).logits[0].log_softmax(-1)
    expected = [float(logprobs[index, token]) for index, token in enumerate([*ids, *tokens][1:])]
    found = client.completions.create(
        model="small", prompt=prompt, max_tokens=6, temperature=0, logprobs=2, echo=True
    ).choices[0]
    assert found.text.startswith(prompt)
    assert found.logprobs is not None
    told = found.logprobs.token_logprobs
    assert told is not None
    assert told[0] is None
    assert told[1:] == pytest.approx(expected, abs=1e-4)
    assert found.logprobs.tokens is not None
    assert "".join(found.logprobs.tokens) == model[1].decode([*ids, *tokens])
    tops = found.logprobs.top_logprobs
    assert tops is not None
    assert [max(top.values()) for top in tops[1:]] == pytest.approx(
        [float(row.max()) for row in logprobs[: len(expected)]], abs=1e-4
    )
    chat = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "water"}], max_tokens=5, temperature=0, logprobs=True,
        top_logprobs=3,
    ).choices[0]  # fmt: skip
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    for entry in chat.logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob == max(top.logprob for top in entry.top_logprobs)
        assert math.exp(entry.logprob) <= 1


def test_choices_seeds_and_stops(client: openai.OpenAI, model: tuple[Any, Any]) -> None:
    ask: dict[str, Any] = {"model": "small", "prompt": "The water", "max_tokens": 12, "seed": 7, "temperature": 1.5}
    several = client.completions.create(n=3, **ask).choices
    assert len({choice.text for choice in several}) == 3
    assert client.completions.create(n=3, **ask).choices == several
    assert client.completions.create(**ask).choices[0].text == several[0].text
    # without a seed it is another text each time
    assert len({client.completions.create(**ask | {"seed": None}).choices[0].text for _ in range(4)}) > 1
    _, text = wanted(model, "The water", 12)
    stop = text[3:6]
    found = client.completions.create(**ask | {"temperature": 0, "stop": [stop]}).choices[0]
    assert (found.text, found.finish_reason) == (text[: text.index(stop)], "stop")
    parts = client.completions.create(**ask | {"temperature": 0, "stop": stop, "stream": True})
    assert "".join(part.choices[0].text for part in parts) == found.text


def test_json_of_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"kind": {"enum": ["pipe", "turbine"]}, "wet": {"type": "boolean"}},
              "required": ["kind", "wet"], "additionalProperties": False}  # fmt: skip
    for seed in range(3):
        found = client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "water"}], max_tokens=100, seed=seed, temperature=1,
            response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}},
        )  # fmt: skip
        answer = json.loads(found.choices[0].message.content or "")
        assert answer.keys() == {"kind", "wet"}
        assert answer["kind"] in {"pipe", "turbine"}
        assert isinstance(answer["wet"], bool)


def test_concurrent_answers_match_those_alone(server: Server, model: tuple[Any, Any]) -> None:
    alone = [wanted(model, prompt, 24)[1] for prompt in PROMPTS]

    async def ask(many: openai.AsyncOpenAI, number: int) -> str:
        stream = await many.completions.create(
            model="small", prompt=PROMPTS[number % 5], max_tokens=24, temperature=0, stream=True
        )
        parts = []
        async for part in stream:
            parts.append(part.choices[0].text)
            if number % 7 == 3:
                await stream.close()  # it leaves in the middle
                return ""
        return "".join(parts)

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as many:
            return await asyncio.gather(*(ask(many, number) for number in range(40)))

    found = asyncio.run(together())
    assert found == ["" if number % 7 == 3 else alone[number % 5] for number in range(40)]
    for _ in range(50):
        state = httpx.get(f"{server.url}/v1/pipeline").json()
        if not state["running"] and not state["waiting"]:
            break
        time.sleep(0.1)
    assert (state["running"], state["waiting"]) == (0, 0)
    assert [stage["stage"] for stage in state["stages"]] == [0, 1]
    assert all(stage["microbatches"] > 0 and stage["memory_bytes"] > 0 for stage in state["stages"])


def test_metrics_are_read(server: Server, client: openai.OpenAI) -> None:
    before = counts(server)
    client.completions.create(model="small", prompt="A pipe", max_tokens=5, temperature=0)
    after = counts(server)
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 5
    assert after["vllm:time_to_first_token_seconds_count"] - before["vllm:time_to_first_token_seconds_count"] == 1
    assert after["vllm:num_requests_running"] == 0


def test_a_client_that_leaves_frees_its_slot(server: Server) -> None:
    body = json.dumps({"prompt": "A pipe", "max_tokens": 240, "temperature": 0, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    address = server.url.removeprefix("http://").split(":")
    gone = []
    for _ in range(12):
        with socket.create_connection((address[0], int(address[1]))) as held:
            held.sendall(head % len(body) + body)
            time.sleep(0.02)
            gone.append(held)
    begun = time.perf_counter()
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "A pipe", "max_tokens": 2}, timeout=60)
    assert answer.status_code == 200
    for _ in range(100):
        if not httpx.get(f"{server.url}/v1/pipeline").json()["running"]:
            break
        time.sleep(0.1)
    else:
        raise AssertionError(f"slots are in use {time.perf_counter() - begun:.1f} s later")


def test_answers_continue_after_a_lost_process(folder: Path, model: tuple[Any, Any]) -> None:
    text = wanted(model, "A pipe", 200)[1]
    words = (f"hf:{folder}", "--open", "--stages", 2, "--set", "slots=1", "--max-length", 256)
    with serving(*words) as made, openai.OpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0) as client:
        parts: list[str] = []
        stream = client.completions.create(
            model="small", prompt="A pipe", max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        for part in stream:
            if len(parts) == 20:
                worker = max(made.workers(), key=lambda process: process.pid)
                os.kill(worker.pid, signal.SIGKILL)
            parts.append(part.choices[0].text)
        found = "".join(parts)
        end = text if len(text) <= len(found) else found
        assert found.startswith(end)
        assert httpx.get(f"{made.url}/health").status_code == 200
        assert "penstock:devices_lost_total 1.0" in httpx.get(f"{made.url}/metrics").text
        state = httpx.get(f"{made.url}/v1/pipeline").json()
        assert [len(state["changes"]), len(state["stages"])] == [1, 1]
        assert made.end().status == 0
