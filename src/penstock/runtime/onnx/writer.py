"""Write a stage program as an ONNX model for one microbatch size; the dtypes and shapes of its values at any sizes."""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import onnx
import torch
from torch import Tensor

from penstock.errors import PlanError, ProgramError
from penstock.graph.ops import GETITEM, Op, effect, is_factory, resolve_operator, settled
from penstock.graph.program import StageProgram
from penstock.runtime.onnx.blocks import Blocks, Halves
from penstock.runtime.onnx.onnx_nodes import ELEMENTS, Arrays, Made, Nodes
from penstock.runtime.onnx.onnx_operators import OPERATORS, OnnxCall, slice_axis
from penstock.tensors import HOST

# one or several tensors for each value, by name
Seen: TypeAlias = Mapping[str, Tensor | Sequence[Tensor]]

# these return several tensors, each a part of the input
_PARTED = {"aten.unbind.int", "aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default"}
# arguments without an ONNX equivalent, and the values at which they have no effect
_PLAIN: Mapping[str, Mapping[str, Any]] = {
    "aten.batch_norm.default": {"training": False},
    "aten.dropout.default": {"train": False},
    "aten.scaled_dot_product_attention.default": {"dropout_p": 0.0, "enable_gqa": False},
    "aten.adaptive_avg_pool2d.default": {"output_size": [1, 1]},
}


def unsupported(program: StageProgram) -> list[str]:
    """Return the names of a program's operators that cannot be written, without repetition, in order.

    Example:
        unsupported(program)    # ['aten.cumsum.default']
    """
    return list(dict.fromkeys(op.target for op in program.ops if not is_supported(op)))


def is_supported(op: Op) -> bool:
    """Return True if an operation can be written."""
    if op.target not in _PLAIN:
        return op.target in OPERATORS or op.target in _PARTED or op.target == GETITEM
    given = bound_arguments(op)
    return all(given[name] == value for name, value in _PLAIN[op.target].items())


def bound_arguments(op: Op) -> dict[str, Any]:
    """Return an operation's arguments by their names in its schema, including defaults."""
    parameters = resolve_operator(op.target)._schema.arguments
    given = {parameter.name: parameter.default_value for parameter in parameters}
    given |= {parameter.name: argument for parameter, argument in zip(parameters, op.arguments, strict=False)}
    return given | dict(op.keywords)


def check_supported(program: StageProgram) -> None:
    """Raise `PlanError` if a program cannot be written; the message lists the unsupported operators."""
    refused = unsupported(program)
    if refused:
        raise PlanError(
            f"runtimes that take ONNX cannot run {', '.join(refused)}; plan this stage with the runtime eager"
        )
    _check_writes(program)


def write_model(
    ops: Sequence[Op],
    inputs: Sequence[str],
    outputs: Sequence[str],
    known: Mapping[str, Tensor],
    seen: Seen,
    sizes: Mapping[str, int],
    *,
    others: Seen | None = None,
    packed: Mapping[tuple[str, ...], Blocks | Halves] | None = None,
    caches: Collection[str] = (),
    apart: Arrays | None = None,
) -> onnx.ModelProto:
    """Write operations as an ONNX model.

    `known` are states and results of a prelude; `seen` are the inputs and all operations' results at `sizes`, of which
    only dtype and shape matter. `others` are the same at other sizes: dimensions that differ are left unknown in the
    model if possible. `packed` has weights in blocks, by the operations that use them. Inputs keep their names; outputs
    are named by position. `caches` are inputs [slots, T, G, D] that the model takes as [rows, G, T, D], writes to and
    returns after the outputs. Large constants are put into `apart`, if given, and are not in the model.

    Raises `PlanError` for a dtype that ONNX Runtime does not have; see `check_supported` for other errors.
    """
    return _Writer(inputs, known, seen, sizes, others or {}, packed or {}, caches, apart).model(ops, outputs)


def _check_writes(program: StageProgram) -> None:
    """Raise `PlanError` if an operation writes into memory viewed by another value that is read later."""
    group: dict[str, set[str]] = defaultdict(set)
    last = {name: index for index, op in enumerate(program.ops) for name in op.uses()}
    last |= {value.name: len(program.ops) for value in program.outputs}
    for index, op in enumerate(program.ops):
        changes = effect(op)
        shared = {op.name}.union(*(group[name] | {name} for name in changes.shares))
        for name in changes.writes:
            others = {other for other in group[name] | shared if other not in {name, op.name}}
            if any(last.get(other, -1) > index for other in others):
                raise PlanError(
                    f"ONNX runtimes cannot run {op.target} ({op.name}), which writes to memory that others read; "
                    "plan this stage with the runtime eager"
                )
        for name in shared:
            group[name] |= shared


class _Writer:
    def __init__(
        self,
        inputs: Sequence[str],
        known: Mapping[str, Tensor],
        seen: Seen,
        sizes: Mapping[str, int],
        others: Seen,
        packed: Mapping[tuple[str, ...], Blocks | Halves],
        caches: Collection[str],
        apart: Arrays | None,
    ) -> None:
        self._seen, self._others, self._sizes = seen, others, sizes
        self._nodes = Nodes(packed=packed, apart=apart)
        self._values: dict[str, Made] = {
            name: Made(self._nodes, tensor.dtype, tuple(tensor.shape), value=tensor) for name, tensor in known.items()
        }
        self._parts: dict[str, list[Made]] = {}
        self._inputs = [
            self._cache(seen[name], name) if name in caches else self._like(seen[name], others.get(name), name)
            for name in inputs
        ]
        self._values |= dict(zip(inputs, self._inputs, strict=True))

    def _like(self, seen: Any, other: Any = None, name: str | None = None) -> Made:
        if seen.dtype not in ELEMENTS:
            raise PlanError(f"runtimes that take ONNX have no {seen.dtype}; plan this stage with the runtime eager")
        shape = tuple(seen.shape)
        varies = () if other is None else tuple(a != b for a, b in zip(shape, other.shape, strict=True))
        return Made(self._nodes, seen.dtype, shape, known_as=name, varies=varies)

    def _cache(self, seen: Any, name: str) -> Made:
        slots, length, groups, width = seen.shape
        shape, varies = (slots, groups, length, width), (True, False, False, False)
        return Made(self._nodes, seen.dtype, shape, known_as=name, varies=varies)

    def model(self, ops: Sequence[Op], outputs: Sequence[str]) -> onnx.ModelProto:
        for op in ops:
            self._write(op)
        return self._nodes.model(self._inputs, [self._values[name] for name in outputs])

    def _write(self, op: Op) -> None:
        self._nodes.operation = op.name
        if op.target == GETITEM:
            source, index = op.arguments
            self._values[op.name] = self._parts[source.name][index]
            return
        given = {name: self._settled(argument) for name, argument in bound_arguments(op).items()}
        if op.target in _PARTED:
            self._parts[op.name] = list(self._parted(op, given))
            return
        if op.name not in self._seen:
            return  # its result is not read, and it writes nothing
        made = self._like(self._seen[op.name], self._others.get(op.name))
        made.known_as = OPERATORS[op.target](OnnxCall(self._nodes, made, given))
        self._values[op.name] = made
        for name in effect(op).writes:
            self._values[name] = made

    def _parted(self, op: Op, given: Mapping[str, Any]) -> Iterator[Made]:
        source: Made = given["self"]
        axis = given["dim"] % len(source.shape)
        begin = 0
        tensors = self._seen[op.name]
        for tensor, other in zip(tensors, self._others.get(op.name, itertools.repeat(None)), strict=False):
            made = self._like(tensor, other)
            size = 1 if op.target == "aten.unbind.int" else made.shape[axis]
            made.known_as = slice_axis(self._nodes, source, axis, begin, begin + size)
            if op.target == "aten.unbind.int":
                made.known_as = self._nodes.add("Squeeze", [made.known_as, self._nodes.numbers([axis])])
            begin += size
            yield made

    def _settled(self, argument: Any) -> Any:
        return settled(argument, self._sizes, HOST, self._value)

    def _value(self, name: str) -> Made:
        if name not in self._values:
            raise ProgramError(f"{name} is read before it is computed; write the program again")
        return self._values[name]


_KEPT = 2  # writing a model needs two
_META = torch.device("meta")


class Shapes:
    """The dtypes and shapes of a program's values, by name, at any sizes.

    Layers repeat operations, so each operation is computed once for the same argument shapes.
    """

    def __init__(self, program: StageProgram) -> None:
        self._program = program
        self._known: dict[tuple[Any, ...], Tensor | list[Tensor]] = {}
        self._found: dict[tuple[int, ...], Seen] = {}

    def at(self, sizes: Mapping[str, int]) -> Seen:
        """Return a tensor on the meta device, or a list of tensors, for each value."""
        program, key = self._program, tuple(sizes[symbol] for symbol in self._program.symbols)
        if key in self._found:
            return self._found[key]
        values: dict[str, Tensor | list[Tensor]] = {
            value.name: torch.empty(value.evaluate(sizes), dtype=value.dtype, device=_META)
            for value in (*(state.value for state in program.states), *program.inputs)
        }
        for op in (*program.prelude, *program.ops):
            values[op.name] = self._result(op, values, sizes)
        while len(self._found) >= _KEPT:
            self._found.pop(next(iter(self._found)))
        self._found[key] = values
        return values

    def _result(self, op: Op, values: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
        settle = partial(settled, sizes=sizes, device=_META, value_of=values.__getitem__)
        arguments = [settle(argument) for argument in op.arguments]
        if op.target == GETITEM:
            return arguments[0][arguments[1]]
        keywords = {name: settle(argument) for name, argument in op.keywords.items()}
        if is_factory(op):
            keywords["device"] = _META
        key = op.target, _described(arguments), _described([*keywords.items()])
        if key not in self._known:
            with torch.no_grad():
                made = resolve_operator(op.target)(*arguments, **keywords)
            like = [
                torch.empty(x.shape, dtype=x.dtype, device=_META)
                for x in ([made] if isinstance(made, Tensor) else made)
            ]
            self._known[key] = like[0] if isinstance(made, Tensor) else like
        return self._known[key]


def _described(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.shape
    return tuple(map(_described, argument)) if isinstance(argument, (list, tuple)) else (type(argument), argument)
