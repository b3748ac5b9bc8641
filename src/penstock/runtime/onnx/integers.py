"""Checks of 64-bit integers for engines that compute them in 32 bits: programs that may overflow are refused.

Each input is checked against a bound; the largest possible result of each operation is derived from this bound.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PlanError, RunError
from penstock.graph.ops import GETITEM, Op, Ref
from penstock.graph.program import StageProgram
from penstock.values import Value

INPUT_BOUND = 2**30
_LIMIT = 2**31 - 1
_MOVES = {
    "view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as", "permute", "transpose", "select", "slice",
    "cat", "stack", "index", "index_select", "gather", "embedding", "where", "masked_fill", "clone", "contiguous",
    "detach", "detach_", "alias", "flatten", "unflatten", "unbind", "split", "split_with_sizes", "chunk", "repeat",
    "flip", "roll", "maximum", "minimum", "clamp", "to", "_to_copy", "type_as", "lift_fresh_copy", "max", "min",
    "neg", "abs", "copy", "copy_", "getitem", "t", "movedim",
}  # fmt: skip
_SUMS = {"add", "add_", "sub", "sub_", "rsub"}


def check_integers(
    name: str, program: StageProgram, known: Mapping[str, Tensor], seen: Mapping[str, Tensor | Sequence[Tensor]]
) -> None:
    """Refuse a program with 64-bit integers that may exceed 32 bits; `known` and `seen` are as for `write_model`.

    Raises `PlanError` naming the operation.
    """
    bounds = {key: int(value.abs().max()) if value.numel() else 0 for key, value in known.items() if _is_long(value)}
    bounds |= {value.name: INPUT_BOUND for value in program.inputs if value.dtype == torch.int64}
    for op in program.ops:
        made = seen.get(op.name)
        if made is not None and any(_is_long(each) for each in ([made] if isinstance(made, Tensor) else made)):
            bounds[op.name] = _bound(name, op, bounds, seen)
    for value in known:
        if bounds.get(value, 0) > _LIMIT and any(value in op.uses() for op in program.ops):
            raise _refusal(name, value)


def check_inputs(name: str, values: Sequence[Value], tensors: Sequence[Tensor]) -> None:
    """Refuse inputs beyond the bound; raises `RunError` naming the first."""
    for value, tensor in zip(values, tensors, strict=True):
        if tensor.dtype == torch.int64 and tensor.numel():
            least, most = (int(each) for each in torch.aminmax(tensor))
            if max(-least, most) > INPUT_BOUND:
                raise RunError(
                    f"the runtime {name} has 32-bit integers, and {value.name} is from {least} to {most}; plan this "
                    "stage with the runtime eager"
                )


def _bound(name: str, op: Op, bounds: Mapping[str, int], seen: Mapping[str, Any]) -> int:
    packet = "getitem" if op.target == GETITEM else op.target.split(".")[1]
    given = [*op.arguments, *op.keywords.values()]
    from_floats = any(
        isinstance(item, Ref) and isinstance(seen.get(item.name), Tensor) and seen[item.name].is_floating_point()
        for item in given
    )
    parts = list(_parts(given, bounds))
    if packet in {"argmax", "argmin"}:
        return INPUT_BOUND
    if packet in _SUMS and not from_floats:
        result = sum(parts[:2]) * max(1, abs(int(op.keywords.get("alpha", 1))))
    elif packet in {"mul", "mul_"} and not from_floats:
        result = parts[0] * parts[1] if len(parts) > 1 else _LIMIT + 1
    elif packet in _MOVES and not (from_floats and packet in {"to", "_to_copy", "type_as"}):
        result = max(parts, default=1)
    else:
        result = _LIMIT + 1
    if result > _LIMIT:
        raise _refusal(name, f"{op.name} ({op.target})")
    return result


def _parts(items: Sequence[Any], bounds: Mapping[str, int]) -> Iterator[int]:
    """Yield the largest magnitude of each operand; other operands are switches or indices."""
    for item in items:
        if isinstance(item, Ref):
            yield bounds.get(item.name, 1)
        elif isinstance(item, (list, tuple)):
            yield from _parts([each for each in item if isinstance(each, Ref)], bounds)
        elif isinstance(item, (int, float)) and not isinstance(item, bool) and abs(item) < 2**62:
            yield abs(int(item))


def _is_long(tensor: Tensor) -> bool:
    return tensor.dtype == torch.int64


def _refusal(name: str, what: str) -> PlanError:
    return PlanError(
        f"the runtime {name} has 32-bit integers, and {what} may be larger; plan this stage with the runtime eager"
    )
