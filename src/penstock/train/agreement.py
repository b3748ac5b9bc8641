"""Check that all processes of a training run have the same model, settings and data."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from penstock.errors import UsageError
from penstock.group.world import World
from penstock.runtime.torch_settings import differences, read_settings
from penstock.tensors import HOST, digest
from penstock.train.arrangement import TrainOptions
from penstock.train.captured import Captured
from penstock.train.stand_in import StandIn
from penstock.transport.collectives import all_gather


def identity_of(captured: Captured, options: TrainOptions, device: torch.device = HOST) -> list[Any]:
    """Return the identity of a training run, equal on all processes and independent of the placement."""
    graph = captured.graph
    last = [op.name for op in graph.ops][-1:]
    return [graph.model, last, len(graph.ops), options.seed, options.autocast and device.type]


def check_alike(world: World, mine: list[Any], captured: Captured) -> None:
    """Raise `UsageError` unless all processes have the same operators, torch settings and settings `mine`."""
    settings, targets, name = read_settings(), {op.target for op in captured.graph.ops}, world.names[world.rank]
    for rank, unlike in world.unlike.items():
        if common := sorted(targets & unlike):
            raise UsageError(
                f"PyTorch on {world.names[rank]} lacks or redefines {common[0]}, compared with {name}, and the model "
                "calls it; install the same version everywhere"
            )
    for rank, other in enumerate(all_gather(world.transport, {"model": mine, "torch": dict(settings)})):
        if changed := differences(settings, other["torch"]):
            raise UsageError(
                f"torch settings differ between {world.names[rank]} and {name}: {', '.join(changed)}; use the same "
                "settings in all processes before creating the pipeline"
            )
        if other["model"] != mine:
            raise UsageError(
                f"{world.names[rank]} has another model or other settings than {name}: {other['model']} and {mine}; "
                "run the same script everywhere"
            )


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
