"""A server's application without a process or a socket: requests go to it through ASGI."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import transformers

from penstock.generate.generator import Generator
from penstock.serve.admission import Admission
from penstock.serve.app import Served, make_app
from penstock.serve.metrics import Metrics
from penstock.serve.texts import TextService
from tests.generate.tokens import save_model


class App:
    """An application that answers requests one after the other, each with these headers."""

    def __init__(self, served: Served, service: TextService, headers: Mapping[str, str]) -> None:
        self.app, self.served, self.headers = make_app(served), served, headers
        self.service, self.generator = service, service.generator

    def changed(self, headers: Mapping[str, str] | None = None, **options: Any) -> "App":
        """Return an application of the same model with other headers, or with other options of `Served`."""
        return App(replace(self.served, **options), self.service, self.headers if headers is None else headers)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return asyncio.run(self.send(method, path, **options))

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        headers = dict(self.headers)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            return await client.request(method, path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **options)

    def complete(self, prompt: Any = "A pipe", **more: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", {"prompt": prompt, "temperature": 0} | more)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["choices"][0]
        return found

    def chat(self, text: str = "water", **more: Any) -> dict[str, Any]:
        ask = {"messages": [{"role": "user", "content": text}], "temperature": 0}
        answer = self.post("/v1/chat/completions", ask | more)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["choices"][0]
        return found


def app_fixture(*, ends: bool = True, headers: Mapping[str, str] = MappingProxyType({}), **options: Any) -> Any:
    """Return a fixture of a module: the application of a small model, in one stage in this process.

    The model's answers end if it `ends`; each request has the `headers`; `options` are those of `Served`.
    """

    @pytest.fixture(scope="module")
    def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
        folder = tmp_path_factory.mktemp("model")
        save_model(folder, ends=ends)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        with Generator(model, tokenizer, stages=1, slots=2, max_length=128) as generator:
            generator.submit([0], max_new_tokens=1).result()  # all threads run before the first test counts them
            metrics = Metrics()
            service = TextService(generator, Admission(slots=2, most_waiting=8), metrics, deadline_s=60.0, ends=[0])
            served = Served(
                name="small", service=service, metrics=metrics, stages=list, changes=list, joins_at=lambda: None,
                problem=lambda: None, created=1, **options,
            )  # fmt: skip
            service.trial.start()
            with contextlib.closing(service.trial):
                yield App(served, service, headers)

    return app
