"""Bytes of strangers at a run's ports: `python -m benchmarks.faults.strangers --count 100000 --json FILE`.

Two ranks exchange messages over secured connections while forged bytes arrive at the ports of the store and of both
ranks, and while `--held` further connections stay open: every second one announces 4 MiB and withholds the end. Every
message must come as it was sent, and a process with the key must be able to connect meanwhile.
"""

import argparse
import json
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.training.__main__ import environment
from penstock.group.zmq_store import Prefixed, StoreServer, ZmqStore
from penstock.resources import peak_bytes
from penstock.transport.curve import Curve, make_key
from penstock.transport.zeromq import ZmqTransport

HOST = "127.0.0.1"
_REPLAYED_BYTES = 4096


def greeting(mechanism: bytes = b"CURVE") -> bytes:
    """Return the first bytes of ZeroMQ's protocol (ZMTP 3.0, RFC 23)."""
    return b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


FORGED: Sequence[Callable[[random.Random], bytes]] = (
    lambda draw: draw.randbytes(draw.randint(1, 400)),
    lambda draw: greeting()[: draw.randint(1, 63)],  # truncated
    lambda draw: greeting(b"NULL") + draw.randbytes(60),  # another mechanism
    lambda _draw: greeting(b"PLAIN") + b"\x04\x0d\x05HELLO\x01a\x01b",
    lambda draw: greeting() + b"\x04\xc8\x05HELLO\x01\x00" + draw.randbytes(192),  # a HELLO that proves nothing
    lambda draw: greeting() + b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + draw.randbytes(120),
    lambda _draw: greeting() + b"\x06" + struct.pack(">Q", 2**62),  # a command of four exbibytes
    lambda draw: greeting() + b"\x06" + struct.pack(">Q", draw.randint(0, 2**33)) + draw.randbytes(50),
    lambda draw: greeting() + b"\x02" + struct.pack(">Q", draw.randint(0, 2**40)) + draw.randbytes(99),
)


def replayed(record: bytes) -> Callable[[random.Random], bytes]:
    """Return what sends the beginning of a recorded handshake again, whole, cut short or changed in one byte."""

    def forge(draw: random.Random) -> bytes:
        data = bytearray(record[: draw.randint(64, len(record))])
        if draw.random() < 0.5:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(data)

    return forge


def record_handshake(curve: Curve, port: int) -> bytes:
    """Return what a process with the key sends to connect: recorded on the way by somebody in between."""
    with socket.create_server((HOST, 0)) as between:
        found = bytearray()

        def carry() -> None:
            inner = between.accept()[0]
            with inner, socket.create_connection((HOST, port)) as outer:
                back = threading.Thread(target=_pass_on, args=(outer, inner, bytearray()), daemon=True)
                back.start()
                _pass_on(inner, outer, found)

        thread = threading.Thread(target=carry, daemon=True)
        thread.start()
        store = ZmqStore(curve, HOST, between.getsockname()[1])
        store.set("recorded", "1")
        store.close()
        thread.join(5.0)
    return bytes(found[:_REPLAYED_BYTES])


def _pass_on(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    try:
        while data := source.recv(65536):
            kept += data
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def attack(ports: Sequence[int], forge: Sequence[Callable[[random.Random], bytes]], count: int, seed: int) -> None:
    """Send forged bytes to ports, each over a connection of its own; some wait for an answer."""
    draw = random.Random(seed)
    for index in range(count):
        with socket.create_connection((HOST, draw.choice(ports)), timeout=5) as stranger:
            # closed at once, so that the next ones find free port numbers
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            try:
                stranger.sendall(draw.choice(forge)(draw))
                if index % 50 == 0:
                    stranger.settimeout(0.02)
                    while stranger.recv(256):
                        pass
            except OSError:
                continue


def hold(ports: Sequence[int], count: int) -> list[socket.socket]:
    """Open connections that stay: every second one says nothing, the others announce 4 MiB and withhold the end."""
    announced, held = 4 * 2**20, []
    for index in range(count):
        stranger = socket.create_connection((HOST, ports[index % len(ports)]), timeout=5)
        held.append(stranger)
        if index % 2:
            try:
                stranger.sendall(greeting() + b"\x06" + struct.pack(">Q", announced) + bytes(announced - 1))
            except OSError:  # it was closed, or nobody reads
                continue
    return held


def main() -> None:
    """Attack, exchange messages meanwhile, and write what came of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.strangers")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--held", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    key = make_key()
    curves = [Curve(key), Curve(key)]
    server = StoreServer(curves[0], HOST)
    transports: dict[int, ZmqTransport] = {}

    def join(rank: int) -> None:
        store = Prefixed(ZmqStore(curves[rank], HOST, server.port), "run")  # type: ignore[arg-type]
        transports[rank] = ZmqTransport(curves[rank], store, rank, 2, HOST)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    ports = [server.port, *(int(server.get(f"run/data/{rank}").split()[1]) for rank in range(2))]
    before, began_s = peak_bytes(), time.monotonic()
    held = hold(ports, given.held)
    holding_s, at_s = time.monotonic() - began_s, time.monotonic()
    ZmqStore(curves[1], HOST, server.port).close()
    beside = {
        "held": given.held,
        "holding_s": holding_s,
        "connect_beside_held_s": time.monotonic() - at_s,
        "more_memory_of_held_bytes": peak_bytes() - before,
    }
    forge = [*FORGED, replayed(record_handshake(curves[1], server.port))]
    attacking = threading.Thread(target=attack, args=(ports, forge, given.count, given.seed))
    began_s, before = time.monotonic(), peak_bytes()
    attacking.start()
    exchanged, worst_s = 0, 0.0
    while attacking.is_alive():
        sent, received = torch.randint(0, 256, (3000,), dtype=torch.uint8), torch.zeros(3000, dtype=torch.uint8)
        at_s = time.monotonic()
        arriving = transports[1].receive(received, 0, 1)
        transports[0].send(sent, 1, 1).wait()
        arriving.wait()
        worst_s = max(worst_s, time.monotonic() - at_s)
        if not torch.equal(sent, received):
            sys.exit("a message came out different")
        exchanged += 1
        time.sleep(0.005)
    seconds = time.monotonic() - began_s
    with_key = ZmqStore(curves[1], HOST, server.port)
    with_key.set("after", "fine")
    found = {
        "forged": given.count, "seconds": seconds, "exchanged": exchanged, "slowest_message_s": worst_s,
        "store_answers": with_key.get("after") == b"fine",
        "more_memory_bytes": peak_bytes() - before,
        **beside,
    }  # fmt: skip
    print(json.dumps(found))
    if given.json is not None:
        given.json.write_text(json.dumps({"environment": environment()} | found, indent=2) + "\n")
    with_key.close()
    for stranger in held:
        stranger.close()
    for transport in transports.values():
        transport.close()
    server.close()
    for curve in curves:
        curve.close()


if __name__ == "__main__":
    main()
