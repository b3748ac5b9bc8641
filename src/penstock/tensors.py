"""Devices and memory layouts of tensors.

Weights and values of a stage are on its device. Messages are laid out, checked and read on the host:

    stage 0 on a GPU ──copy──▶ host buffer ──transport──▶ host buffer ──copy──▶ stage 1 on a GPU

If every process has a separate GPU, outputs are sent directly to the next stage's GPU instead (`transport/nccl.py`).
Stages within one process pass tensors without a copy.

Some operators return other last bits for another memory layout, so a tensor arrives with the sender's strides. A tensor
that covers its memory without gaps (in any order of dimensions, counting those repeated by `expand` once) is sent
unchanged; a tensor with gaps is packed and unpacked again.
"""

import hashlib
import math
import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.resources import anonymous_bytes, peak_bytes

HOST = torch.device("cpu")
KINDS = ["cpu", "cuda"]


def find_device(name: str | torch.device, position: int = 0) -> torch.device:
    """Return the device of this name for one process; `position` is its local rank.

    `cuda` gives each process its own GPU, shared if there are fewer; `cuda:1` gives all of them the same GPU.

    >>> find_device("cpu", position=3)
    device(type='cpu')

    Raises `UsageError` for an unknown name and for a missing GPU.
    """
    kind, _, number = str(name).partition(":")
    if kind not in KINDS or not (number.isdecimal() or (not number and str(name) == kind)):
        raise UsageError(f"the device of stages must be {', '.join(KINDS)} or cuda:N; got {str(name)!r}; give one")
    if kind == HOST.type:
        return HOST
    module = torch.get_device_module(kind)
    count = module.device_count() if module.is_available() else 0
    if not count:
        raise UsageError(
            f"the device {str(name)!r} is a GPU, and torch {torch.__version__} finds none on {socket.gethostname()}; "
            "compute on the CPU (device='cpu'), or install a driver and a torch for this GPU"
        )
    index = int(number) if number else position % count
    if index >= count:
        raise UsageError(f"{kind}:{index} not found: the last GPU of {socket.gethostname()} is {kind}:{count - 1}")
    return torch.device(kind, index)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device with the same strides: itself if it is already there, or is a meta tensor."""
    return tensor if tensor.device == device or tensor.device.type == "meta" else copy_exactly(tensor, device)


def synchronize(device: torch.device) -> None:
    """Wait for all operations queued on a device, since on a GPU they return before completion."""
    if device.type != HOST.type:
        # wait only for the computing stream: a message to another device may stay on its own stream for long
        torch.get_device_module(device).current_stream(device).synchronize()


def mark(device: torch.device) -> Any:
    """Return an event at which a GPU arrives after what is queued on it; None on the CPU, where nothing is queued."""
    if device.type == HOST.type:
        return None
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record(torch.get_device_module(device).current_stream(device))
    return event


def held_bytes(device: torch.device) -> int | None:
    """Return the bytes in use by this process on its device; None if the system does not report them."""
    return anonymous_bytes() if device.type == HOST.type else int(_memory(device).memory_allocated(device))


def most_bytes(device: torch.device) -> int:
    """Return the peak bytes in use by this process on its device."""
    return peak_bytes() if device.type == HOST.type else int(_memory(device).max_memory_allocated(device))


def free_bytes(name: str) -> int:
    """Return the free memory of a GPU; raises `UsageError` as `find_device` does."""
    device = find_device(name)
    return int(_memory(device).mem_get_info(device)[0])


def _memory(device: torch.device) -> Any:
    return torch.get_device_module(device)


ALIGNMENT = 64  # that of torch's own allocations; some kernels choose an algorithm by it


def aligned(num_bytes: int) -> int:
    """Round a number of bytes up to the alignment.

    >>> aligned(65)
    128
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def stored_shape(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Count dimensions repeated with stride 0 once."""
    return [1 if stride == 0 and size else size for size, stride in zip(shape, strides, strict=True)]


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if elements fill their memory without gaps or overlaps, in some order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def num_payload_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes that a tensor of this layout takes in a message."""
    elements = itemsize
    for size in stored_shape(shape, strides):
        elements *= size
    return elements


def num_spread_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes allocated to unpack a tensor of this layout; a tensor without gaps is a view.

    >>> num_spread_bytes((2, 3), (3, 1), 4), num_spread_bytes((2, 3), (300, 1), 4)
    (0, 1212)
    """
    stored = stored_shape(shape, strides)
    if 0 in stored or is_dense(stored, strides):
        return 0
    reach = 1 + sum((size - 1) * stride for size, stride in zip(stored, strides, strict=True))
    # if elements share memory, two int64 lists of their offsets are added: for the memory and for the elements
    places = 8 * (reach + math.prod(stored)) if _overlaps(stored, strides) else 0
    return reach * itemsize + places


def place(tensor: Tensor, target: Tensor) -> tuple[Tensor, list[int] | None]:
    """View a flat uint8 buffer of `num_payload_bytes` as the target for copying this tensor.

    Returns the view, and the shape to copy if it is not the tensor's own.
    """
    if target.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype), None
    shape, strides = stored_shape(tensor.shape, tensor.stride()), tensor.stride()
    flat = target.view(tensor.dtype)
    view = flat.as_strided(shape, strides, flat.storage_offset()) if is_dense(shape, strides) else flat.view(shape)
    return view, shape if shape != list(tensor.shape) else None


def pack(tensor: Tensor, target: Tensor) -> None:
    """Copy a tensor's elements into a flat uint8 buffer of `num_payload_bytes`."""
    view, shape = place(tensor, target)
    view.copy_(tensor if shape is None else tensor.as_strided(shape, tensor.stride()))


def unpack(source: Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """View a flat uint8 buffer as the packed tensor, or copy it if the tensor had gaps."""
    if source.numel() == 0:
        return torch.empty_strided(shape, strides, dtype=dtype)
    stored = stored_shape(shape, strides)
    flat = source.view(dtype)
    if is_dense(stored, strides):
        return flat.as_strided(shape, strides, flat.storage_offset())
    return _spread(flat.view(stored), strides).as_strided(shape, strides)


def copy_exactly(tensor: Tensor, device: torch.device | None = None, *, wait: bool = True) -> Tensor:
    """Copy a tensor together with its strides, to another device if one is given; `wait` until a GPU has read it."""
    here = device is None or tensor.device == device
    if tensor.is_contiguous():
        return tensor.clone() if here else tensor.to(device, non_blocking=not wait)
    shape, strides = stored_shape(tensor.shape, tensor.stride()), tensor.stride()
    stored = tensor.as_strided(shape, strides)
    # copying to another device removes gaps, and changes nothing else
    stored = _spread(stored if here else stored.to(device, non_blocking=not wait), strides)
    return stored.as_strided(tensor.shape, strides)


def _spread(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Copy a tensor into fresh memory of its device with these strides."""
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    if not _overlaps(tensor.shape, strides):
        return copy.copy_(tensor)
    # as after `unfold`: elements share memory, which `copy_` refuses; here equal values are written twice
    memory = copy.as_strided((copy.untyped_storage().nbytes() // copy.itemsize,), (1,))
    places = torch.arange(memory.numel(), device=memory.device).as_strided(tensor.shape, strides)
    memory[places.flatten()] = tensor.flatten()
    return copy


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if elements may share memory; a conservative test."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def sum_words(data: Tensor) -> int:
    """Return the sum of a tensor's bytes as 64-bit words: any single damaged word changes it, at the speed of memory.

    >>> sum_words(torch.tensor([1, 2], dtype=torch.int64))
    3
    """
    data = data.contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()  # words cannot be read across their bounds
    whole = data.numel() // 8 * 8
    words = int(data[:whole].view(torch.int64).sum()) if whole else 0
    return words + int.from_bytes(bytes(data[whole:].tolist()), "little") if whole < data.numel() else words


def digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's elements, shape and type."""
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    found.update(tensor.detach().to(HOST).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
