"""A key-value store over ZeroMQ connections; torch's own needs a trusted network (`group/board.py`)."""

import threading
import time
from typing import Literal

import msgspec
import zmq
from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.text import plain
from penstock.transport.base import SILENCE_S
from penstock.transport.connections import CONNECT_S, Connection, Connections

MAX_KEYS, MAX_VALUE_BYTES = 100_000, 64 * 1024
_POLL_MS = 100
_ANSWER_S = 60.0


class StoreRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A request to a store: an operation with its keys and values, and a number that the answer repeats."""

    number: int
    operation: Literal["set", "get", "check", "multi_get", "compare_set", "add"]
    words: list[str]


class Answer(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A store's answer: values, or an error."""

    number: int
    values: list[str]
    problem: str = ""


class _Values:
    """Store operations, the same on either side of a connection."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._do("set", [key, value])

    def get(self, key: str) -> bytes:
        """Read a value; raises `RuntimeError` if the key is not set."""
        return self._do("get", [key])[0].encode()

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these keys are set."""
        return self._do("check", keys) == ["1"]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several values."""
        return [value.encode() for value in self._do("multi_get", keys)]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key to `desired` if its value ("" if unset) is `expected`; returns the value after the call."""
        return self._do("compare_set", [key, expected, desired])[0].encode()

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 if unset; returns the sum."""
        return int(self._do("add", [key, str(amount)])[0])

    def _do(self, operation: str, words: list[str]) -> list[str]:
        """Run one operation; raises `RuntimeError` if it fails."""
        raise NotImplementedError


class StoreServer(_Values):
    """A store that this process serves to a number of peers, with the same interface locally.

    Only processes that hold the run's key can connect, or those of this account if the store is in a private folder.

    Example:
        store = StoreServer(curve, "192.168.1.10", 29500)
    """

    def __init__(self, connections: Connections, address: str, port: int = 0, peers: int = 0) -> None:
        self._socket, self.port = connections.listen(address, port, peers)
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="penstock-store-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._closing.set()
        self._thread.join()

    def _do(self, operation: str, words: list[str]) -> list[str]:
        """Run one operation; raises `RuntimeError` if it fails."""
        with self._lock:
            values = self._values
            if operation == "check":
                return [str(int(all(word in values for word in words)))]
            if operation in {"get", "multi_get"}:
                missing = [word for word in words if word not in values]
                if missing:
                    raise RuntimeError(f"key not found in the store: {plain(missing[0])[:80]}")
                return [values[word] for word in words]
            key, *rest = words
            if operation == "set":
                (found,) = rest
            elif operation == "compare_set":
                expected, desired = rest
                found = desired if values.get(key, "") == expected else values.get(key, "")
            else:
                (amount,) = rest
                found = str(int(values.get(key, "0")) + int(amount))
            if len(found) > MAX_VALUE_BYTES:
                raise RuntimeError(f"a value of the store has at most {MAX_VALUE_BYTES} characters; got {len(found)}")
            if key not in values and len(values) >= MAX_KEYS:
                raise RuntimeError(f"the store is full: it has {MAX_KEYS} keys")
            values[key] = found
            return [found]

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                if poller.poll(_POLL_MS):
                    name, *parts = self._socket.recv_multipart()
                    self._socket.send_multipart([name, msgspec.json.encode(self._answer(parts))])
        except zmq.ZMQError:  # the context was destroyed first: this process is exiting
            pass
        finally:
            self._socket.close(0)

    def _answer(self, parts: list[bytes]) -> Answer:
        number = -1
        try:
            request = msgspec.json.decode(b"".join(parts), type=StoreRequest)
            number = request.number
            return Answer(number, self._do(request.operation, request.words))
        except (msgspec.MsgspecError, UnicodeError, ValueError, RuntimeError, RecursionError) as error:
            return Answer(number, [], str(error)[:200] or type(error).__name__)


class ZmqStore(_Values):
    """A client of another process's `StoreServer`.

    Every call raises `RuntimeError` once the connection is broken, which libzmq's threads detect; while it is alive, a
    call waits up to a minute. `heard_s` is the time at which a call last found the connection alive.
    """

    def __init__(
        self,
        connections: Connections,
        address: str,
        port: int,
        timeout_s: float = CONNECT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._connection: Connection = connections.connect(address, port, b"", timeout_s, silence_s)
        self._part_bytes = connections.part_bytes
        self._lock = threading.Lock()
        self._number = 0
        self.heard_s = time.monotonic()
        self._poller = zmq.Poller()
        self._poller.register(self._connection.socket, zmq.POLLIN)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()

    def _do(self, operation: str, words: list[str]) -> list[str]:
        with self._lock:
            self._number += 1
            request = msgspec.json.encode([self._number, operation, words])
            parts = [request[at : at + self._part_bytes] for at in range(0, len(request), self._part_bytes)]
            deadline = time.monotonic() + _ANSWER_S
            try:
                self._connection.socket.send_multipart(parts)
                while time.monotonic() < deadline:
                    self._connection.look()
                    if self._connection.broken:
                        raise RuntimeError("the connection to the store broke")
                    self.heard_s = time.monotonic()
                    if self._poller.poll(_POLL_MS):
                        answer = msgspec.json.decode(self._connection.socket.recv(), type=Answer)
                        if answer.number != self._number:
                            continue
                        if answer.problem:
                            raise RuntimeError(answer.problem)
                        return answer.values
            except zmq.ZMQError as error:
                raise RuntimeError(f"the connection to the store broke: {error}") from None
            except msgspec.MsgspecError as error:
                raise RuntimeError(f"the store sent an answer that cannot be decoded: {error}") from None
            raise RuntimeError(f"the store has not answered for {_ANSWER_S:g} s")


class Prefixed:
    """A part of a store, under a key prefix."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        """Read the value of a key that is set."""
        found: bytes = self._store.get(f"{self._prefix}/{key}")
        return found

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these keys are set."""
        return bool(self._store.check([f"{self._prefix}/{key}" for key in keys]))
