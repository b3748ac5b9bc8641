"""The ASGI application: authentication, limits and routes."""

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.serve.classes import ClassService
from penstock.serve.documents import Documents
from penstock.serve.metrics import Metrics
from penstock.serve.protocol import ApiError, ChatBody, CompletionBody, StreamOptions, openapi, parse_body
from penstock.serve.texts import Choice, Piece, TextService
from penstock.version import __version__

_PUBLIC = frozenset({"/", "/health", "/page.css", "/page.js"})
_BODY_S = 60.0
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_GONE = 499  # nginx's status for a client that disconnected
_Result = TypeVar("_Result")


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
        Route("/v1/models", paths.models),
        Route("/v1/models/{name:path}", paths.model),
        Route("/v1/pipeline", paths.pipeline),
    ]
    if isinstance(served.service, TextService):
        routes += [
            Route("/v1/completions", paths.completions, methods=["POST"]),
            Route("/v1/chat/completions", paths.chat, methods=["POST"]),
        ]
    else:
        routes += [Route("/v1/classify", paths.classify, methods=["POST"])]
    handlers: dict[Any, Any] = {
        PenstockError: _own_error, ClientDisconnect: _disconnected, HTTPException: _http_error, Exception: _unforeseen,
    }  # fmt: skip
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.add_middleware(_Guard, served=served)
    return app


class _Guard:
    """Middleware that checks the API key before the body is read."""

    def __init__(self, app: ASGIApp, served: Served) -> None:
        self._app, self._keys = app, [key.encode() for key in served.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in _PUBLIC:
            kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            given = key.strip().encode()
            # compare with every key: the duration must not depend on the key that matches
            matching = [hmac.compare_digest(given, known) for known in self._keys]
            if kind.lower() != "bearer" or not any(matching):
                error = ApiError(
                    "an API key is required: Authorization: Bearer KEY", code="invalid_api_key", status=401
                )
                await _written(error)(scope, receive, send)
                return
            scope["client_key"] = matching.index(True)
        await self._app(scope, receive, send)


class _Paths:
    """The handlers of all routes."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def health(self, _request: Request) -> Response:
        problem = self._served.problem()
        if problem is not None:
            return JSONResponse({"status": "not ready", "why": problem}, 503)
        return JSONResponse({"status": "ready", "model": self._served.name})

    async def metrics(self, _request: Request) -> Response:
        return Response(self._served.metrics.text(), media_type="text/plain; version=0.0.4")

    async def document(self, _request: Request) -> Response:
        return JSONResponse(openapi(__version__, texts=isinstance(self._served.service, TextService)))

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def pipeline(self, _request: Request) -> Response:
        served = self._served
        return JSONResponse(
            {"model": served.name, "problem": served.problem(), "stages": served.stages(),
             "changes": served.changes(), "joins_at": served.joins_at(),
             "running": served.service.admission.num_running, "waiting": served.service.admission.num_waiting,
             "slots": served.service.admission.slots, "classifies": isinstance(served.service, ClassService)}
        )  # fmt: skip

    async def completions(self, request: Request) -> Response:
        service = self._texts()
        body = parse_body(CompletionBody, await self._body(request))
        self._check_model(body.model)
        choices = await service.completion(body)
        return await self._answer(request, body, choices, chat=False)

    async def chat(self, request: Request) -> Response:
        service = self._texts()
        body = parse_body(ChatBody, await self._body(request))
        self._check_model(body.model)
        choices = await service.chat(body)
        return await self._answer(request, body, choices, chat=True)

    async def classify(self, request: Request) -> Response:
        self._check_ready()
        service = self._served.service
        if not isinstance(service, ClassService):
            raise ApiError("this model writes text; use /v1/completions", status=404)
        top = request.query_params.get("top", "5")
        if not top.isdecimal() or not 0 < len(top) < 6 or int(top) < 1:
            raise ApiError(f"top must be a number of classes, at least 1; got {top[:20]!r}", param="top")
        data = await self._body(request)
        image = await asyncio.to_thread(service.read, data, request.headers.get("content-type", ""))
        return JSONResponse(await _until_gone(request, service.classify(image, int(top), _client(request))))

    async def _answer(
        self, request: Request, body: CompletionBody | ChatBody, choices: Sequence[Choice], *, chat: bool
    ) -> Response:
        service = self._texts()
        options = body.stream_options or StreamOptions()
        if body.stream_options is not None and not body.stream:
            raise ApiError("stream_options needs stream to be true", param="stream_options")
        if options.continuous_usage_stats and not options.include_usage:
            raise ApiError(
                "stream_options.continuous_usage_stats needs include_usage to be true", param="stream_options"
            )
        documents = Documents(
            self._served.name, choices, chat=chat, counts_in_chunks=options.continuous_usage_stats
        )  # fmt: skip
        pieces = service.pieces(choices, _client(request))
        if not body.stream:
            async with aclosing(pieces):
                return JSONResponse(documents.whole(await _until_gone(request, _all(pieces))))
        # errors before the first piece still have a status code
        try:
            first = await _until_gone(request, anext(pieces))
        except BaseException:
            await pieces.aclose()
            raise
        return _Events(_events(documents, first, pieces, usage=options.include_usage))

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
                f"model {str(name)[:100]!r} not found; this server has {self._served.name}", param="model",
                code="model_not_found", status=404,
            )  # fmt: skip

    def _model(self) -> dict[str, Any]:
        return {"id": self._served.name, "object": "model", "created": self._served.created, "owned_by": "penstock"}

    async def _body(self, request: Request) -> bytes:
        most, length = self._served.most_bytes, request.headers.get("content-length", "0")
        refused = ApiError(f"a body must be at most {most} bytes", status=413)
        if not length.isdecimal() or int(length) > most:
            raise refused
        data = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    data += part
                    if len(data) > most:
                        raise refused
        except TimeoutError:
            raise ApiError(f"the body was not received within {_BODY_S:g} s", status=408) from None
        return bytes(data)


class _Events(StreamingResponse):
    """Server-sent events; their source is closed when the response ends, for any reason."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def _events(
    documents: Documents, first: Piece, pieces: AsyncGenerator[Piece, None], *, usage: bool
) -> AsyncGenerator[str, None]:
    async with aclosing(pieces):
        for begin in documents.begin():
            yield _event(begin)
        try:
            if (chunk := documents.chunk(first)) is not None:
                yield _event(chunk)
            async for piece in pieces:
                if (chunk := documents.chunk(piece)) is not None:
                    yield _event(chunk)
        except PenstockError as error:
            yield _event((error if isinstance(error, ApiError) else ApiError(str(error), status=500)).document())
            return
        if usage:
            yield _event(documents.usage_chunk())
        yield "data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _all(pieces: AsyncIterator[Piece]) -> Iterable[Piece]:
    return [piece async for piece in pieces]


async def _until_gone(request: Request, work: Awaitable[_Result]) -> _Result:
    """Wait for a result; cancel the work if the client disconnects."""
    doing, watching = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return await doing
    finally:
        for task in (doing, watching):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _gone(receive: Receive) -> None:
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return


def _client(request: Request) -> str:
    """Return a client's identity for fair queueing: its API key and address."""
    key = request.scope.get("client_key")
    return f"{key if key is not None else ''}@{request.client.host if request.client else ''}"


def _written(error: ApiError) -> Response:
    return JSONResponse(error.document(), error.status, headers=error.headers)


async def _own_error(_request: Request, error: Exception) -> Response:
    return _written(error if isinstance(error, ApiError) else ApiError(str(error), status=500))


async def _disconnected(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_GONE)


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(getattr(error, "headers", None) or {})
    said = {404: f"{request.url.path[:100]} not found", 405: f"method {request.method} not allowed"}
    return _written(ApiError(said.get(status, str(error)), headers=headers, status=status))


async def _unforeseen(_request: Request, _error: Exception) -> Response:
    return _written(ApiError("internal error; see the server's output", status=500))  # uvicorn logs the traceback


def _asset(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    data = resources.files("penstock.serve.page").joinpath(name).read_bytes()

    async def answer(_request: Request) -> Response:
        return Response(data, media_type=kind, headers=_PAGE_HEADERS)

    return answer
