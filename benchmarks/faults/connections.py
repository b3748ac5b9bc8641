"""What encryption takes beside a thread that computes: `python -m benchmarks.faults.connections --json FILE`.

One process computes in small steps, as a stage does, while a thread of it takes in messages of 300 kB from another
process: over ZeroMQ without a key, over its CURVE, over Python's TLS sockets.
"""

import argparse
import json
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.training.__main__ import environment
from penstock.group.zmq_store import StoreServer, ZmqStore
from penstock.transport.base import Transport
from penstock.transport.connections import TcpConnections
from penstock.transport.curve import Curve, read_key, write_key
from penstock.transport.zeromq import ZmqTransport

HOST, SIZE, COUNT, PAUSE_S = "127.0.0.1", 300_000, 400, 0.02
WAYS = ("plain", "CURVE", "TLS")


def main() -> None:
    """Run the three ways in turns, and write what each took."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.connections")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--send", nargs=3, help="what the other process is given: a way, a port and a folder")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.send:
        send(given.send[0], int(given.send[1]), Path(given.send[2]))
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        write_key(folder / "run.key")
        subprocess.run(
            ["/usr/bin/openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-subj", "/CN=penstock", "-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")],
            check=True, capture_output=True,
        )  # fmt: skip
        alone = compute(3.0)[0]
        for number in range(3):
            for way in WAYS:
                rows.append({"way": way, "round": number, "alone": alone} | measure(way, folder))
                print(rows[-1], file=sys.stderr)
    found = {"environment": environment(), "rows": rows}
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


def compute(seconds: float, ended: Callable[[], bool] = lambda: False) -> tuple[float, float]:
    """Compute in small steps; returns steps per second and the CPU seconds of this thread."""
    weight, x = torch.randn(192, 192), torch.randn(64, 192)
    steps, began_s, began_cpu_s = 0, time.perf_counter(), time.thread_time()
    while time.perf_counter() - began_s < seconds and not ended():
        torch.nn.functional.linear(x, weight)
        sum(range(200))
        steps += 1
    return steps / (time.perf_counter() - began_s), time.thread_time() - began_cpu_s


def measure(way: str, folder: Path) -> dict[str, float]:
    """Take in all messages of one way while computing; CPU seconds of a message are those beside the computation."""
    if way == "TLS":
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
    elif way == "CURVE":
        curve = Curve(read_key(folder / "run.key"))
        server = StoreServer(curve, HOST)
        port = server.port
    else:
        store = TCPStore(HOST, 0, None, True, wait_for_workers=False)
        port = store.port
    other = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.faults.connections", "--send", way, str(port), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    buffer = torch.zeros(SIZE, dtype=torch.uint8)
    if way == "TLS":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        stream = context.wrap_socket(listener.accept()[0], server_side=True)
        take: Callable[[], None] = lambda: read_whole(stream, memoryview(buffer.numpy()))  # type: ignore[arg-type]  # noqa: E731
    else:
        if way == "CURVE":
            transport: Transport = ZmqTransport(curve, server, 0, 2, HOST)
        else:
            plain = TcpConnections()
            transport = ZmqTransport(plain, store, 0, 2, HOST)
        take = lambda: transport.receive(buffer, 1, 1).wait()  # noqa: E731
    done = threading.Event()

    def receive() -> None:
        for _ in range(COUNT):
            take()
        done.set()

    thread = threading.Thread(target=receive)
    began_cpu_s = time.process_time()
    thread.start()
    rate, own_cpu_s = compute(120.0, done.is_set)
    thread.join()
    received_s = (time.process_time() - began_cpu_s - own_cpu_s) / COUNT
    sent_s = float(other.communicate()[0])
    if way != "TLS":
        transport.close()
    if way == "CURVE":
        server.close()
        curve.close()
    if way == "plain":
        plain.close()
    return {"steps_per_s": rate, "receive_cpu_s": received_s, "send_cpu_s": sent_s}


def read_whole(stream: ssl.SSLSocket, view: memoryview) -> None:
    """Fill a buffer."""
    start = 0
    while start < len(view):
        start += stream.recv_into(view[start:])


def send(way: str, port: int, folder: Path) -> None:
    """Send all messages, one after the other with pauses, and print the CPU seconds of each."""
    data = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    if way == "TLS":
        context = ssl.create_default_context(cafile=str(folder / "tls.crt"))
        context.check_hostname = False
        stream = context.wrap_socket(socket.create_connection((HOST, port)))
        give: Callable[[], None] = lambda: stream.sendall(memoryview(data.numpy()))  # type: ignore[arg-type]  # noqa: E731
    else:
        if way == "CURVE":
            curve = Curve(read_key(folder / "run.key"))
            transport: Transport = ZmqTransport(curve, ZmqStore(curve, HOST, port), 1, 2, HOST)
        else:
            store = TCPStore(HOST, port, None, False, wait_for_workers=False)
            transport = ZmqTransport(TcpConnections(), store, 1, 2, HOST)
        give = lambda: transport.send(data, 0, 1).wait()  # noqa: E731
    began_s = time.process_time()
    for _ in range(COUNT):
        give()
        time.sleep(PAUSE_S)
    print((time.process_time() - began_s) / COUNT, flush=True)
    time.sleep(1.0)  # what is on its way arrives


if __name__ == "__main__":
    main()
