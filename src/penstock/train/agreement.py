"""Agreement of a training run's processes: errors, model, settings, data, and values that the loss uses."""

import dis
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from penstock.errors import ModelError, UsageError, everywhere
from penstock.group.world import World
from penstock.runtime.torch_settings import differences, read_settings
from penstock.tensors import HOST, digest
from penstock.train.arrangement import TrainOptions
from penstock.train.batch_document import StandIn
from penstock.train.captured import Captured
from penstock.transport.collectives import all_gather


def agreed(
    together: Callable[[Callable[[], dict[str, Any]]], Sequence[Mapping[str, Any]]],
    work: Callable[[], Any],
    kind: type[UsageError] = ModelError,
    named: Callable[[int, str], str] = lambda _rank, reason: reason,
) -> list[Any]:
    """Run `work` on every rank in one exchange and return the results of all; raise an error of one rank on all.

    Other ranks learn of errors of `kind`, raised after all sends and receives; `named` adds the rank to the message.
    """

    def attempt() -> dict[str, Any]:
        try:
            return {"found": work(), "failed": ""}
        except kind as error:
            return {"found": None, "failed": str(error)}

    gathered = together(attempt)
    for rank, document in enumerate(gathered):
        if document["failed"]:
            with everywhere():
                raise kind(named(rank, document["failed"]))
    return [document["found"] for document in gathered]


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
        found.update(_identity(entry).encode())
    return found.hexdigest()


def _identity(entry: Any) -> str:
    if isinstance(entry, (str, PurePath)):
        return "/".join(PurePath(os.fspath(entry)).parts[-2:])
    if isinstance(entry, (bool, int, float, type(None), np.generic)):
        return repr(entry)
    if isinstance(entry, np.ndarray) and not entry.dtype.hasobject:
        return hashlib.blake2b(np.ascontiguousarray(entry).tobytes(), digest_size=8).hexdigest()
    if isinstance(entry, Tensor) and not isinstance(entry, StandIn):
        return digest(entry)
    if isinstance(entry, (list, tuple)):
        return f"({','.join(map(_identity, entry))})"
    return type(entry).__name__


_LARGEST_BYTES, _LONGEST = 2**16, 64  # larger tensors and longer sequences are not compared


def captured_values(*functions: Any) -> dict[str, str]:
    """Return the floats and small tensors that functions read from closures, globals and defaults, as text.

    Names that a function itself assigns are left out: they differ wherever it has run more often.

    >>> weight = 0.25
    >>> captured_values(lambda output, labels: weight * output)["weight"]
    '0.25'
    """
    return {name: text for each in functions for name, value in _values(each) if (text := _text(value)) is not None}


def _values(function: Any) -> Iterator[tuple[str, Any]]:
    while isinstance(function, (functools.partial, MethodType)):
        if isinstance(function, functools.partial):
            yield from ((f"argument {place}", value) for place, value in enumerate(function.args))
            yield from function.keywords.items()
            function = function.func
        else:
            function = function.__func__
    if not isinstance(function, FunctionType):
        return
    code = function.__code__
    names, assigned = _names(code)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield from [] if name in assigned else [(name, cell.cell_contents)]
        except ValueError:  # not assigned yet
            continue
    for name in names - assigned:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


@functools.cache
def _names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of globals that a function reads, and the outer names that it assigns."""
    found = list(dis.get_instructions(code))
    read = {each.argval for each in found if each.opname == "LOAD_GLOBAL"}
    assigned = {each.argval for each in found if each.opname in {"STORE_DEREF", "STORE_GLOBAL"}}
    return frozenset(read), frozenset(assigned)


def _text(value: Any) -> str | None:
    """Return a text of what scripts draw at random: a float, a tensor, a tuple of these; None for anything else.

    What the function may have changed itself, a list or a tensor that was written to, is not compared.
    """
    if isinstance(value, StandIn):
        return None
    if isinstance(value, (float, np.floating)):
        return repr(float(value))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        value = torch.from_numpy(np.ascontiguousarray(value).view(np.uint8).reshape(-1))
    if isinstance(value, Tensor):
        small = value.layout == torch.strided and not value.is_nested and value.nbytes <= _LARGEST_BYTES
        small = small and not value.is_inference() and value._version == 0
        return f"a tensor {digest(value.detach().cpu())}" if small else None
    if isinstance(value, tuple) and len(value) <= _LONGEST:
        parts = [_text(each) for each in value]
        return None if None in parts or not parts else f"[{', '.join(map(str, parts))}]"
    return None


def first_difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return the first name whose value differs, if any."""
    return next((name for name in sorted(mine.keys() & theirs.keys()) if mine[name] != theirs[name]), None)
