"""Attention over caches as one operation, which ONNX Runtime has: GroupQueryAttention writes and reads caches in place.

    query ──────────────────────────────────────────────────────────────────────────────▶ ┐
    key   ─▶ index_put_ (keys, [rows, positions]) ─▶ narrow ─▶ index_select ─▶ transpose ─▶ attention
    value ─▶ index_put_ (values, ...)             ─▶ narrow ─▶ index_select ─▶ transpose ─▶ ┘

becomes

    penstock.cached_attention(query, key, value, keys, values, rows, positions, mask, scale)

A row computes the same bits whatever the other rows are: the engine attends row by row, up to the row's own position.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.graph.decoders import ATTENTION, POSITIONS, ROWS
from penstock.graph.ops import Op, Ref, effect, references
from penstock.graph.program import StageProgram
from penstock.runtime.onnx.onnx_nodes import ELEMENTS, OF_ENGINE, Flat, Made, written_name
from penstock.runtime.onnx.onnx_operators import OPERATORS, OnnxCall
from penstock.runtime.onnx.writer import Shapes, bound_arguments
from penstock.values import BATCH, Size, Value

_WIDTHS = 8  # the engine's heads have a multiple of this width
_SDPA = "aten.scaled_dot_product_attention.default"


@dataclass(frozen=True, slots=True)
class _Read:
    """Keys or values as an attention reads them from a cache, after `new` was written at `positions` of `rows`."""

    new: str
    cache: str


def with_cached_attention(program: StageProgram, shapes: Shapes, sizes: Mapping[str, int]) -> StageProgram:
    """Replace attentions over caches that an engine can run; other operations stay as they are.

    Whether one can be replaced does not depend on where the model is cut. `sizes` are some sizes at which shapes are
    compared; they must differ from each other.
    """
    reads, seen = _Reads(program), shapes.at(sizes)
    ops = [_matched(op, reads, seen) or op for op in program.ops]
    return replace(program, ops=tuple(without_unread(ops, {value.name for value in program.outputs})))


def rows_of(program: StageProgram) -> tuple[list[int | None], list[int | None]] | None:
    """Return the batch dimension of each input and output, None for values without one.

    Returns None if rows cannot be run one by one: a value has the batch in another way, or an output without a batch is
    not an input.
    """
    values = (*program.inputs, *program.outputs)
    dims = [list(_batch_dims(value)) for value in values]
    known = {value.name for value in program.inputs}
    alike = all(each or value.name in known for each, value in zip(dims, values, strict=True))
    if not alike or any(len(each) > 1 or None in each for each in dims):
        return None
    single = [each[0] if each else None for each in dims]
    return single[: len(program.inputs)], single[len(program.inputs) :]


def _batch_dims(value: Value) -> Iterator[int | None]:
    """Yield each dimension that is the batch, and None for a dimension that depends on it otherwise."""
    for dim, size in enumerate(value.shape):
        if isinstance(size, Size) and size.mentions(BATCH):
            yield dim if size == Size(BATCH) else None


def without_unread(ops: Sequence[Op], outputs: Collection[str]) -> list[Op]:
    """Leave out the operations that nothing reads any more."""
    needed, kept = set(outputs), list[Op]()
    attended = set(caches_of(ops))
    for op in reversed(ops):
        if op.name in needed or set(effect(op).writes) - attended:
            kept.append(op)
            needed.update(op.uses())
    return kept[::-1]


def _matched(op: Op, reads: "_Reads", seen: Mapping[str, Any]) -> Op | None:
    if op.target != _SDPA:
        return None
    given = bound_arguments(op)
    names = [
        given[name].name if isinstance(given[name], Ref) else "" for name in ("query", "key", "value", "attn_mask")
    ]
    if not all(names) or given["is_causal"] or given["dropout_p"]:
        return None
    query, _, _, mask = names
    key, value = (reads.of(name, op) for name in names[1:3])
    if key is None or value is None:
        return None
    shape, width = seen[query].shape, seen[query].shape[-1]
    of_keys, of_values, of_mask = (seen[name] for name in (key.cache, value.cache, mask))
    fits = (
        key.cache != value.cache
        and all(each.dtype == torch.float32 and each.dim() == 4 for each in (seen[query], of_keys, of_values))
        and of_keys.shape == of_values.shape
        and of_keys.shape[3] == width
        and shape[1] % of_keys.shape[2] == 0
        and width % _WIDTHS == 0
        and of_mask.dtype == torch.bool
        and of_mask.dim() == 4
        and of_mask.shape[1] in {1, shape[1]}
        and (of_mask.shape[0], of_mask.shape[2]) == (shape[0], shape[2])
    )
    if not fits:
        return None
    scale = given["scale"] if given["scale"] is not None else 1 / math.sqrt(width)
    arguments = (query, key.new, value.new, key.cache, value.cache, ROWS, POSITIONS, mask)
    return Op(op.name, ATTENTION, (*map(Ref, arguments), float(scale)), {})


class _Reads:
    """Recognizes how an attention reads its keys or values from a cache, if nothing else reads what it passes."""

    def __init__(self, program: StageProgram) -> None:
        self._ops = {op.name: op for op in program.ops}
        self._caches = {state.value.name for state in program.caches}
        self._users: dict[str, list[str]] = defaultdict(list)
        for op in program.ops:
            for name in op.uses():
                self._users[name].append(op.name)
        self._outputs = {value.name for value in program.outputs}

    def of(self, name: str, reader: Op) -> _Read | None:
        """Return how `reader` reads a value from a cache; None if it does so in another way."""
        way = list(self._way(name))
        targets = [op.target for op in way]
        wanted = ["transpose.int", "index_select.default", "narrow.default", "index_put_.default"]
        if targets != [f"aten.{target}" for target in wanted]:
            return None
        turned, selected, narrowed, put = (op.arguments for op in way)
        plain = (
            turned[1:] == (1, 2)
            and selected[1] == 0
            and narrowed[1:3] == (1, 0)
            and len(put) == 3
            and isinstance(put[1], (list, tuple))
            and len(put[1]) == 2
            and all(isinstance(x, Ref) for x in put[1])
            and isinstance(put[0], Ref)
            and isinstance(put[2], Ref)
            and put[0].name in self._caches
        )
        if not plain or not self._alone([*[op.name for op in way], put[0].name], reader):
            return None
        rows, positions = put[1]
        if self._unsqueezed(rows.name) != selected[2].name or (selected[2].name, positions.name) != (ROWS, POSITIONS):
            return None
        return _Read(put[2].name, put[0].name)

    def _way(self, name: str) -> Iterator[Op]:
        """Yield the operations from a value back to a write into a cache, without slices of everything."""
        while (op := self._ops.get(name)) is not None:
            if not is_whole_slice(op):
                yield op
            if op.target == "aten.index_put_.default" or not isinstance(op.arguments[0], Ref):
                return
            name = op.arguments[0].name

    def _alone(self, names: Sequence[str], reader: Op) -> bool:
        """Return True if each value has one reader, up to `reader`, through slices of everything."""
        for name in names:
            users = self._users[name]
            while len(users) == 1 and users[0] not in names and users[0] != reader.name:
                if name in self._outputs or not is_whole_slice(self._ops[users[0]]):
                    return False
                name = users[0]
                users = self._users[name]
            if len(users) != 1 or name in self._outputs:
                return False
        return True

    def _unsqueezed(self, name: str) -> str | None:
        """Return the value of which another is a column, [B, 1] of [B]."""
        op = self._ops.get(name)
        if op is None or op.target != "aten.unsqueeze.default" or op.arguments[1] != 1:
            return None
        source = op.arguments[0].name
        while source in self._ops and is_whole_slice(self._ops[source]):
            source = self._ops[source].arguments[0].name
        return str(source)


def is_whole_slice(op: Op) -> bool:
    """Return True if an operation is a slice that keeps all elements."""
    if op.target != "aten.slice.Tensor" or op.keywords:
        return False
    given = bound_arguments(op)
    begin, end, step = given["start"], given["end"], given["step"]
    return begin in {0, None} and (end is None or (isinstance(end, int) and end >= 2**31)) and step == 1


def _attend(call: OnnxCall) -> None:
    keys, heads = call["keys"], call["query"].shape[1]
    groups = keys.shape[1]  # a cache is [slots, G, T, D] in the engine
    caches = [call["keys"].name, call["values"].name]
    given = [joined_heads(call, call[name], turned=name == "query") for name in ("query", "key", "value")]
    lengths = call.nodes.once("lengths", call["positions"].name, lambda: _lengths(call))
    room = call.nodes.once("room", call["mask"].name, lambda: _room(call))
    bias = call.nodes.once("bias", call["mask"].name, lambda: _bias(call))
    inputs = [*given, *caches, lengths, room, "", "", "", bias]  # rotary embedding has been applied
    attended = call.nodes.add(
        "GroupQueryAttention",
        inputs,
        more=[written_name(name) for name in caches],
        domain=OF_ENGINE,
        num_heads=heads,
        kv_num_heads=groups,
        scale=call["scale"],
    )
    for name in ("keys", "values"):
        call.nodes.writes(call[name])
    call.out.flat = Flat(attended, turned=True)


def joined_heads(call: OnnxCall, made: Made, *, turned: bool = True) -> str:
    """Return a tensor [B, heads, S, D] as [B, S, heads * D]; if not `turned`, a tensor [B, S, heads, D]."""
    if made.flat is not None and made.flat.turned == turned:
        return made.flat.name
    name = call.add("Transpose", [made.name], perm=[0, 2, 1, 3]) if turned else made.name
    heads, width = made.shape[1 if turned else 2], made.shape[3]
    return call.add("Reshape", [name, call.nodes.numbers([0, 0, heads * width])])  # 0 keeps a dimension


def _lengths(call: OnnxCall) -> str:
    """Return each row's attended length minus 1, as 32-bit integers: the position of its last token.

    It is computed from the first token, since positions of padding may repeat.
    """
    positions, zero = call["positions"], call.nodes.scalar(0)
    first = call.add("Gather", [positions.name, zero], axis=1)
    count = call.add("Gather", [call.add("Shape", [positions.name]), call.nodes.scalar(1)], axis=0)
    last = call.add("Sub", [call.add("Add", [first, count]), call.nodes.scalar(1)])
    return call.add("Cast", [last], to=ELEMENTS[torch.int32])


def _room(call: OnnxCall) -> str:
    size = call.add("Gather", [call.add("Shape", [call["mask"].name]), call.nodes.scalar(3)], axis=0)
    return call.add("Cast", [size], to=ELEMENTS[torch.int32])


def _bias(call: OnnxCall) -> str:
    return call.add("Where", [call["mask"].name, call.number(0.0), call.number(-math.inf)])


OPERATORS[ATTENTION] = _attend


def in_order(cache: Tensor) -> Tensor:
    """Return a cache [slots, T, G, D] with the engine's order of elements, [slots, G, T, D], in memory."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


def check_places(positions: Tensor, masks: Iterable[Tensor]) -> None:
    """Raise `RunError` if positions [B, S] are not consecutive, or a mask [B, heads, S, T] shows a later position.

    The engine writes the tokens of a row to consecutive positions, and lets none see a later one. Positions of padding
    at the end of a row may repeat.
    """
    at = positions.numpy()  # NumPy's calls are shorter, and there is no gradient
    ends = at[:, :1] + np.arange(at.shape[1])
    if at.shape[1] > 1 and not ((at == ends) | (at == at[:, -1:])).all():
        raise RunError("the positions of a row must be consecutive in ONNX Runtime; use the runtime eager")
    for mask in masks:
        if (mask.numpy() & (np.arange(mask.shape[3]) > ends[:, None, :, None])).any():
            raise RunError("the mask must not let a token see a later one in ONNX Runtime; use the runtime eager")


def caches_of(ops: Sequence[Op]) -> list[str]:
    """Return the caches that attentions among some operations write, in order."""
    return [name for op in ops if op.target == ATTENTION for name in references(op.arguments[3:5])]
