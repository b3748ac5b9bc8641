"""Walk the nested containers of a user's data: mappings, lists, tuples, named tuples, dataclasses."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

# a key of a mapping, a position in a sequence, or a field of a dataclass
Key = Any


def children(tree: Any) -> list[tuple[Key, Any]] | None:
    """Return the entries of a container in order; None for a leaf.

    >>> children({"a": 1})
    [('a', 1)]
    """
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (list, tuple)):
        return list(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [
            (field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree) if hasattr(tree, field.name)
        ]
    return None


def rebuilt(tree: Any, values: list[Any]) -> Any:
    """Return a container of the same type, keys, order and attributes with other values.

    Raises `TypeError` for a container that cannot be copied or changed.
    """
    if isinstance(tree, tuple):
        kind: Any = type(tree)
        return kind(*values) if hasattr(tree, "_fields") else kind(values)
    if type(tree) is list:
        return list(values)
    made = copy.copy(tree)
    if isinstance(tree, list):
        made[:] = values
    elif isinstance(tree, Mapping):
        for key, value in zip(tree, values, strict=True):
            made[key] = value
    else:
        for field, value in zip((key for key, _ in children(tree) or []), values, strict=True):
            object.__setattr__(made, field, value)
    return made


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to every leaf; a container without changes is returned itself.

    >>> mapped(lambda x: x + 1, {"a": [1, 2], "b": (3,)})
    {'a': [2, 3], 'b': (4,)}
    """
    entries = children(tree)
    if entries is None:
        return function(tree)
    values = [mapped(function, value) for _, value in entries]
    same = all(new is old for new, (_, old) in zip(values, entries, strict=True))
    return tree if same else rebuilt(tree, values)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield every leaf, in order."""
    entries = children(tree)
    if entries is None:
        yield tree
        return
    for _, value in entries:
        yield from leaves(value)


def tensors(tree: Any) -> list[Tensor]:
    """Return every tensor, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor; other leaves stay."""
    return mapped(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def structure(tree: Any) -> Any:
    """Return the common structure of two trees of the same containers: types, keys and order."""
    entries = children(tree)
    if entries is None:
        return None
    return type(tree), tuple((key, structure(value)) for key, value in entries)


def plain(tree: Any, known: Callable[[type], bool]) -> Any:
    """Return a tree in which each mapping of a type that is not `known` is replaced by a dict."""
    entries = children(tree)
    if entries is None or not (isinstance(tree, (Mapping, list, tuple))):
        return tree
    values = [plain(value, known) for _, value in entries]
    if isinstance(tree, Mapping) and not known(type(tree)):
        return dict(zip((key for key, _ in entries), values, strict=True))
    same = all(new is old for new, (_, old) in zip(values, entries, strict=True))
    return tree if same else rebuilt(tree, values)
