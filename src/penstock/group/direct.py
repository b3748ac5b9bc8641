"""Negotiation of the backend for tensors between the GPUs of a world."""

import contextlib
import json
import uuid
from collections.abc import Collection, Mapping

import torch
import torch.distributed

from penstock.errors import TransportError, UsageError
from penstock.group.world import World
from penstock.transport.base import WORD_BYTES, receive_bytes, send_bytes
from penstock.transport.nccl import NcclTransport, connect_nccl
from penstock.wire import FEEDER

WAYS = ["auto", "host", "nccl"]


def go_direct(world: World, ranks: Collection[int], device: torch.device) -> bool:
    """Negotiate NCCL between these ranks and switch the world's transport to it if all agree; return whether they do.

    The ranks and the driver call this. The driver's `world.between_gpus` decides: `auto` uses NCCL if there are several
    ranks, each with NCCL and a GPU of its own, and the run has no key; `host` never uses it; `nccl` requires it. Raises
    `UsageError` on all these ranks if NCCL is required but not usable.
    """
    mine = _describe(device) if world.rank in ranks else {}
    others, host = sorted(set(ranks) - {FEEDER}), world.transport.inner
    if world.rank == FEEDER:
        told = {rank: json.loads(receive_bytes(world.transport, rank, limit=WORD_BYTES)) for rank in others}
        told |= {FEEDER: mine} if mine else {}
        problem = why_not({world.names[rank]: one for rank, one in sorted(told.items())})
        if world.secured:
            problem = "NCCL does not encrypt, and this run has a key; leave between_gpus out, or run without a key"
        wanted = world.between_gpus != "host" and len(told) > 1
        known = host.name if isinstance(host, NcclTransport) else uuid.uuid4().hex
        decision = {
            "name": known if wanted and not problem else "",
            "problem": problem if world.between_gpus == "nccl" else "",
        }
        # a rank that reads a decision with a problem may end the group before the next rank has been sent the decision
        expected = (TransportError,) if decision["problem"] else ()
        for rank in others:
            with contextlib.suppress(*expected):
                send_bytes(world.transport, json.dumps(decision).encode(), rank)
    else:
        send_bytes(world.transport, json.dumps(mine).encode(), FEEDER)
        decision = json.loads(receive_bytes(world.transport, FEEDER, limit=WORD_BYTES))
    if decision["problem"]:
        raise UsageError(decision["problem"])
    if decision["name"] and not isinstance(host, NcclTransport):
        direct = NcclTransport(host, world.store, decision["name"], connect_nccl)
        world.transport.become(direct)
        world.health.when_failed(direct.abort)
    return bool(decision["name"])


def check_way(way: str, device: str) -> None:
    """Raise `UsageError` for an unknown backend between GPUs, and for NCCL without GPUs."""
    if way not in WAYS:
        raise UsageError(f"between_gpus must be one of {', '.join(WAYS)}; got {way!r}")
    if way == "nccl" and not device.startswith("cuda"):
        raise UsageError(f"NCCL needs CUDA, but stages compute on {device}; set device='cuda' or omit between_gpus")


def why_not(devices: Mapping[str, Mapping[str, str]]) -> str:
    """Return the reason why NCCL cannot connect these devices; empty if it can.

    >>> why_not({"rank 0": {"gpu": "GPU-1", "nccl": "yes"}, "rank 1": {"gpu": "GPU-1", "nccl": "yes"}})
    'NCCL needs a GPU for each process, but rank 0 and rank 1 share one; leave between_gpus out'
    """
    seen: dict[str, str] = {}
    for name, device in devices.items():
        if not device["gpu"]:
            return f"NCCL needs CUDA, but {name} does not compute on a CUDA device; leave between_gpus out"
        if not device["nccl"]:
            return f"the torch of {name} was built without NCCL; leave between_gpus out"
        if device["gpu"] in seen:
            return (
                f"NCCL needs a GPU for each process, but {seen[device['gpu']]} and {name} share one; "
                "leave between_gpus out"
            )
        seen[device["gpu"]] = name
    return ""


def _describe(device: torch.device) -> dict[str, str]:
    """Describe the physical GPU of this process and its NCCL; empty strings if missing."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return {"gpu": gpu, "nccl": "yes" if torch.distributed.is_nccl_available() else ""}
