"""The ASGI application: authentication, limits and routes."""

import asyncio
import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.serve.admission import SMALL_BYTES, lane_of
from penstock.serve.classes import ClassService
from penstock.serve.metrics import Metrics
from penstock.serve.openapi import openapi
from penstock.serve.options import IGNORED, IgnoredFields
from penstock.serve.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    StreamOptions,
    TokenizeBody,
    parse_body,
)
from penstock.serve.server import is_own_name
from penstock.serve.streams import Documents, Events, events, until_gone
from penstock.serve.texts import Piece, RequestedAnswer, TextService
from penstock.version import __version__

_PUBLIC = frozenset({"/", "/health", "/page.css", "/page.js"})
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::\d{1,5})?")


class AccessGuard:
    """Middleware that checks the API key, or without keys the names of server and page, before the body is read."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], origins: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in _PUBLIC:
            headers = Headers(scope=scope)
            kind, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip().encode() if kind.lower() == "bearer" else b""
            for name in ("api-key", "x-api-key"):  # Azure's clients and Anthropic's
                given = given or headers.get(name, "").strip().encode()
            # compare with every key: the duration must not depend on the key that matches
            matching = [hmac.compare_digest(given, known) for known in self._keys]
            if not any(matching):
                error = ApiError(
                    "an API key is required: Authorization: Bearer KEY, or api-key: KEY",
                    code="invalid_api_key",
                    status=401,
                )
                await written(error)(scope, receive, send)
                return
            scope["client_key"] = matching.index(True)
        elif scope["type"] == "http" and not self._keys and (stranger := self._stranger(Headers(scope=scope))):
            await written(ApiError(f"{stranger}, or serve with --api-keys", status=403))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _stranger(self, headers: Headers) -> str | None:
        """Return the reason against a request that a page of another site may have caused, or None.

        A browser sends pages' requests to this machine without asking, and a page's own name may resolve to it.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _HOST.fullmatch(host.lower())
        if name is None or not is_own_name(name[1].strip("[]")):
            return f"Host must be this machine; got {host[:100]!r}: use localhost"
        if origin is None or "*" in self._origins or origin in self._origins:
            return None
        own = origin.lower() in {f"http://{host}".lower(), f"https://{host}".lower()}
        return None if own else f"Origin must be this server's; got {origin[:100]!r}: give --set allow_origin=[...]"


def written(error: ApiError) -> Response:
    """Return the response of an error."""
    return JSONResponse(error.document(), error.status, headers=error.headers)


_BODY_S = 60.0
_JSON = re.compile(r"application/(.+\+)?json")
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_GONE = 499  # nginx's status for a client that disconnected
_LATER = {
    "/v1/embeddings": "embeddings",
    "/v1/responses": "the Responses API",
    "/v1/rerank": "reranking",
    "/v1/audio/transcriptions": "audio",
    "/v1/images/generations": "images",
    "/v1/messages": "Anthropic's messages",
}
_AnyBody = TypeVar("_AnyBody", CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_Asked = TypeVar("_Asked", CompletionBody, ChatBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model to serve and the state that its routes report."""

    name: str
    service: TextService | ClassService
    metrics: Metrics
    stages: Callable[[], Sequence[dict[str, Any]]]
    changes: Callable[[], Sequence[dict[str, Any]]]
    joins_at: Callable[[], str | None]
    problem: Callable[[], str | None]  # reason why the server cannot answer, or None
    created: int
    keys: Sequence[str] = ()
    most_bytes: int = 4 << 20
    origins: Sequence[str] = ()  # web pages that may read answers
    strict: bool = False  # unknown fields are refused


def make_app(served: Served) -> Starlette:
    """Make the application; serve it with uvicorn.

    Example:
        uvicorn.run(make_app(served))
    """
    paths = _Paths(served)
    routes = [
        Route("/", _asset("index.html", "text/html")),
        Route("/page.js", _asset("page.js", "text/javascript")),
        Route("/page.css", _asset("page.css", "text/css")),
        Route("/health", paths.health),
        Route("/metrics", paths.metrics),
        Route("/openapi.json", paths.document),
        Route("/version", paths.version),
        Route("/v1/models", paths.models),
        Route("/v1/models/{name:path}", paths.model),
        Route("/v1/pipeline", paths.pipeline),
    ]
    if isinstance(served.service, TextService):
        routes += [
            Route("/v1/completions", paths.completions, methods=["POST"]),
            Route("/v1/chat/completions", paths.chat, methods=["POST"]),
            *(Route(f"{base}/tokenize", paths.tokenize, methods=["POST"]) for base in ("", "/v1")),
            *(Route(f"{base}/detokenize", paths.detokenize, methods=["POST"]) for base in ("", "/v1")),
            *(Route(path, paths.later, methods=["GET", "POST"]) for path in _LATER),
        ]
    else:
        routes += [Route("/v1/classify", paths.classify, methods=["POST"])]
    handlers: dict[Any, Any] = {
        PenstockError: _own_error,
        ClientDisconnect: _disconnected,
        HTTPException: _http_error,
        Exception: _unforeseen,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.add_middleware(AccessGuard, keys=served.keys, origins=served.origins)
    if served.origins:  # before the guard: a browser asks first, without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(served.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[IGNORED, "Retry-After"],
        )
    return app


class _Paths:
    """The handlers of all routes."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._ignored = IgnoredFields(strict=served.strict)

    async def health(self, _request: Request) -> Response:
        problem = self._served.problem()
        if problem is not None:
            return JSONResponse({"status": "not ready", "why": problem}, 503)
        return JSONResponse({"status": "ready", "model": self._served.name})

    async def metrics(self, _request: Request) -> Response:
        return Response(self._served.metrics.text(), media_type="text/plain; version=0.0.4")

    async def document(self, _request: Request) -> Response:
        return JSONResponse(openapi(__version__, texts=isinstance(self._served.service, TextService)))

    async def version(self, _request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def later(self, request: Request) -> Response:
        kind = _LATER[request.scope["path"]]
        raise ApiError(f"this server does not support {kind} yet; use /v1/chat/completions", status=404)

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def pipeline(self, _request: Request) -> Response:
        served = self._served
        return JSONResponse(
            {
                "model": served.name,
                "problem": served.problem(),
                "stages": served.stages(),
                "changes": served.changes(),
                "joins_at": served.joins_at(),
                "running": served.service.admission.num_running,
                "waiting": served.service.admission.num_waiting,
                "slots": served.service.admission.slots,
                "classifies": isinstance(served.service, ClassService),
            }
        )

    async def completions(self, request: Request) -> Response:
        service = self._texts()
        return await self._answer(request, CompletionBody, service.completion)

    async def chat(self, request: Request) -> Response:
        service = self._texts()
        return await self._answer(request, ChatBody, service.chat)

    async def tokenize(self, request: Request) -> Response:
        service = self._texts()
        async with self._parsed(TokenizeBody, request) as body:
            return JSONResponse(await service.tokenize(body, _client(request)), headers=self._ignored.headers(body))

    async def detokenize(self, request: Request) -> Response:
        service = self._texts()
        async with self._parsed(DetokenizeBody, request) as body:
            text = await service.detokenize(body.tokens, _client(request))
            return JSONResponse({"prompt": text}, headers=self._ignored.headers(body))

    async def classify(self, request: Request) -> Response:
        self._check_ready()
        service = self._served.service
        if not isinstance(service, ClassService):
            raise ApiError("this model writes text; use /v1/completions", status=404)
        top = request.query_params.get("top", "5")
        if not top.isdecimal() or not 0 < len(top) < 6 or int(top) < 1:
            raise ApiError(f"top must be a number of classes, at least 1; got {top[:20]!r}", param="top")
        async with self._received(request) as data:
            image = await service.read(data, request.headers.get("content-type", ""), _client(request))
        return JSONResponse(await until_gone(request, service.classify(image, int(top), _client(request))))

    async def _answer(
        self,
        request: Request,
        kind: type[_Asked],
        prepare: Callable[[_Asked, str], Awaitable[Sequence[RequestedAnswer]]],
    ) -> Response:
        service, client = self._texts(), _client(request)
        async with self._parsed(kind, request) as body:
            options, streamed = body.stream_options or StreamOptions(), body.stream
            if options.model_fields_set and not streamed:
                raise ApiError("stream_options needs stream to be true", param="stream_options")
            if options.continuous_usage_stats and not options.include_usage:
                raise ApiError(
                    "stream_options.continuous_usage_stats needs include_usage to be true", param="stream_options"
                )
            choices, headers = await prepare(body, client), self._ignored.headers(body)
        del body  # a large one must not stay while the answer is generated
        documents = Documents(
            self._served.name, choices, chat=kind is ChatBody, counts_in_chunks=bool(options.continuous_usage_stats)
        )
        tickets = service.enter(choices, client)
        pieces = service.pieces(choices, tickets)
        if streamed:
            return Events(events(documents, pieces, usage=bool(options.include_usage)), headers, tickets)
        async with aclosing(pieces):
            return JSONResponse(documents.whole(await until_gone(request, _all(pieces))), headers=headers)

    def _texts(self) -> TextService:
        self._check_ready()
        service = self._served.service
        if not isinstance(service, TextService):
            raise ApiError("this model classifies; use /v1/classify", status=404)
        return service

    def _check_ready(self) -> None:
        if (problem := self._served.problem()) is not None:
            raise ApiError(problem, headers={"Retry-After": "10"}, status=503)

    def _check_model(self, name: str | None) -> None:
        if name not in {None, self._served.name}:
            raise ApiError(
                f"model {str(name)[:100]!r} not found; this server has {self._served.name}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _model(self) -> dict[str, Any]:
        served = self._served
        found = {"id": served.name, "object": "model", "created": served.created, "owned_by": "penstock"}
        if isinstance(served.service, TextService):
            found["max_model_len"] = served.service.generator.max_length
        return found

    @asynccontextmanager
    async def _parsed(self, kind: type[_AnyBody], request: Request) -> AsyncIterator[_AnyBody]:
        client, desk = _client(request), self._served.service.desk
        given = request.headers.get("content-type", "")
        if not _JSON.fullmatch(given.partition(";")[0].strip().lower()):
            raise ApiError(f"Content-Type must be application/json; got {given[:100]!r}", status=415)
        async with self._received(request) as data:
            lane = lane_of(len(data))
            body = parse_body(kind, data) if lane == "small" else await desk.run(client, lane, parse_body, kind, data)
            self._ignored.check(body, client)
            self._check_model(body.model)
            yield body

    @asynccontextmanager
    async def _received(self, request: Request) -> AsyncIterator[bytes]:
        """Receive a body; few that are not small are held at a time."""
        most, chunked = self._served.most_bytes, "transfer-encoding" in request.headers
        length = request.headers.get("content-length", str(most) if chunked else "0")
        refused = ApiError(f"a body must be at most {most} bytes", status=413)
        if not length.isdecimal() or int(length) > most:
            raise refused
        async with self._served.service.desk.body(_client(request)) if int(length) > SMALL_BYTES else nullcontext():
            data = bytearray()
            try:
                async with asyncio.timeout(_BODY_S):
                    async for part in request.stream():
                        data += part
                        if len(data) > most:
                            raise refused
            except TimeoutError:
                raise ApiError(f"the body was not received within {_BODY_S:g} s", status=408) from None
            yield bytes(data)


async def _all(pieces: AsyncIterator[Piece]) -> Iterable[Piece]:
    return [piece async for piece in pieces]


def _client(request: Request) -> str:
    """Return a client's identity for fair queueing: its API key and address."""
    key = request.scope.get("client_key")
    return f"{key if key is not None else ''}@{request.client.host if request.client else ''}"


async def _own_error(_request: Request, error: Exception) -> Response:
    return written(error if isinstance(error, ApiError) else ApiError(str(error), status=500))


async def _disconnected(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_GONE)


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(getattr(error, "headers", None) or {})
    said = {404: f"{request.scope['path'][:100]} not found", 405: f"method {request.method} not allowed"}
    return written(ApiError(said.get(status, str(error)), headers=headers, status=status))


async def _unforeseen(_request: Request, _error: Exception) -> Response:
    return written(ApiError("internal error; see the server's output", status=500))  # uvicorn logs the traceback


def _asset(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    data = resources.files("penstock.serve.page").joinpath(name).read_bytes()

    async def answer(_request: Request) -> Response:
        return Response(data, media_type=kind, headers=_PAGE_HEADERS)

    return answer
