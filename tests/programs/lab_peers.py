"""What hosts of a lab do in its tests: they spin, or send something to each other; the first argument says what."""

import os
import socket
import sys
import threading
import time

RANK = os.environ["RANK"]


def connect(host: str, timeout: float = 10) -> socket.socket:
    for _ in range(200):
        try:
            return socket.create_connection((host, 9000), timeout=timeout)
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise SystemExit(f"{host} does not listen")


def spin() -> None:
    start, used = time.monotonic(), time.process_time()
    while time.monotonic() - start < 1:
        pass
    print((time.process_time() - used) / (time.monotonic() - start))


def transfer(sender: str, num_bytes: str) -> None:
    peer = socket.create_server(("host0", 9000)).accept()[0] if RANK == "0" else connect("host0")
    data = bytearray(65536)
    if sender == RANK:
        for _ in range(int(num_bytes) // len(data)):
            peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)
    else:
        total, start = -peer.recv_into(data), time.monotonic()
        while received := peer.recv_into(data):
            total += received
        print(total / (time.monotonic() - start))


def pieces() -> None:
    if RANK == "1":
        peer = connect("host0")
        try:
            while True:
                peer.sendall(bytes(65536))
        except OSError:
            raise SystemExit from None
    peer, _ = socket.create_server(("host0", 9000)).accept()
    seen = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
    seen.bind(("eth0", 0))

    def drain() -> None:
        while peer.recv(1_000_000):
            pass

    threading.Thread(target=drain, daemon=True).start()
    for _ in range(60):
        sizes, begin = [], time.monotonic()
        while time.monotonic() - begin < 0.1:
            sizes.append(seen.recv_into(bytearray(100_000)))
        print(sorted(sizes)[len(sizes) // 2], flush=True)


def greet() -> None:
    for name in ("host0", "host1"):
        print(name, socket.gethostbyname(name), flush=True)
    print(socket.gethostname())
    server = socket.create_server((os.environ["PENSTOCK_HOST"], 9000))
    client = connect("host1" if RANK == "0" else "host0", timeout=5)
    peer, address = server.accept()
    print("greeted by", address[0])
    if RANK == "0":
        client.recv(1)
    else:
        peer.close()


def echo() -> None:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("host0", 9001))
    while True:
        data, address = server.recvfrom(10)
        server.sendto(data, address)


def ask() -> None:
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.settimeout(0.05)
    answers = 0
    for _ in range(8):
        try:
            client.sendto(b"x", ("host0", 9001))
            answers += len(client.recv(10))
        except OSError:
            pass
    print(answers)


{each.__name__: each for each in (spin, transfer, pieces, greet, echo, ask)}[sys.argv[1]](*sys.argv[2:])
