"""The check of keys, and of the names of server and page, before anything of a request is read."""

import hmac
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.serve.protocol import ApiError
from penstock.serve.server import is_own_name

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
                    "an API key is required: Authorization: Bearer KEY, or api-key: KEY", code="invalid_api_key",
                    status=401,
                )  # fmt: skip
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
