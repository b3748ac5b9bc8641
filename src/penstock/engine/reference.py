"""Baseline measurements of a device, and of its stages running alone, for comparison with a run."""

import socket
import threading
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from penstock.resources import limit_bytes, usable_cpus
from penstock.runtime.registry import StageRuntime
from penstock.tensors import synchronize
from penstock.tracing.record import SCRATCH_BYTES
from penstock.tracing.trace import Alone, MachineCapacity
from penstock.transport.messages import Message

# long enough to average CPU quotas, which are granted in slices of some milliseconds
_ALONE_S = 0.6
_LEAST_ROUNDS = 3
# size of the reference work: 19 MB, part of the memory allowance of recording
_BLOCKS = 4
_BYTES = 2**20
_BYTE_ROUNDS = 8


def measure_baseline(
    stage: int,
    runtimes: Sequence[StageRuntime],
    kept: Mapping[int, Message],
    num_run: Mapping[int, int],
    *,
    others: int = 0,
    alone_s: float = _ALONE_S,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Alone:
    """Rerun a stage on kept microbatches, one for each of its programs, without any messages.

    `num_run` has the microbatches that each program ran, its weight. Programs are measured sequentially, so the memory
    for it does not grow with their number: at most `scratch_bytes`.
    """
    weights = [num_run[program] for program in kept]
    measured = [
        _measure(runtimes[n], message, others, alone_s / len(kept), scratch_bytes) for n, message in kept.items()
    ]
    seconds, cpu_s = (
        sum(weight * each[part] for weight, each in zip(weights, measured, strict=True)) / sum(weights)
        for part in (0, 1)
    )
    return Alone(stage, seconds, cpu_s)


def _measure(
    runtime: StageRuntime, message: Message, others: int, least_s: float, scratch_bytes: int
) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of one run after the `others` have filled the caches.

    A device that runs the whole model returns to a stage after all other stages. Copies of this stage stand in for them
    if they fit into memory, and memory reads for the rest: repeating one stage with warm caches would be faster than
    any real model.
    """
    alike, rest = _with_copies(runtime, others, scratch_bytes)
    for copy in alike[1:]:
        _run(copy, message)  # the first run of each copy sets size-dependent state
    count, took_s, took_cpu_s = 0, 0.0, 0.0
    begin_s = time.perf_counter()
    while count < _LEAST_ROUNDS or time.perf_counter() - begin_s < least_s:
        if rest is not None:
            rest.sum()
        # CPU time of this thread, as in a stream: other threads of this process may still take results
        at_s, at_cpu_s = time.perf_counter(), time.thread_time()
        _run(alike[count % len(alike)], message)
        took_s += time.perf_counter() - at_s
        took_cpu_s += time.thread_time() - at_cpu_s
        count += 1
    return took_s / count, took_cpu_s / count


def _run(runtime: StageRuntime, message: Message) -> None:
    runtime(dict(zip(runtime.program.symbols, message.sizes, strict=True)), message.tensors)
    synchronize(runtime.device)


def _with_copies(runtime: StageRuntime, others: int, scratch_bytes: int) -> tuple[list[StageRuntime], Tensor | None]:
    size = max(1, runtime.weight_bytes)
    num_copies = min(others, scratch_bytes // size)
    copies = [copy for _ in range(num_copies) if (copy := runtime.copied()) is not None]
    if not others or len(copies) < num_copies:  # a user's module may not be copied
        return [runtime], None
    rest_bytes = min((others - num_copies) * size, scratch_bytes - num_copies * size)
    rest = torch.zeros(rest_bytes // 8, dtype=torch.int64) if rest_bytes >= 8 and num_copies < others else None
    return [runtime, *copies], rest


def measure_machine() -> MachineCapacity:
    """Measure this device's speed, usable CPUs, and CPU seconds per sent byte."""
    threads = torch.get_num_threads()
    try:
        seconds = calibrate(0.0, by_cpu=True, rounds=6, blocks=_BLOCKS)
    finally:
        torch.set_num_threads(threads)
    return MachineCapacity(seconds, usable_cpus(), byte_seconds(), float(limit_bytes() or 0))


def byte_seconds() -> float:
    """Return the CPU seconds per byte on one side of a message: copy, checksum, and socket."""
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
        # this process is both sides: a copy, two checksums, the system's send and receive
        return (time.process_time() - begin_s) / (2 * _BYTES * _BYTE_ROUNDS)


def _read(connection: socket.socket) -> None:
    room = memoryview(bytearray(2**18))
    while connection.recv_into(room):
        pass


BLOCKS, _ROWS, _WIDTH = 12, 197, 384


def calibrate(
    seconds: float = 1.0, *, threads: int = 1, by_cpu: bool = False, rounds: int = 3, blocks: int = BLOCKS
) -> float:
    """Return the seconds per round of a small transformer's matrix products on this device.

    The weights, 4.7 MB for each of its `blocks`, exceed most caches, like those of a model. Rounds are repeated for at
    least `seconds`, to average a CPU quota that is granted in short slices, and at least `rounds` times, after a
    warm-up of a quarter of that time; `by_cpu` counts this thread's CPU seconds.

    Example:
        speed = profile.calibration_s / calibrate()
    """
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    weights = [
        (torch.randn(4 * _WIDTH, _WIDTH, generator=generator), torch.randn(_WIDTH, 4 * _WIDTH, generator=generator))
        for _ in range(blocks)
    ]
    rows = torch.randn(_ROWS, _WIDTH, generator=generator)
    clock = time.thread_time if by_cpu else time.perf_counter
    with torch.inference_mode():
        _rounds(rows, weights, seconds / 4, 1)  # a new process is some percent slower
        begin = clock()
        done = _rounds(rows, weights, seconds, rounds)
        return (clock() - begin) / done


def _rounds(rows: torch.Tensor, weights: list[tuple[torch.Tensor, torch.Tensor]], seconds: float, least: int) -> int:
    """Run rounds for at least `seconds`, and at least `least` of them; returns their number."""
    begin, done = time.perf_counter(), 0
    while done < least or time.perf_counter() - begin < seconds:
        _round(rows, weights)
        done += 1
    return done


def _round(rows: torch.Tensor, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for up, down in weights:
        hidden = functional.gelu(functional.linear(functional.layer_norm(rows, (_WIDTH,)), up))
        functional.linear(hidden, down)
