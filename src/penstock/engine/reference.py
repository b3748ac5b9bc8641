"""What a device and its stages can do by themselves, against which a run is held."""

import os
import socket
import threading
import time
from collections.abc import Sequence

import torch

from penstock.cluster.launch import quota_cores
from penstock.engine.calibrate import calibrate
from penstock.engine.devices import settle
from penstock.engine.messages import Message
from penstock.engine.runtime import Runtime, StageRuntime
from penstock.engine.turns import Turns
from penstock.memory import limit_bytes
from penstock.tracing.trace import Alone, Machine

# long enough for CPU quotas, which come in slices of some milliseconds, to even out
_ALONE_S = 0.6
_LEAST_ROUNDS = 3
# beyond this a stage's weights fit no cache anyway
_CACHED_BYTES = 64 * 2**20
_BYTES = 2**20
_BYTE_ROUNDS = 8


def measure_alone(stage: int, runtimes: Turns[StageRuntime], kept: Sequence[Message], *, others: int = 0) -> Alone:
    """Run a stage again on microbatches that it had, one for each turn, with no messages in between.

    A device that runs the whole model comes back to a stage when the `others` have filled its caches. Copies of the
    stage stand in for them, and every run counts: the same stage over and over would be quicker than any model is.
    """
    cast = [(message, _with_copies(runtimes[message.index], others)) for message in kept]
    for message, alike in cast:
        for copy in alike[1:]:
            _run(copy, message)  # the first run of each decides what depends on sizes
    count = num = 0
    # of the thread that computes, as in a stream: this process's other threads may still be taking results
    begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
    while count < _LEAST_ROUNDS or time.perf_counter() - begin_s < _ALONE_S:
        for message, alike in cast:
            _run(alike[count % len(alike)], message)
            num += 1
        count += 1
    return Alone(stage, (time.perf_counter() - begin_s) / num, (time.thread_time() - begin_cpu_s) / num)


def _run(runtime: StageRuntime, message: Message) -> None:
    runtime(dict(zip(runtime.program.symbols, message.sizes, strict=True)), message.tensors)
    settle(runtime.device)


def _with_copies(runtime: StageRuntime, others: int) -> list[StageRuntime]:
    if not isinstance(runtime, Runtime):  # the user's own module, which may not be copied
        return [runtime]
    fitting = _CACHED_BYTES // max(1, runtime.weight_bytes)
    return [runtime, *(runtime.copied() for _ in range(min(others, fitting - 1)))]


def measure_machine() -> Machine:
    """Measure how fast this device is, how many CPUs it may use, and what a byte costs it to send."""
    threads = torch.get_num_threads()
    try:
        seconds = calibrate(0.0, by_cpu=True, rounds=2)
    finally:
        torch.set_num_threads(threads)
    return Machine(seconds, usable_cpus(), byte_seconds(), float(limit_bytes() or 0))


def usable_cpus() -> float:
    """Give how many CPUs this process may use, a fraction where a quota says so."""
    quota = float(os.environ["PENSTOCK_CPU"]) if "PENSTOCK_CPU" in os.environ else quota_cores()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(cores), quota or float(cores))


def byte_seconds() -> float:
    """Give the CPU seconds that one side of a message takes per byte: copied, added up, and through a socket."""
    source, target = torch.zeros(_BYTES, dtype=torch.uint8), torch.zeros(_BYTES, dtype=torch.uint8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        reader = threading.Thread(target=_read, args=(far,), daemon=True)
        begin_s = time.process_time()
        reader.start()
        for _ in range(_BYTE_ROUNDS):
            target.copy_(source)
            int(target.view(torch.int64).sum())
            int(target.view(torch.int64).sum())
            near.sendall(memoryview(target.numpy()))  # type: ignore[arg-type]
        near.shutdown(socket.SHUT_WR)
        reader.join()
        # both sides were this process: a copy, two sums, the system's sending and receiving
        return (time.process_time() - begin_s) / (2 * _BYTES * _BYTE_ROUNDS)


def _read(connection: socket.socket) -> None:
    room = memoryview(bytearray(2**18))
    while connection.recv_into(room):
        pass
