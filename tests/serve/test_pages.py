"""A server without keys answers programs and its own page, and no page of another site."""

import pytest

from tests.serve.apps import App, app_fixture

app = app_fixture(origins=["https://a.example"])


BODY = {"prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.1.9",
             "0.0.0.0", "localhost@evil.example", "evil.example#localhost", "[::2]", "[", "\xff", ""],
)  # fmt: skip
def test_a_foreign_host_is_refused(app: App, host: str) -> None:
    headers = {"Host": host.encode("latin-1")}
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/"), ("GET", "/health")):
        assert app.request(method, path, headers=headers, json=BODY).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000"])
def test_a_name_of_this_machine_is_answered(app: App, host: str) -> None:
    for more in ({}, {"Origin": f"http://{host}"}, {"Origin": "https://a.example"}):
        assert app.post("/v1/completions", BODY, headers={"Host": host} | more).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "", "http://localhost", "http://localhost:9", "https://a.example.evil",
               "file://localhost:8000"],
)  # fmt: skip
def test_a_foreign_origin_is_refused(app: App, origin: str) -> None:
    headers = {"Host": "localhost:8000", "Origin": origin}
    assert app.post("/v1/completions", BODY, headers=headers).status_code == 403


@pytest.mark.parametrize(
    ("kind", "status"),
    [("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("multipart/form-data", 415), ("", 415),
     ("application/jsonp", 415), ("text/plain; application/json", 415), ("application/json", 200),
     ("Application/JSON; charset=utf-8", 200), ("application/vnd.api+json", 200)],
)  # fmt: skip
def test_a_body_is_json_by_its_type(app: App, kind: str, status: int) -> None:
    for path in ("/v1/completions", "/v1/tokenize"):
        data = b'{"prompt": "a"}'
        assert app.request("POST", path, content=data, headers={"Content-Type": kind}).status_code == status
