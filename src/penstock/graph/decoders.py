"""Models with caches: the buffers, attention without copies, and no cut inside a norm or an attention.

Attention whose heads share keys and values reads them directly, without a copy for each head:

    before   keys [B, H, T, D] - unsqueeze - expand [B, H, G, T, D] - reshape [B, H * G, T, D] - attention
    after    keys [B, H, T, D] - attention with enable_gqa

Results have the same bits, since each head reads the same numbers.

Engines fuse the operations of a norm into one, and those between the products that make queries, keys and values and
the attention's result, which changes the last bits. So each of these is always within one stage, and a sequence has the
same tokens wherever the model is cut.

Operators that an engine has for what a captured graph computes in several operations stand in a stage's operations only
while a runtime prepares them for its engine, and have no kernel: only shapes.
"""

import math
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CaptureError
from penstock.graph.graph import Graph
from penstock.graph.ops import Argument, Op, Ref
from penstock.values import Size

_MARK = "penstock_caches"
# inputs of a decoder with these names are the slots [B] and positions [B, S] at which keys and values are written
ROWS, POSITIONS = "rows", "positions"

_SDPA = "aten.scaled_dot_product_attention.default"
_PRODUCTS = {"aten.linear.default", "aten.addmm.default", "aten.mm.default", "aten.matmul.default"}
_COPIES = ("aten.reshape.default", "aten.expand.default", "aten.unsqueeze.default")


def share_heads(graph: Graph) -> Graph:
    """Return a graph whose attention reads shared keys and values directly; unused operations are not removed."""
    made = {op.name: op for op in graph.ops}
    return replace(graph, ops=tuple(_shared(op, made, graph) for op in graph.ops))


def _shared(op: Op, made: Mapping[str, Op], graph: Graph) -> Op:
    if op.target != _SDPA or "enable_gqa" in op.keywords:
        return op
    query, keys, values, *rest = op.arguments
    sources = [_without_copies(each, made, graph) for each in (keys, values)]
    if None in sources:
        return op
    return replace(op, arguments=(query, *sources, *rest), keywords={**op.keywords, "enable_gqa": True})


def _without_copies(argument: Ref, made: Mapping[str, Op], graph: Graph) -> Ref | None:
    """Return the tensor that an argument repeats for each head of a group, or None if it is no such repetition."""
    name = argument.name
    for target in _COPIES:
        op = made.get(name)
        if op is None or op.target != target:
            return None
        name = op.arguments[0].name
    batch, heads, *rest = graph.values[name].shape
    groups = made[made[argument.name].arguments[0].name]
    wanted = graph.values[argument.name].shape
    expanded = graph.values[groups.name].shape
    is_grouped = len(expanded) == 5 and (*expanded[:2], *expanded[3:]) == (batch, heads, *rest)
    if not is_grouped or not isinstance(heads, int) or not isinstance(expanded[2], int):
        return None
    return Ref(name) if wanted == (batch, heads * expanded[2], *rest) else None


def inside_engine_operations(ops: Sequence[Op]) -> dict[int, str]:
    """Return the positions inside what engines compute as one operation, with the effect of a cut there."""
    return _inside_attentions(ops) | _inside_norms(ops)


def _inside_attentions(ops: Sequence[Op]) -> dict[int, str]:
    """Return the positions between the last product that an attention's inputs come from and the attention."""
    place = {op.name: index for index, op in enumerate(ops)}
    found: dict[int, str] = {}
    for index in (index for index, op in enumerate(ops) if op.target == _SDPA):
        seen, left, last = set[int](), [index], -1
        while left:
            for at in {place[name] for name in ops[left.pop()].uses() if name in place} - seen:
                seen.add(at)
                if ops[at].target in _PRODUCTS:
                    last = max(last, at)
                else:
                    left.append(at)
        if last >= 0:  # a cut right after the product is allowed
            inside = range(last + 2, index + 1)
            found |= dict.fromkeys(inside, "split an attention, which engines compute as one operation")
    return found


def _inside_norms(ops: Sequence[Op]) -> dict[int, str]:
    """Return the positions inside RMS norms.

    Such a norm is `x * rsqrt(mean(x * x) + eps) * weight`, with changes of the dtype in between.
    """
    place = {op.name: index for index, op in enumerate(ops)}
    readers: dict[str, list[int]] = defaultdict(list)
    for index, op in enumerate(ops):
        for name in op.uses():
            readers[name].append(index)
    found: dict[int, str] = {}
    for index in (index for index, op in enumerate(ops) if op.target == "aten.rsqrt.default"):
        first = _follow(index, _BEFORE, ops, lambda at: [place[name] for name in ops[at].uses() if name in place])
        last = _follow(index, _AFTER, ops, lambda at: readers[ops[at].name])
        found |= dict.fromkeys(range(first + 1, last + 1), "split a norm, which engines compute as one operation")
    return found


_BEFORE = ({"add"}, {"mean"}, {"pow", "mul"})
_AFTER = ({"mul"}, {"mul"})


def _follow(start: int, kinds: Sequence[set[str]], ops: Sequence[Op], near: Callable[[int], list[int]]) -> int:
    """Return the last operation of a chain of operations of these kinds; casts may be in between."""
    reached = at = start
    for kind in kinds:
        while (found := near(at)) and ops[found[0]].packet in {"to", "type_as"}:
            at = found[0]
        matching = [index for index in found if ops[index].packet in kind]
        if not matching:
            break
        reached = at = matching[0]
    return reached


def add_cache(module: nn.Module, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
    """Add a cache to a module: a buffer that each stage allocates itself, initially zero, and that is never sent.

    The module's `forward` reads it and writes into it in place. Until it is written, which in this process it never is,
    it takes no memory.

    Example:
        add_cache(self, "keys", slots, length, heads, width)
    """
    # torch.zeros writes every page; pages of an anonymous mapping are zero until they are written
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)
    module.register_buffer(name, buffer, persistent=False)
    setattr(module, _MARK, {*getattr(module, _MARK, ()), name})


def is_cache(model: nn.Module, source: str) -> bool:
    """Return True if a model's buffer of this name is a cache."""
    owner, _, name = source.rpartition(".")
    return name in getattr(model.get_submodule(owner), _MARK, ())


_REDUCTIONS = {"max", "min", "amax", "amin", "sum", "any", "all", "prod", "mean", "argmax", "argmin", "count_nonzero"}
# arguments that are numbers to compute with, by operator; others are shapes
_STARTS = {"slice": (2,), "narrow": (2,), "select": (2,)}
_NUMBERS = {"add", "sub", "rsub", "mul", "div", "pow", "lt", "le", "gt", "ge", "eq", "ne", "clamp", "remainder"}


def check_steps(graph: Graph) -> None:
    """Raise `CaptureError` if rows of a decoder's step depend on each other's positions or on the number of keys."""
    rooms = {
        op.arguments[3].expression
        for op in graph.ops
        if op.packet == "narrow" and isinstance(op.arguments[3], Size) and isinstance(op.arguments[3].expression, str)
    }
    for op in (*graph.prelude, *graph.ops):
        if any(size.mentions(room) for size in _numbers(op) for room in rooms):
            raise CaptureError(
                f"{graph.model} computes with the number of keys ({op.target}), which is rounded up in a generator and "
                "therefore not that of a sequence; use model.generate"
            )
    if (found := _reduction(graph)) is not None:
        raise CaptureError(
            f"{graph.model} takes the {found.packet} over the positions of all sequences of a step, so a request's "
            "tokens would depend on others; use model.generate"
        )


def _numbers(op: Op) -> Iterator[Size]:
    kind = op.packet
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
        if op.packet in _REDUCTIONS and _reduces_rows(op, graph):
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


# writes `key` and `value` [B, S, G, D] to the caches at `positions` of `rows`, and attends with `query` [B, H, S, D]
ATTENTION = "penstock.cached_attention.default"
# x * cos + cat([-x[..., D/2:], x[..., :D/2]], -1) * sin, for `x` [B, H, S, D]
ROTARY = "penstock.rotary.default"

_LIBRARY = torch.library.Library("penstock", "FRAGMENT")
# no write is declared: no other operation uses these caches, so the order does not matter
_LIBRARY.define(
    "cached_attention(Tensor query, Tensor key, Tensor value, Tensor keys, Tensor values, Tensor rows, "
    "Tensor positions, Tensor mask, float scale) -> Tensor"
)
_LIBRARY.define("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor")


def _like_first(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


for _name in ("cached_attention", "rotary"):
    _LIBRARY.impl(_name, _like_first, "Meta")
