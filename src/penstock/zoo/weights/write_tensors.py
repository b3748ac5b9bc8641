"""Tensors to one safetensors file, holding one tensor in memory at a time."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

import torch

from penstock.errors import ModelError
from penstock.files import written_whole
from penstock.text import one_line
from penstock.zoo.weights.weight_files import DTYPES
from penstock.zoo.weights.weights import Weights

_KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


def save_weights(weights: Weights, target: Path, names: Iterable[str] | None = None) -> int:
    """Write tensors to a safetensors file and return how many bytes they take.

    One tensor is loaded at a time, and the target appears only once it is whole.

    >>> save_weights(TensorWeights({"w": torch.ones(4, 4)}), Path("w.safetensors"))  # doctest: +SKIP
    64

    Raises `ModelError` when a name is not in the weights, its dtype has no name in safetensors, or the
    target cannot be written.
    """
    order = file_order(weights, names)
    header, num_bytes = _header(weights, order)
    try:
        with written_whole(target) as file:
            _write(weights, order, header, file)
    except OSError as problem:
        raise ModelError(f"{target} cannot be written ({one_line(problem)}); choose another folder") from problem
    return num_bytes


def file_order(weights: Weights, names: Iterable[str] | None = None) -> list[str]:
    """Return the order of tensors in a file, which is that in which `save_weights` loads them."""
    # the widest elements first: every tensor then starts at a multiple of its element size
    return sorted(weights.names() if names is None else names, key=lambda name: (-weights.dtype(name).itemsize, name))


def _header(weights: Weights, order: list[str]) -> tuple[Mapping[str, object], int]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        shape, dtype = weights.shape(name), weights.dtype(name)
        if dtype not in _KINDS:
            raise ModelError(f"{name} is {dtype}, which safetensors cannot hold; save it as float32")
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _KINDS[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return header, offset


def _write(weights: Weights, order: list[str], header: Mapping[str, object], file: IO[bytes]) -> None:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        flat = weights.load(name).detach().contiguous().reshape(-1)
        if flat.numel():
            file.write(flat.view(torch.uint8).numpy().data)
