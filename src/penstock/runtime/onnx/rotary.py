"""Rotary position embedding as one operation, which ONNX Runtime has.

    x * cos + cat([-x[..., D/2:], x[..., :D/2]], -1) * sin

becomes `penstock.rotary(x, cos, sin)`, if both halves of `cos` and of `sin` are equal. They are if they come from
`cat([y, y], -1)`; in a later stage, where they are inputs, each microbatch is checked.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.graph.decoders import ROTARY
from penstock.graph.ops import Op, Ref
from penstock.graph.program import StageProgram
from penstock.runtime.onnx.cached_attention import is_whole_slice, joined_heads, without_unread
from penstock.runtime.onnx.onnx_nodes import OF_ENGINE, Flat, Made
from penstock.runtime.onnx.onnx_operators import OPERATORS, OnnxCall, slice_axis
from penstock.runtime.onnx.writer import Shapes

# each keeps halves equal
_KEEPS = {"aten.unsqueeze.default", "aten.cos.default", "aten.sin.default", "aten.to.dtype"}


def with_rotary(program: StageProgram, shapes: Shapes, sizes: Mapping[str, int]) -> StageProgram:
    """Replace rotary embeddings of queries and keys [B, heads, S, D]; other operations stay as they are."""
    finder = _Finder(program, shapes.at(sizes))
    ops = [finder.matched(op) or op for op in program.ops]
    return replace(program, ops=tuple(without_unread(ops, {value.name for value in program.outputs})))


def inputs_of_halves(program: StageProgram) -> list[str]:
    """Return the inputs of a program whose halves must be equal."""
    finder = _Finder(program, {})
    roots = [finder.root(ref.name) for op in program.ops if op.target == ROTARY for ref in op.arguments[1:]]
    return list(dict.fromkeys(root for root in roots if root in finder.inputs))


def check_halves(name: str, tensor: Tensor) -> None:
    """Raise `RunError` if the halves of a cosine or sine differ."""
    first, second = tensor.chunk(2, -1)
    if not torch.equal(first, second):
        raise RunError(f"the halves of {name} must be equal for a rotary embedding; use the runtime eager")


class _Finder:
    def __init__(self, program: StageProgram, seen: Mapping[str, Any]) -> None:
        self._ops = {op.name: op for op in program.ops}
        self._seen = seen
        self.inputs = {value.name for value in program.inputs}

    def matched(self, op: Op) -> Op | None:
        """Return the operation that replaces the last one of an embedding; None for any other operation."""
        if op.target != "aten.add.Tensor" or op.keywords or len(op.arguments) != 2:
            return None
        plain, turned = (self._product(argument) for argument in op.arguments)
        if plain is None or turned is None:
            return None
        x, (parts, sine) = plain[0], turned
        if self._seen[x].dim() != 4 or not self._is_turned(parts, x):
            return None
        factors = [self._without_unsqueeze(name) for name in (plain[1], sine)]
        batch, _, step, width = self._seen[x].shape
        fits = all(self._seen[name].shape in {(batch, step, width), (batch, 1, step, width)} for name in factors)
        floats = all(self._seen[name].dtype == torch.float32 for name in (x, *factors))
        if not fits or not floats or not all(self._has_equal_halves(name) for name in factors):
            return None
        return Op(op.name, ROTARY, (Ref(x), *map(Ref, factors)), {})

    def root(self, name: str) -> str:
        """Return the value from which one with equal halves is made, as far back as the halves stay equal."""
        while (op := self._ops.get(name)) is not None and isinstance(op.arguments[0], Ref):
            scaled = op.target == "aten.mul.Tensor" and isinstance(op.arguments[1], float)
            if not scaled and op.target not in _KEEPS and not is_whole_slice(op):
                break
            name = op.arguments[0].name
        return name

    def _has_equal_halves(self, name: str) -> bool:
        root = self.root(name)
        op = self._ops.get(root)
        if op is None:
            return root in self.inputs
        if op.target != "aten.cat.default" or len(op.arguments) < 2 or op.arguments[1] not in {-1, 2, 3}:
            return False
        parts = op.arguments[0]
        last = op.arguments[1] % self._seen[root].dim() == self._seen[root].dim() - 1
        return last and len(parts) == 2 and parts[0] == parts[1]

    def _product(self, argument: Any) -> tuple[str, str] | None:
        op = self._ops.get(argument.name) if isinstance(argument, Ref) else None
        if op is None or op.target != "aten.mul.Tensor" or not all(isinstance(x, Ref) for x in op.arguments):
            return None
        return op.arguments[0].name, op.arguments[1].name

    def _is_turned(self, name: str, x: str) -> bool:
        """Return True if a value is cat([-x[..., D/2:], x[..., :D/2]], -1)."""
        op = self._ops.get(name)
        if op is None or op.target != "aten.cat.default" or len(op.arguments) < 2 or op.arguments[1] not in {-1, 3}:
            return False
        names = [part.name for part in op.arguments[0]]
        negative = self._ops.get(names[0])
        if len(names) != 2 or negative is None or negative.target != "aten.neg.default":
            return False
        half = self._seen[x].shape[-1] // 2
        return self._part(negative.arguments[0].name, x) == (half, 2 * half) and self._part(names[1], x) == (0, half)

    def _part(self, name: str, x: str) -> tuple[int, int] | None:
        op = self._ops.get(name)
        if op is None or op.target != "aten.slice.Tensor" or op.keywords or len(op.arguments) != 4:
            return None
        source, axis, begin, end = op.arguments
        if source != Ref(x) or axis not in {-1, 3} or not isinstance(begin, int) or not isinstance(end, int):
            return None
        return begin, min(end, self._seen[x].shape[-1])

    def _without_unsqueeze(self, name: str) -> str:
        op = self._ops.get(name)
        return str(op.arguments[0].name) if op is not None and op.target == "aten.unsqueeze.default" else name


def _embed(call: OnnxCall) -> None:
    x, nodes = call["x"], call.nodes
    tables = [nodes.once("table", call[name].name, partial(_table, call, call[name])) for name in ("cos", "sin")]
    places = nodes.once("places", "", lambda: _places(call))
    embedded = call.add("RotaryEmbedding", [joined_heads(call, x), places, *tables], domain=OF_ENGINE, interleaved=0)
    call.out.flat = Flat(embedded, turned=True)


def _table(call: OnnxCall, made: Made) -> str:
    """Return one half of a cosine or sine, with a row for each token of the microbatch."""
    half = made.shape[-1] // 2
    part = slice_axis(call.nodes, made, len(made.shape) - 1, 0, half)
    return call.add("Reshape", [part, call.nodes.numbers([-1, half])])


def _places(call: OnnxCall) -> str:
    """Return the row of each token [B, S] in the tables."""
    sizes = call.add("Gather", [call.add("Shape", [joined_heads(call, call["x"])]), call.nodes.numbers([0, 1])], axis=0)
    count = call.add("ReduceProd", [sizes], keepdims=0)
    rows = call.add("Range", [call.nodes.scalar(0), count, call.nodes.scalar(1)])
    return call.add("Reshape", [rows, sizes])


OPERATORS[ROTARY] = _embed
