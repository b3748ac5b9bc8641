"""The uvicorn server: connection limits and a graceful shutdown."""

import asyncio
import contextlib
import ipaddress
import re
import resource
import signal
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.errors import UsageError
from penstock.files import read_private
from penstock.transport.open_files import raise_file_limit

_CLIENT_S = {"head": 30.0, "reader": 60.0}  # deadlines of a client; that of a body is the application's
_MOST_CONNECTIONS = 2048
_MOST_HEADER_BYTES = 64 << 10
_SHORTEST_KEY = 16


def read_api_keys(path: Path) -> list[str]:
    """Read API keys, one per line; raises `UsageError` if other users may read the file or a key is not valid.

    Example:
        keys = read_api_keys(Path("api.keys"))
    """
    make = f'make one with: (umask 077; python3 -c "import secrets; print(secrets.token_urlsafe(32))" > {path})'
    keys = [line.strip() for line in read_private(path, make).splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    for key in keys:
        if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(
                f"a key in {path} has fewer than {_SHORTEST_KEY} characters, or a space or a character that is not "
                f"printable ASCII; {make}"
            )
    if not keys:
        raise UsageError(f"{path} has no key; {make}")
    return keys


def check_open(host: str) -> None:
    """Raise `UsageError` if a server without keys would be reachable from other machines."""
    if not is_own_name(host):
        raise UsageError(f"--open needs a loopback address, not {host}; use --host 127.0.0.1, or give --api-keys FILE")


def is_own_name(host: str) -> bool:
    """Return whether a name is always that of this machine: localhost, or a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_origins(origins: Sequence[str]) -> None:
    """Raise `UsageError` for an origin that no browser sends."""
    for origin in origins:
        if not re.fullmatch(r"\*|null|https?://[^/\s]+", origin):
            raise UsageError(f"allow_origin must be * or like https://a.example:8080, without a path; got {origin!r}")


def check_tls(certificate: str, key: str) -> None:
    """Raise `UsageError` if a certificate and its key cannot be loaded."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError too
        raise UsageError(
            f"cannot load {certificate} and {key} ({error}); give a certificate and its key as PEM"
        ) from None


def listen_at(host: str, port: int) -> socket.socket:
    """Bind the listening socket before the model is loaded; raises `UsageError` if the address is not available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(
            f"{host} is not an address of this machine ({error.strerror}); give --host 127.0.0.1"
        ) from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise UsageError(f"cannot listen on {host}, port {port} ({error.strerror}); give another --port") from None
    return made


def serve(
    app: Any,
    listener: socket.socket,
    *,
    drain_s: float,
    certificate: str | None = None,
    key: str | None = None,
    begun: Callable[[], None] = lambda: None,
    failed: Callable[[], bool] = lambda: False,
) -> bool:
    """Serve until SIGTERM or Ctrl-C, then refuse new requests and finish those in flight within `drain_s` seconds.

    `begun` is called once the server listens. The server also ends as soon as `failed` returns True. Returns whether
    Ctrl-C ended it.
    """
    raise_file_limit()
    protocol = type("_Protocol", (_Protocol,), {"waiting": {}})
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, proxy_headers=False, ws="none", lifespan="off",
        http=protocol, h11_max_incomplete_event_size=_MOST_HEADER_BYTES, timeout_graceful_shutdown=int(drain_s),
        ssl_certfile=certificate, ssl_keyfile=key,
    )  # fmt: skip
    server = _Server(config, begun, failed)
    server.run(sockets=[listener])
    return server.interrupted


class _Server(uvicorn.Server):
    """A server that does not re-raise signals, because the stages are closed after it."""

    def __init__(self, config: uvicorn.Config, begun: Callable[[], None], failed: Callable[[], bool]) -> None:
        super().__init__(config)
        self._begun, self._failed = begun, failed
        self.interrupted = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted |= sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._begun()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._failed()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Protocol(H11Protocol):
    """HTTP/1.1 with a limit on connections, and a deadline for every head and for every pause of a reader.

    A connection waits for its client while a head or a body is not complete, or while its answer is not read. Above
    the limit, close the one that has waited longest, from the address with the most such connections.
    """

    waiting: ClassVar[dict["_Protocol", str]]  # connections that wait for their clients, and addresses; longest first
    client_s: ClassVar[Mapping[str, float]] = _CLIENT_S
    most_connections: ClassVar[int] = _MOST_CONNECTIONS
    _waits_for: str | None = None
    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()
        if len(self.connections) > _within_files(self.most_connections):
            most, _ = Counter(self.waiting.values()).most_common(1)[0]
            next(each for each, address in self.waiting.items() if address == most)._close()

    def handle_events(self) -> None:
        super().handle_events()
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for(None)
        super().connection_lost(exc)

    def _look(self) -> None:
        """Begin another wait if what the connection waits for has changed; single bytes extend none."""
        if self.cycle is not None and not self.cycle.response_complete and not self.flow.write_paused:
            what = "body" if self.cycle.more_body else None
        else:
            what = "reader" if self.transport.get_write_buffer_size() else "head"
        if what != self._waits_for and self in self.connections:
            self._wait_for(what)

    def _wait_for(self, what: str | None) -> None:
        self.waiting.pop(self, None)
        if self._due is not None:
            self._due.cancel()
        self._waits_for, self._due = what, None
        if what is not None:
            self.waiting[self] = self.client[0] if self.client else ""
        if what is not None and what in self.client_s:
            self._due = self.loop.call_later(self.client_s[what], self._close)

    def _close(self) -> None:
        self._wait_for(None)
        self.transport.abort()


def _within_files(most: int) -> int:
    """Return the limit on connections; the other file descriptors are for stages and files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else min(most, soft // 2)


def addresses(host: str, listener: socket.socket) -> Sequence[Any]:
    """Return host and port as they appear in the URL."""
    name = f"[{host}]" if ":" in host else host
    return name, listener.getsockname()[1]
