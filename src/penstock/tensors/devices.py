"""Where a stage computes: the CPU, or a GPU of its process's machine.

Weights, and what a stage computes, lie on its device. Messages are laid out, checked and read on the host:

    stage 0 on a GPU ──copy──▶ host buffer ──transport──▶ host buffer ──copy──▶ stage 1 on a GPU

Where every process has a GPU of its own, what a stage gives goes to the next one's GPU instead (`transport/nccl.py`).
Stages within one process hand tensors over as they are.
"""

import socket
from typing import Any

import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.memory import anonymous_bytes, peak_bytes
from penstock.tensors.layout import copy_exactly

HOST = torch.device("cpu")
KINDS = ["cpu", "cuda"]


def find_device(name: str | torch.device, position: int = 0) -> torch.device:
    """Return the device that a name means in one process; `position` is its number among those of its machine.

    `cuda` is one GPU for each process, shared where there are fewer; `cuda:1` is that one for all of them.

    >>> find_device("cpu", position=3)
    device(type='cpu')

    Raises `UsageError` for a name that is not known and for a GPU that is not there.
    """
    kind, _, number = str(name).partition(":")
    if kind not in KINDS or not (number.isdecimal() or (not number and str(name) == kind)):
        raise UsageError(f"stages run on {' or '.join(KINDS)}, not on {str(name)!r}; give one of these, or cuda:N")
    if kind == HOST.type:
        return HOST
    module = torch.get_device_module(kind)
    count = module.device_count() if module.is_available() else 0
    if not count:
        raise UsageError(
            f"the device {str(name)!r} is a GPU, and torch {torch.__version__} finds none on {socket.gethostname()}; "
            "leave it out to compute on the CPU, or install a driver and a torch for this GPU"
        )
    index = int(number) if number else position % count
    if index >= count:
        raise UsageError(f"{kind}:{index} is not there: the GPUs of {socket.gethostname()} go up to {kind}:{count - 1}")
    return torch.device(kind, index)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, with the strides that it has: itself where it is there, or has no values at all."""
    return tensor if tensor.device == device or tensor.device.type == "meta" else copy_exactly(tensor, device)


def settle(device: torch.device) -> None:
    """Wait until everything that was begun on a device is done: on a GPU operations return before they are."""
    if device.type != HOST.type:
        # of the stream alone that computes: a message to another device may lie on its own for long
        torch.get_device_module(device).current_stream(device).synchronize()


def held_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process holds where it computes; None where the system does not say."""
    return anonymous_bytes() if device.type == HOST.type else int(_memory(device).memory_allocated(device))


def most_bytes(device: torch.device) -> int:
    """Return the most bytes that this process has held at once where it computes."""
    return peak_bytes() if device.type == HOST.type else int(_memory(device).max_memory_allocated(device))


def _memory(device: torch.device) -> Any:
    return torch.get_device_module(device)
