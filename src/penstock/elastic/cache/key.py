"""Name a cache by everything that its values depend on."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.tensors import HOST

_DIGEST_BYTES = 16


def cache_key(
    *,
    program: str,
    weights: Iterable[tuple[str, Tensor]],
    data: str,
    preprocessing: str,
    num_samples: int,
    num_views: int,
    stored: torch.dtype | None,
) -> str:
    """Hash everything that determines a cache's values; returns hexadecimal digits.

    Example:
        cache_key(program=write_program(part), weights=module.state_dict().items(), data="cifar10 train",
                  preprocessing="resize 224", num_samples=50_000, num_views=1, stored=torch.bfloat16)

    `program` is the frozen part as JSON. Weights are hashed by their names, dtypes, shapes and bytes, one tensor after
    the other, so pass them always in the same order; those on another device are copied to the host one at a time. If
    samples can be divided among processes in several ways, `data` must identify the way.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def add(content: bytes) -> None:
        # prefixed by its length, so that no two sequences of fields give the same bytes
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)

    for field in (program, data, preprocessing, str(num_samples), str(num_views), str(stored)):
        # file names may contain bytes that are not text
        add(field.encode(errors="surrogateescape"))
    for name, tensor in weights:
        add(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        flat = tensor.detach().to(HOST).contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)  # numpy has no bfloat16
    return digest.hexdigest()
