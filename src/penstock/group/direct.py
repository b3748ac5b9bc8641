"""Agree whether tensors go from GPU to GPU between the processes of a world, and by what."""

import json
import uuid
from collections.abc import Collection, Mapping

import torch
import torch.distributed

from penstock.errors import UsageError
from penstock.group.world import World
from penstock.transport.base import FEEDER, WORD_BYTES, receive_bytes, send_bytes
from penstock.transport.nccl import NcclTransport, connect_nccl

WAYS = ["auto", "gloo", "nccl"]


def go_direct(world: World, ranks: Collection[int], device: torch.device) -> bool:
    """Agree whether tensors go from device to device between these ranks, and give the world a transport that can.

    Each of the ranks calls this, and the process that feeds, whose `world.between_gpus` counts: `auto` where each of
    them has a GPU of its own and NCCL, `gloo` never, `nccl` always. Raises `UsageError` on all of them where NCCL was
    asked for and cannot be.
    """
    mine = _describe(device) if world.rank in ranks else {}
    others = sorted(set(ranks) - {FEEDER})
    if world.rank == FEEDER:
        told = {rank: json.loads(receive_bytes(world.transport, rank, limit=WORD_BYTES)) for rank in others}
        told |= {FEEDER: mine} if mine else {}
        problem = why_not({world.names[rank]: one for rank, one in sorted(told.items())})
        if world.secured:
            problem = "NCCL does not encrypt, and this run has a key; leave between_gpus out, or run without a key"
        wanted = world.between_gpus != "gloo" and len(told) > 1
        known = world.transport.name if isinstance(world.transport, NcclTransport) else uuid.uuid4().hex
        decision = {
            "name": known if wanted and not problem else "",
            "problem": problem if world.between_gpus == "nccl" else "",
        }
        for rank in others:
            send_bytes(world.transport, json.dumps(decision).encode(), rank)
    else:
        send_bytes(world.transport, json.dumps(mine).encode(), FEEDER)
        decision = json.loads(receive_bytes(world.transport, FEEDER, limit=WORD_BYTES))
    if decision["problem"]:
        raise UsageError(decision["problem"])
    if decision["name"] and not isinstance(world.transport, NcclTransport):
        world.transport = NcclTransport(world.transport, world.store, decision["name"], connect_nccl)
        world.health.call_instead(world.transport.abort)
    return bool(decision["name"])


def check_way(way: str, device: str) -> None:
    """Raise `UsageError` for a way between GPUs that is not known, and for NCCL without them."""
    if way not in WAYS:
        raise UsageError(f"tensors go between GPUs by {', '.join(WAYS)}, not by {way!r}; give one of these")
    if way == "nccl" and not device.startswith("cuda"):
        raise UsageError(f"NCCL needs CUDA, but stages compute on {device}; give device='cuda', or no between_gpus")


def why_not(devices: Mapping[str, Mapping[str, str]]) -> str:
    """Return why NCCL cannot be used between processes with these devices; nothing where it can.

    >>> why_not({"rank 0": {"gpu": "GPU-1", "nccl": "yes"}, "rank 1": {"gpu": "GPU-1", "nccl": "yes"}})
    'NCCL needs a GPU for each process, but rank 0 and rank 1 share one; leave between_gpus out'
    """
    seen: dict[str, str] = {}
    for name, device in devices.items():
        if not device["gpu"]:
            return f"NCCL needs CUDA, but {name} computes elsewhere; leave between_gpus out"
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
    """Name the physical GPU of this process, and its NCCL; empty where there is none."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return {"gpu": gpu, "nccl": "yes" if torch.distributed.is_nccl_available() else ""}
