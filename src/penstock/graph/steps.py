"""Checks of a graph with caches: a row of a step depends neither on other rows nor on the number of keys.

A step reads caches up to a length that is rounded up, so that its shapes repeat. The keys beyond a sequence are masked;
what a model computes from their number is wrong:

    bias[:, :, room - step : room, :room]       the mask of queries at the end of the keys, not of each row's position

A sequence must have the same tokens in any company, so nothing may be chosen by a reduction over all positions:

    where(max(positions) >= 4096, long, short)
"""

from collections.abc import Iterator

from penstock.errors import CaptureError
from penstock.graph.graph import Graph
from penstock.graph.ops import Argument, Op
from penstock.values import Size

_REDUCTIONS = {"max", "min", "amax", "amin", "sum", "any", "all", "prod", "mean", "argmax", "argmin", "count_nonzero"}
# arguments that are numbers to compute with, by operator; others are shapes
_STARTS = {"slice": (2,), "narrow": (2,), "select": (2,)}
_NUMBERS = {"add", "sub", "rsub", "mul", "div", "pow", "lt", "le", "gt", "ge", "eq", "ne", "clamp", "remainder"}


def check_steps(graph: Graph) -> None:
    """Raise `CaptureError` if rows of a decoder's step depend on each other's positions or on the number of keys."""
    rooms = {
        op.arguments[3].expression for op in graph.ops
        if _kind(op) == "narrow" and isinstance(op.arguments[3], Size) and isinstance(op.arguments[3].expression, str)
    }  # fmt: skip
    for op in (*graph.prelude, *graph.ops):
        if any(size.mentions(room) for size in _numbers(op) for room in rooms):
            raise CaptureError(
                f"{graph.model} computes with the number of keys ({op.target}), which is rounded up in a generator and "
                "therefore not that of a sequence; use model.generate"
            )
    if (found := _reduction(graph)) is not None:
        raise CaptureError(
            f"{graph.model} takes the {_kind(found)} over the positions of all sequences of a step, so a request's "
            "tokens would depend on others; use model.generate"
        )


def _numbers(op: Op) -> Iterator[Size]:
    kind = _kind(op)
    if kind in _NUMBERS:
        given: list[Argument] = [*op.arguments, *op.keywords.values()]
    elif kind == "arange":
        given = list(op.arguments[:-1])  # the end is a shape
    else:
        given = [op.arguments[place] for place in _STARTS.get(kind, ()) if place < len(op.arguments)]
    yield from (each for each in given if isinstance(each, Size))


def _reduction(graph: Graph) -> Op | None:
    """Return the first reduction over the rows of integers that depend on inputs alone, such as positions."""
    known = {value.name for value in graph.tensor_inputs() if not value.dtype.is_floating_point}
    fixed = {op.name for op in graph.prelude}
    for op in graph.ops:
        used = set(op.uses())
        value = graph.values.get(op.name)
        if not used & known or not used <= known | fixed or value is None:
            continue
        if _kind(op) in _REDUCTIONS and _reduces_rows(op, graph):
            return op
        if not value.dtype.is_floating_point:
            known.add(op.name)
    return None


def _reduces_rows(op: Op, graph: Graph) -> bool:
    shape = graph.values[next(op.uses())].shape
    if not shape or not isinstance(shape[0], Size):
        return False
    dims = op.arguments[1] if len(op.arguments) > 1 else op.keywords.get("dim")
    listed = dims if isinstance(dims, (list, tuple)) else [dims]
    return dims is None or not listed or any(dim in (0, -len(shape)) for dim in listed)


def _kind(op: Op) -> str:
    return op.target.split(".")[1]
