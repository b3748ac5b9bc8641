"""How fast the hosts of a cluster are, and what lies between them, measured over torch.distributed."""

import json
import statistics
import time
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch

from penstock.deploy.worker import work
from penstock.engine.reference import calibrate
from penstock.group.world import World
from penstock.measure.message_costs import measure_messages
from penstock.measure.profiler import MessageCosts
from penstock.transport.base import (
    FEEDER,
    WORD_BYTES,
    Transport,
    receive_bytes,
    receive_tensor,
    send_bytes,
    send_tensor,
)

_LINK_BYTES = 2 * 1024 * 1024
_PINGS = 15
# every pair is measured up to this many hosts; beyond that neighbours only
_MOST_HOSTS_IN_PAIRS = 6


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """One direction between two ranks."""

    source: int
    target: int
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class MeasuredHosts:
    """What was measured: seconds of a calibration round per rank, all at once; links; what messages cost."""

    calibration_s: list[float]
    links: list[MeasuredLink]
    messages: MessageCosts


def measure_hosts(world: World, *, seconds: float = 2.0, threads: int = 1) -> MeasuredHosts | None:
    """Measure a world whose processes all call this; the one that feeds gets the figures, the others None.

    Example:
        with join_torchrun(followed=True) as world:
            measured = measure_hosts(world)

    Hosts are calibrated at the same time, so that what they take from each other is in the figures; links
    one after the other, in both directions.
    """
    transport = world.transport
    _together(transport)
    own_s = calibrate(seconds, threads=threads)
    calibration_s = _gather(transport, own_s)
    links = []
    for source, target in _pairs(transport.size):
        _together(transport)
        seen = _measure_link(transport, source, target) if transport.rank in {source, target} else None
        rates = _gather(transport, json.dumps(seen) if seen else "")
        links += [MeasuredLink(source, target, *json.loads(rate)) for rate in rates[source : source + 1] if rate]
    if transport.rank != FEEDER:
        work(world)
        return None
    messages = measure_messages(world)
    return MeasuredHosts([float(second) for second in calibration_s], links, messages)


def _pairs(size: int) -> list[tuple[int, int]]:
    ranks = range(size)
    pairs = list(combinations(ranks, 2)) if size <= _MOST_HOSTS_IN_PAIRS else [*pairwise(ranks), (0, size - 1)]
    return [pair for a, b in pairs for pair in ((a, b), (b, a))]


def _measure_link(transport: Transport, source: int, target: int) -> tuple[float, float] | None:
    """Return bytes per second and seconds of latency, on the sending side."""
    if transport.rank == target:
        for _ in range(_PINGS):
            receive_bytes(transport, source, limit=WORD_BYTES)
            send_bytes(transport, b"", source)
        for num_bytes in (_LINK_BYTES // 8, _LINK_BYTES):
            receive_tensor(transport, torch.empty(num_bytes, dtype=torch.uint8), source)
            send_bytes(transport, b"", source)
        return None
    trips = []
    for _ in range(_PINGS):
        begin = time.perf_counter()
        send_bytes(transport, b"", target)
        receive_bytes(transport, target, limit=WORD_BYTES)
        trips.append(time.perf_counter() - begin)
    taken = []
    for num_bytes in (_LINK_BYTES // 8, _LINK_BYTES):
        begin = time.perf_counter()
        send_tensor(transport, torch.zeros(num_bytes, dtype=torch.uint8), target)
        receive_bytes(transport, target, limit=WORD_BYTES)
        taken.append(time.perf_counter() - begin)
    # the difference leaves out what every message costs, and what a link lets through at once
    return (_LINK_BYTES - _LINK_BYTES // 8) / max(1e-9, taken[1] - taken[0]), statistics.median(trips) / 2


def _together(transport: Transport) -> None:
    """Wait until every rank is here."""
    _gather(transport, "")


def _gather(transport: Transport, value: object) -> list[str]:
    """Send every rank's value as text to the one that feeds; the others wait until it has them all."""
    if transport.rank != FEEDER:
        send_bytes(transport, str(value).encode(), FEEDER)
        receive_bytes(transport, FEEDER, limit=WORD_BYTES)
        return []
    values = [
        str(value),
        *(receive_bytes(transport, rank, limit=WORD_BYTES).decode() for rank in range(1, transport.size)),
    ]
    for rank in range(1, transport.size):
        send_bytes(transport, b"", rank)
    return values
