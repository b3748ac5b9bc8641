"""Who has no key, sends what is wrong, too much of it, or nothing: one clear answer, and the others are served."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.generate.tokens import save_model
from tests.serve.servers import Server, serving

KEY = "a-key-of-this-test-0123456789"

SET = ("name=small", "slots=2", "most_waiting=3", "max_body=0.05")


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Server]:
    """Start a server of a small model, with a key."""
    save_model(folder)
    keys = folder / "api.keys"
    keys.touch(0o600)
    keys.write_text(f"# of tests\n{KEY}\n")
    words = (f"hf:{folder}", "--api-keys", keys, "--stages", 1, "--max-length", 256)
    with serving(*words, *(f"--set={each}" for each in SET)) as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("strangers")) as made:
        yield made


def client_of(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60.0)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with client_of(server) as made:
        yield made


JSON = {"Content-Type": "application/json"}
TEXT: dict[str, Any] = {"prompt": "A pipe", "max_tokens": 2}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "water"}], "max_tokens": 2}


@pytest.mark.parametrize(
    "key", [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY[:-1]}", "Bearer \xff"]
)
def test_requests_without_the_key_are_refused(server: Server, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": key.encode("latin-1")}
    for path in ("/v1/completions", "/v1/models", "/metrics", "/v1/pipeline", "/openapi.json", "/nothing"):
        answer = httpx.post(server.url + path, headers=headers, json=TEXT)  # type: ignore[arg-type]
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{server.url}/health").json()["status"] == "ready"
    assert httpx.get(server.url).headers["content-type"].startswith("text/html")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": "2"}, "max_tokens"), ({"max_tokens": -2}, "max_tokens"), ({"max_tokens": 2.5}, "max_tokens"),
    ({"temperature": 3}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"), ({"n": 0}, "n"), ({"n": 1000}, "n"), ({"n": True}, "n"), ({"seed": 1.5}, "seed"),
    ({"seed": 2**70}, "seed"), ({"stop": ["a"] * 17}, "stop"), ({"stop": [3]}, "stop"), ({"stop": 3}, "stop"),
    ({"stream": "yes"}, "stream"), ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ({"presence_penalty": 2.5}, "presence_penalty"), ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"), ({"logit_bias": {"1": 200}}, "logit_bias"),
    ({"logit_bias": {"300000": 1}}, "logit_bias"), ({"top_k": 0.5}, "top_k"), ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"ignore_eos": 1}, "ignore_eos"), ({"user": 5}, "user"), ({"metadata": {"a": 1}}, "metadata"),
    ({"store": True}, "store"), ({"guided_regex": "a*"}, "guided_regex"), ({"model": 5}, "model"),
]  # fmt: skip
OF_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [300000]}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": "water " * 400}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 2}, "n"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 5000}, "prompt"),
    ({"logprobs": 50}, "logprobs"), ({"logprobs": True}, "logprobs"), ({"echo": "yes"}, "echo"),
    ({"best_of": 3}, "best_of"), ({"suffix": "end"}, "suffix"),
]  # fmt: skip
OF_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"), ({"messages": "water"}, "messages"), ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "water " * 400}]}, "messages"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": "a"}, "max_completion_tokens"), ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 30}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"), ({"functions": [{}]}, "functions"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/v1/completions", TEXT | change, param) for change, param in WRONG + OF_TEXT]
    + [("/v1/chat/completions", CHAT | change, param) for change, param in WRONG + OF_CHAT],
)
def test_a_field_that_is_wrong_is_named(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 20_000,
             b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}'],
)  # fmt: skip
def test_a_body_that_is_no_json(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "change", [{"temperature": 1e-300}, {"temperature": 2, "top_p": 1e-300, "min_p": 1}, {"max_tokens": 2.0},
               {"repetition_penalty": 10, "presence_penalty": 2, "frequency_penalty": -2, "logit_bias": {"5": -100}}],
)  # fmt: skip
def test_values_at_the_ends_of_ranges_are_valid(client: httpx.Client, change: dict[str, Any]) -> None:
    answer = client.post("/v1/completions", json=TEXT | change)
    assert answer.status_code == 200, answer.text


def test_unknown_paths_and_models_are_refused(client: httpx.Client) -> None:
    assert client.post("/v1/completions", json=TEXT | {"model": "other"}).json()["error"]["code"] == "model_not_found"
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/v1/models/small").json()["id"] == "small"
    assert client.get("/v1/completions").status_code == 405
    assert client.post("/v1/classify", content=b"").status_code == 404
    assert client.get("/nothing", headers={"Host": "["}).status_code == 404
    assert client.get("/../../etc/passwd").json()["error"]["type"] == "not_found_error"
    assert (
        client.post("/v1/chat/completions", json=CHAT | {"tools": [], "user": "me", "tool_choice": "none"}).status_code
        == 200
    )


def test_control_characters_are_text(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json=TEXT | {"prompt": "".join(map(chr, range(32))) + "\u202e\u0000"})
    assert answer.status_code == 200


def test_too_large_a_body(server: Server, client: httpx.Client) -> None:
    assert client.post("/v1/completions", content=b" " * 60_000, headers=JSON).status_code == 413
    # without a length, and one that announces what it never sends
    assert client.post("/v1/completions", content=(b" " * 1000 for _ in range(100)), headers=JSON).status_code == 413
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {2**30}\r\n\r\n"
    with connected(server) as held:
        held.sendall(head.encode())
        assert b" 413 " in held.recv(100)
    with connected(server) as held:
        held.sendall(b"GET / HTTP/1.1\r\n" + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert held.recv(100)[:12] in {b"HTTP/1.1 400", b"HTTP/1.1 431", b""}


def test_requests_beyond_the_queue_get_429(client: httpx.Client) -> None:
    ask = TEXT | {"max_tokens": 100, "ignore_eos": True}
    answer = client.post("/v1/completions", json=ask | {"n": 6})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    assert len(client.post("/v1/completions", json=ask | {"n": 5, "max_tokens": 3}).json()["choices"]) == 5


def test_idle_connections_keep_the_server_available(server: Server, client: httpx.Client) -> None:
    with contextlib.ExitStack() as stack:
        held = []
        for _ in range(10_000):
            try:
                held.append(stack.enter_context(connected(server)))
            except OSError:  # of this process's own limit
                break
        assert len(held) > 500
        begun = time.perf_counter()
        while client.get("/health").status_code != 200:
            assert time.perf_counter() - begun < 40
        assert client.post("/v1/completions", json=TEXT).status_code == 200


def test_running_answers_finish_before_the_server_ends(tmp_path: Path) -> None:
    answers: list[httpx.Response] = []
    ask = TEXT | {"max_tokens": 150, "temperature": 0, "ignore_eos": True}
    with started(tmp_path) as server, client_of(server) as client:
        thread = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=ask)))
        thread.start()
        while not httpx.get(f"{server.url}/v1/pipeline", headers=dict(client.headers)).json()["running"]:
            time.sleep(0.01)
        ended = server.end()
        thread.join(60)
        assert ended.status == 0, ended.stderr
        assert answers[0].json()["usage"]["completion_tokens"] == 150
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def connected(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)
