"""JSON encoding of scheduler and optimizer states that keeps types, without pickle.

A value without a JSON type becomes a dict with one entry, whose key begins with a colon:

    {3: 0.1}               {":dict": [[3, 0.1]]}
    (0.9, 0.999)           {":tuple": [0.9, 0.999]}
    tensor([1., 2.])       {":tensor": ["float32", [2], "AACAPwAAAEA="]}
"""

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.graph.ops import DTYPES

_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_KINDS: dict[type[Any], str] = {
    dict: "dict",
    OrderedDict: "OrderedDict",
    Counter: "Counter",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
}


def encode(value: Any, name: str) -> Any:
    """Encode a value as JSON values for `decode`; raises `UsageError` naming a value that cannot be encoded.

    >>> decode(encode({"milestones": Counter({2: 1}), "betas": (0.9, 0.99)}, "state"))
    {'milestones': Counter({2: 1}), 'betas': (0.9, 0.99)}
    """
    if value is None or type(value) in {bool, int, str}:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {":float": str(value)}
    if type(value) is list:
        return [encode(each, f"{name}[{place}]") for place, each in enumerate(value)]
    kind = _KINDS.get(type(value))
    if kind in _MAPPINGS:
        if kind == "dict" and all(isinstance(key, str) and not key.startswith(":") for key in value):
            return {key: encode(each, f"{name}[{key!r}]") for key, each in value.items()}
        return {f":{kind}": [[encode(k, name), encode(v, f"{name}[{k!r}]")] for k, v in value.items()]}
    if kind in _SEQUENCES:
        return {f":{kind}": [encode(each, f"{name}[{place}]") for place, each in enumerate(value)]}
    return _encode_other(value, name)


def _encode_other(value: Any, name: str) -> Any:
    if type(value) is complex:
        return {":complex": [encode(value.real, name), encode(value.imag, name)]}
    if type(value) is bytes:
        return {":bytes": base64.b64encode(value).decode()}
    if type(value) is deque:
        return {":deque": [[encode(each, name) for each in value], value.maxlen]}
    if type(value) is defaultdict and value.default_factory in {None, dict, list, set, int, float}:
        factory = value.default_factory.__name__ if value.default_factory is not None else None
        return {":defaultdict": [[[encode(k, name), encode(v, name)] for k, v in value.items()], factory]}
    if isinstance(value, torch.dtype):
        return {":dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {":device": str(value)}
    if (
        isinstance(value, Tensor)
        and str(value.dtype).removeprefix("torch.") in DTYPES
        and value.layout == torch.strided
    ):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {
            ":tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), base64.b64encode(data).decode()]
        }
    if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind in "biufc":
        data = np.ascontiguousarray(value).tobytes()
        kind = "numpy" if isinstance(value, np.generic) else "array"
        return {f":{kind}": [value.dtype.str, list(value.shape), base64.b64encode(data).decode()]}
    raise UsageError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold; use numbers, texts, tensors or "
        "containers of them, or save it yourself"
    )


def decode(value: Any) -> Any:
    """Decode the result of `encode`; raises `ValueError` for an unknown type."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    key = next(iter(value), "")
    if len(value) != 1 or not key.startswith(":"):
        return {name: decode(each) for name, each in value.items()}
    kind, held = key[1:], value[key]
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({decode(k): decode(v) for k, v in held})
    if kind == "deque":
        return deque((decode(each) for each in held[0]), held[1])
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(each) for each in held)
    return _decode_other(kind, held)


def _decode_other(kind: str, held: Any) -> Any:
    match kind:
        case "float":
            return _FLOATS[held]
        case "complex":
            return complex(decode(held[0]), decode(held[1]))
        case "bytes":
            return base64.b64decode(held, validate=True)
        case "defaultdict":
            factories = {"dict": dict, "list": list, "set": set, "int": int, "float": float, None: None}
            return defaultdict(factories[held[1]], {decode(k): decode(v) for k, v in held[0]})
        case "dtype":
            return DTYPES[held]
        case "device":
            return torch.device(held)
        case "tensor":
            dtype, shape, data = held
            flat = torch.frombuffer(bytearray(base64.b64decode(data, validate=True)) or bytearray(1), dtype=torch.uint8)
            return flat[: math.prod(shape) * DTYPES[dtype].itemsize].view(DTYPES[dtype]).reshape(shape)
        case "numpy" | "array":
            dtype, shape, data = held
            if np.dtype(dtype).kind not in "biufc":
                raise ValueError(f"{dtype!r} is not a numeric dtype")
            array = np.frombuffer(base64.b64decode(data, validate=True), dtype=dtype).reshape(shape)
            return array[()] if kind == "numpy" else array.copy()
    raise ValueError(f"the type {kind!r} of a state is unknown to this version")
