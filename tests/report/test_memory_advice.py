"""Advice on memory: for devices near their limit, and for no others."""

import msgspec

from penstock.report.advice import advise_memory
from penstock.tracing.trace import Counter, MachineCapacity, Run
from tests.report.samples import streamed

MB = 10**6


def held(*peaks: int, limit: int, hosts: tuple[str, ...] | None = None) -> list[str]:
    run = streamed(num=4, compute_s=(0.01,) * len(peaks))
    processes = [run.processes[0]]
    for process, peak in zip(run.processes[1:], peaks, strict=True):
        counters = (Counter("memory_bytes", 0.0, peak / 2), Counter("memory_bytes", 1.0, float(peak)))
        machine = MachineCapacity(1.0, 1.0, 0.0, float(limit))
        processes.append(msgspec.structs.replace(process, counters=counters, machine=machine))
    facts = msgspec.structs.replace(run.facts, hosts=("feeder", *hosts)) if hosts else run.facts
    return advise_memory(Run(facts, tuple(processes)))


def test_only_the_device_that_is_near_its_limit_is_named() -> None:
    (line,) = held(100 * MB, 230 * MB, limit=256 * MB)
    assert line.startswith("board1 (stage 1) reached 230 MB of its 256 MB of memory (90%): give it 329 MB")


def test_processes_of_one_host_share_its_memory() -> None:
    (line,) = held(150 * MB, 90 * MB, limit=256 * MB, hosts=("desk", "desk"))
    assert line.startswith("desk (stage 0, 1) reached 240 MB")


def test_unknown_memory_limit_gives_no_advice() -> None:
    assert held(10**12, limit=0) == []
