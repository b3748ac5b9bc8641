"""Work of operations, counted from their shapes, in seconds on a nominal core.

Only the proportions matter: matrix products run at about NOMINAL_FLOPS_PER_S, other operations at the speed of memory,
and every call has a small overhead. This is accurate enough to divide a model; `measure` times the operations instead.
"""

import math
from collections.abc import Mapping

from penstock.graph.graph import Graph
from penstock.graph.ops import GETITEM, Op, resolve_operator

NOMINAL_FLOPS_PER_S = 60e9
NOMINAL_BYTES_PER_S = 12e9
SECONDS_PER_CALL = 4e-6
# copy, checksum and system calls on each side of a cut
SECONDS_PER_CROSSING_BYTE = 2e-9
# elements per second of transcendental functions: exp, erf, tanh and similar
_TRANSCENDENTAL = {
    "gelu": 1.2e9, "silu": 1.2e9, "sigmoid": 1.2e9, "tanh": 1.0e9, "softmax": 0.8e9, "exp": 1.5e9, "erf": 1.0e9,
    "pow": 0.8e9,
}  # fmt: skip

# operators that read or write only selected rows of their first argument, such as an embedding's weight or a cache
_CHOSEN_ROWS = {"embedding", "index_select", "index", "gather", "index_put_", "index_copy_", "scatter_"}

Shape = tuple[int, ...]


def count_work(graph: Graph, sizes: Mapping[str, int]) -> list[float]:
    """Return the counted work of every operation, in nominal seconds, for one microbatch.

    Example:
        sum(count_work(graph, graph.sizes(1)))
    """
    return [_work(graph, op, sizes) for op in graph.ops]


def _work(graph: Graph, op: Op, sizes: Mapping[str, int]) -> float:
    if _is_view(op):
        return SECONDS_PER_CALL / 4
    result = _result(graph, op, sizes)
    shapes = [graph.values[name].evaluate(sizes) for name in op.uses() if name in graph.values]
    flops = _flops(op, shapes, result)
    kind = op.packet
    moved = 4 * (math.prod(result) + sum(math.prod(shape) for shape in shapes))
    if kind in _CHOSEN_ROWS and shapes:
        others = sum(math.prod(shape) for shape in shapes[1:])
        moved = 8 * (others if kind.endswith("_") else math.prod(result))
    speed = _TRANSCENDENTAL.get(kind)
    computed = math.prod(result) / speed if speed else 0.0
    return flops / NOMINAL_FLOPS_PER_S + moved / NOMINAL_BYTES_PER_S + computed + SECONDS_PER_CALL


def _is_view(op: Op) -> bool:
    if op.target == GETITEM:
        return True
    schema = resolve_operator(op.target)._schema
    return not any(a.alias_info and a.alias_info.is_write for a in schema.arguments) and any(
        a.alias_info for a in schema.arguments
    )


def _result(graph: Graph, op: Op, sizes: Mapping[str, int]) -> Shape:
    value = graph.values.get(op.name)
    return value.evaluate(sizes) if value else (0,)


def _flops(op: Op, shapes: list[Shape], result: Shape) -> float:
    """Return the FLOPs of matrix products, two per multiply-add; other operations count 0."""
    kind = op.packet
    if kind in {"linear", "mm", "bmm", "matmul"} and shapes:
        return 2.0 * math.prod(result) * (shapes[0][-1] if shapes[0] else 1)
    if kind in {"addmm", "baddbmm"} and len(shapes) > 1:
        return 2.0 * math.prod(result) * shapes[1][-1]
    if kind.startswith("conv") and len(shapes) > 1:
        return 2.0 * math.prod(result) * math.prod(shapes[1][1:])
    if kind == "scaled_dot_product_attention" and len(shapes) > 2:
        keys = shapes[1][-2]
        return 2.0 * math.prod(result[:-1]) * keys * (shapes[0][-1] + shapes[2][-1])
    if kind == "einsum" and len(shapes) > 1:
        return 2.0 * math.prod(result) * max(shape[-1] for shape in shapes)
    return 0.0
