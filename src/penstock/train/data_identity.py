"""Comparison of the data sets that the ranks of a training run have made."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from penstock.errors import UsageError
from penstock.tensors import digest
from penstock.train.stand_in import StandIn

_LOOKED_AT = 512  # entries of a list, rows of a tensor
_DEEPEST = 8  # data sets within data sets
_SEQUENCES = (list, tuple, range, Tensor, np.ndarray)


def data_identity(dataset: Any) -> dict[str, str]:
    """Return digests of what decides the rows of a data set, by name: indices of a subset, names of files, tensors.

    Of long lists and tensors some rows are looked at, no row is loaded, and of paths only the last two parts count,
    since machines keep data in different folders.

    Example:
        data_identity(Subset(images, [2, 0])).keys()      # indices, dataset.samples
    """
    return {name: _hash(value) for name, value in _deciding(dataset, "", _DEEPEST)}


def check_same_data(documents: Sequence[dict[str, Any]], names: Sequence[str], loading: Sequence[int]) -> None:
    """Raise `UsageError` if data sets differ in length on any rank, or in their rows between ranks that load them."""
    for rank, document in enumerate(documents):
        if document["rows"] != documents[0]["rows"]:
            raise UsageError(
                f"the data set has {document['rows']} rows on {names[rank]} but {documents[0]['rows']} "
                f"on {names[0]}; make the same data set on every rank"
            )
    first, *others = loading
    for rank in others:
        mine, theirs = documents[first]["data"], documents[rank]["data"]
        if unlike := [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]:
            raise UsageError(
                f"the data set's {unlike[0]} differ between {names[first]} and "
                f"{names[rank]}, so replicas would train on some rows twice and on others never; sort files by name, "
                "and seed random_split, random.shuffle or train_test_split alike on every rank"
            )


def _deciding(dataset: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the attributes with an entry for each row, of a data set and of the data sets within it."""
    if isinstance(dataset, _SEQUENCES):
        yield name or "rows", dataset
        return
    count, parts = _length(dataset), vars(dataset) if hasattr(dataset, "__dict__") else {}
    for key, value in parts.items():
        path = f"{name}.{key}" if name else key
        inner = value if isinstance(value, (list, tuple)) and key in ("datasets", "tensors") else [value]
        for place, each in enumerate(inner):
            here = path if inner[0] is value else f"{path}.{place}"
            if (isinstance(each, Dataset) or key in ("dataset", "data_source")) and depth:
                yield from _deciding(each, here, depth - 1)
            elif isinstance(each, _SEQUENCES) and _length(each) == count:
                yield here, each
            elif hasattr(each, "iloc") and _length(each) == count:  # a table of pandas
                yield here, each.index


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except TypeError:  # a tensor without dimensions
        return None


def _hash(value: Any) -> str:
    """Return a digest of some entries; the same for all lists with a None, which may be caches that fill."""
    count = _length(value) or 0
    found = hashlib.blake2b(f"{count}".encode(), digest_size=8)
    try:
        entries = [value[place] for place in range(0, count, max(1, count // _LOOKED_AT))]
    # a container of the user's may raise anything, and is then not compared
    except Exception:
        return ""
    if any(entry is None for entry in entries):
        return ""
    for entry in entries:
        found.update(_text(entry).encode())
    return found.hexdigest()


def _text(entry: Any) -> str:
    if isinstance(entry, (str, PurePath)):
        return "/".join(PurePath(os.fspath(entry)).parts[-2:])
    if isinstance(entry, (bool, int, float, type(None), np.generic)):
        return repr(entry)
    if isinstance(entry, np.ndarray) and not entry.dtype.hasobject:
        return hashlib.blake2b(np.ascontiguousarray(entry).tobytes(), digest_size=8).hexdigest()
    if isinstance(entry, Tensor) and not isinstance(entry, StandIn):
        return digest(entry)
    if isinstance(entry, (list, tuple)):
        return f"({','.join(map(_text, entry))})"
    return type(entry).__name__
