"""A decoder's stage on an engine: one ONNX model, or one for the operations between the caches of two layers."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx
import torch
from torch import Tensor

from penstock.errors import PlanError, RunError
from penstock.graph.callbacks import Callback
from penstock.graph.decoders import ATTENTION, POSITIONS, ROWS
from penstock.graph.ops import CALLBACK, GETITEM, Op, Ref
from penstock.graph.program import StageProgram, may_be_written, operations_of
from penstock.packing import unpacked
from penstock.resources import release_freed
from penstock.runtime.bfloat16 import check_bfloat16
from penstock.runtime.eager import Runtime
from penstock.runtime.onnx.blocks import (
    IN_8_BITS,
    IN_FLOATS,
    PART_BYTES,
    Blocks,
    Halves,
    StoredWeight,
    pack,
    products_of_one_input,
    weight_of,
)
from penstock.runtime.onnx.cached_attention import caches_of, check_places, in_order, rows_of, with_cached_attention
from penstock.runtime.onnx.exported import Engine, InPlaceEngine
from penstock.runtime.onnx.onnx_nodes import Arrays
from penstock.runtime.onnx.phases import phases_of, pieces, some_sizes
from penstock.runtime.onnx.rotary import check_halves, inputs_of_halves, with_rotary
from penstock.runtime.onnx.writer import Shapes, write_model
from penstock.tensors import HOST
from penstock.values import BATCH, Size

BITS: Mapping[str, int] = {"int8": 8, "int4": 4}


class JoinedRuntime(Runtime):
    """A stage program with caches; an engine runs the operations between the caches, torch runs the others.

    `compile_model` makes an engine from an ONNX model. With `compile_caching`, which makes an engine that writes to
    caches, attention over caches is an operation of the engine too, if it has one (`cached_attention.py`). With the
    precision `int8` or `int4`, weights of linear layers are rounded in blocks (see `blocks.py`), except in the layers
    `keep`; with `stored` they are in the blocks of their file, and with `stored32` inputs are not rounded either.

    Example:
        runtime = JoinedRuntime(program, tensors, compile_model=compile_model, precision="int4")
        (logits,) = runtime({"batch": 1, "step": 1, ...}, [ids, positions, ...])

    Raises `PlanError` on a device other than the CPU.
    """

    def __init__(
        self,
        program: StageProgram,
        tensors: Mapping[str, Tensor],
        device: torch.device = HOST,
        *,
        compile_model: Callable[[onnx.ModelProto, Arrays], Engine],
        precision: str = "float32",
        keep: Sequence[str] = (),
        name: str = "onnxruntime",
        compile_caching: Callable[[onnx.ModelProto, Arrays], InPlaceEngine] | None = None,
    ) -> None:
        if device != HOST:
            raise PlanError(
                f"the runtime {name} computes only on the CPU, but the device is {device}; use the runtime eager"
            )
        if precision == "bfloat16":
            check_bfloat16()
        kept = operations_of(program, keep)
        if compile_caching is not None:
            for fused in (with_rotary, with_cached_attention):
                program = fused(program, Shapes(program), some_sizes(program))
        shapes = Shapes(program)
        phases = phases_of(program, shapes)
        packings = {state.value.name: state.packing for state in program.states if state.packing}
        of_engine = [op for ops in phases[1::2] for op in ops]
        accuracy = IN_FLOATS if precision == "stored32" else IN_8_BITS
        packed = pack(of_engine, tensors, BITS.get(precision), kept, packings, accuracy)
        lookups = {
            op.name: _PackedRows(op, tensors[name], packings[name]) for op, name in _lookups(program, packings, packed)
        }
        # of a weight in blocks only the shape is read
        shapes_only = (state.value for state in program.states if state.packing)
        tensors = {**tensors, **{x.name: torch.empty(x.evaluate({}), device="meta") for x in shapes_only}}
        self._parts: list[_FusedPart] = []
        order: list[Op] = []
        # the runtime calls engines and lookups like functions of the caller in training
        calls: list[Callback] = []
        checked: set[str] = set()
        for number, ops in enumerate(phases):
            if number % 2 == 0:
                for op in ops:
                    if (rows := lookups.get(op.name)) is None:
                        order.append(op)
                        continue
                    order += rows.as_operations(len(calls))
                    calls.append(Callback(name=rows.name, run=rows))
                continue
            for piece in pieces(ops, lambda op: _num_bytes(op, packed, tensors), PART_BYTES):
                made_by = compile_caching if compile_caching is not None and caches_of(piece) else compile_model
                part = _FusedPart(len(calls), program, piece, tensors, shapes, packed, made_by, checked)
                checked.update(part.masks)
                self._parts.append(part)
                calls.append(Callback(name=part.name, run=part))
                order += part.as_operations(program)
        states = tuple(state for state in program.states if not state.packing)
        joined = replace(program, ops=tuple(order), callbacks=calls, states=states)
        self._lookups = lookups
        super().__init__(joined, tensors, device)
        read = {name for op in (*joined.prelude, *joined.ops) for name in op.uses()}
        for index, state in enumerate(joined.states):
            if state.value.name not in read:  # engines have their own copies
                self._state[index] = torch.empty(0)
        halves = inputs_of_halves(program)
        self._halves = [(index, value.name) for index, value in enumerate(program.inputs) if value.name in halves]
        attended = set(caches_of(program.ops))
        self._positions = [value.name for value in program.inputs].index(POSITIONS) if attended else None
        self._rows = rows_of(program)
        for index, state in enumerate(joined.states):
            if state.value.name in attended:
                self._state[index] = in_order(self._state[index])

    def __call__(self, sizes: Mapping[str, int], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on one microbatch; `sizes` has a value for every symbol of the program."""
        for index, name in self._halves:
            check_halves(name, inputs[index])
        if self._positions is None or sizes[BATCH] == 1 or inputs[self._positions].shape[1] == 1:
            return super().__call__(sizes, inputs)
        # the engine attends to a cache from several rows only with one token each
        if self._rows is None:
            raise RunError("this stage runs one row at a time if rows have several tokens; use the runtime eager")
        given, taken = self._rows
        rows = [
            super(JoinedRuntime, self).__call__(
                {**sizes, BATCH: 1},
                [x if dim is None else x.narrow(dim, row, 1) for x, dim in zip(inputs, given, strict=True)],
            )
            for row in range(sizes[BATCH])
        ]
        return [
            parts[0] if dim is None else torch.cat(parts, dim)
            for parts, dim in zip(zip(*rows, strict=True), taken, strict=True)
        ]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the runtime's tensors."""
        tables = {rows.raw.data_ptr(): rows.raw.nbytes for rows in self._lookups.values()}
        return super().weight_bytes + sum(part.weight_bytes for part in self._parts) + sum(tables.values())

    def copied(self) -> None:  # type: ignore[override]
        """Return None: it cannot be copied."""

    def watched(
        self, sizes: Mapping[str, int], inputs: Sequence[Tensor], _clock: Callable[[], float]
    ) -> tuple[list[Tensor], list[float]]:
        """Run on one microbatch; single operations cannot be timed."""
        return self(sizes, inputs), []


def _lookups(
    program: StageProgram, packings: Mapping[str, str], packed: Mapping[str, Blocks | StoredWeight]
) -> Iterator[tuple[Op, str]]:
    """Yield the lookups in weights in blocks, with the weight; raises `PlanError` for other uses than in products."""
    for op in (*program.prelude, *program.ops):
        for name in packings.keys() & set(op.uses()):
            if op.target == "aten.embedding.default" and op.arguments[0] == Ref(name):
                yield op, name
            elif op.name not in packed or weight_of(op) != name:
                raise PlanError(
                    f"{op.target} ({op.name}) takes a weight in {packings[name]} blocks, which this engine does not "
                    "have; use the runtime eager, which unpacks it"
                )


class _PackedRows:
    """An embedding that unpacks the rows that it looks up."""

    def __init__(self, op: Op, raw: Tensor, packing: str) -> None:
        self.name, self.raw = f"{op.name}_packed", raw
        self._op, self._packing = op, packing

    def as_operations(self, number: int) -> Iterator[Op]:
        """Yield a call of this lookup, and the operation for its result."""
        yield Op(self.name, CALLBACK, ([self._op.arguments[1]], [], number), {})
        yield Op(self._op.name, GETITEM, (Ref(self.name), 0), {})

    def __call__(self, tensors: list[Tensor], _sizes: list[int]) -> list[Tensor]:
        (ids,) = tensors
        return [unpacked(self.raw[ids.reshape(-1)], self._packing).view(*ids.shape, -1)]


def _num_bytes(op: Op, packed: Mapping[str, Blocks | StoredWeight], tensors: Mapping[str, Tensor]) -> int:
    return packed[op.name].nbytes if op.name in packed else sum(tensors[x].nbytes for x in op.uses() if x in tensors)


class _FusedPart:
    """Operations that an engine runs as one model; one engine serves all sizes if their models are equal."""

    def __init__(
        self,
        number: int,
        program: StageProgram,
        ops: Sequence[Op],
        tensors: Mapping[str, Tensor],
        shapes: Shapes,
        packed: Mapping[str, Blocks | StoredWeight],
        compile_model: Callable[[onnx.ModelProto, Arrays], Any],
        checked: Collection[str],
    ) -> None:
        self.name, self._number, self._ops, self._symbols = f"joined_{number}", number, ops, program.symbols
        self.caches = caches_of(ops)  # if there are any, the engine is an `InPlaceEngine`
        self._cached = frozenset(self.caches)
        # masks that no earlier part of the stage checks
        self.masks = {op.arguments[7].name for op in ops if op.target == ATTENTION} - set(checked)
        made = {op.name for op in ops}
        self._packed = {op.name: packed[op.name] for op in ops if op.name in packed}
        read = list(dict.fromkeys(used for op in ops for used in op.uses() if used not in made))
        constants = {state.value.name for state in program.states if state.kind != "cache"} - may_be_written(program)
        plain = {used for op in ops for used in op.uses() if op.name not in packed or used != weight_of(op)}
        # only the shape of a weight in blocks is read
        self._known = {used: tensors[used].to("cpu" if used in plain else "meta") for used in read if used in constants}
        self.inputs = [used for used in read if used not in constants]
        elsewhere = {used for op in program.ops if op.name not in made for used in op.uses()}
        elsewhere |= {value.name for value in program.outputs}
        self.outputs = [op.name for op in ops if op.name in elsewhere]
        self._shapes, self._compile = shapes, compile_model
        self._engines: dict[tuple[int, ...], Any] = {}
        self._for_all: dict[int | None, Any] = {}  # by batch; None: for all of them
        self._made: dict[tuple[int, ...], list[Tensor]] = {}  # shapes and dtypes of the outputs, by sizes
        plain_bytes = sum(x.nbytes for x in self._known.values() if x.device == HOST)
        self.weight_bytes = plain_bytes + sum(x.nbytes for x in self._packed.values())

    def as_operations(self, program: StageProgram) -> Iterator[Op]:
        """Yield a call of this part, and an operation for each of its outputs."""
        sizes = [Size(symbol) for symbol in program.symbols]
        yield Op(self.name, CALLBACK, ([Ref(name) for name in self.inputs], sizes, self._number), {})
        for index, name in enumerate(self.outputs):
            yield Op(name, GETITEM, (Ref(self.name), index), {})

    def __call__(self, tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
        key = tuple(sizes)
        engine = self._engines.get(key)
        if engine is None:
            by_symbol = dict(zip(self._symbols, sizes, strict=True))
            engine = self._engines[key] = self._open(by_symbol)
            seen = self._shapes.at(by_symbol)
            self._made[key] = [x for x in (seen[name] for name in self.outputs) if isinstance(x, Tensor)]
        named = dict(zip(self.inputs, tensors, strict=True))
        if self.caches:
            return self._run_caching(engine, named, self._made[key])
        given = {name: x.contiguous().numpy() for name, x in named.items()}
        return [torch.from_numpy(array) for array in engine(given)]

    def _run_caching(self, engine: InPlaceEngine, named: Mapping[str, Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Run an engine on the caches of these rows: usually they are neighbours, and the engine writes in place."""
        rows, positions = named[ROWS], named[POSITIONS]
        if self.masks:
            check_places(positions, [named[name] for name in self.masks])
        numbers = rows.tolist()
        begin, end = numbers[0], numbers[0] + len(numbers)
        given = {name: x.contiguous().numpy() for name, x in named.items() if name not in self._cached}
        made = [torch.empty(x.shape, dtype=x.dtype) for x in like]
        if numbers == list(range(begin, end)):
            engine((begin, end), given, lambda: {x: named[x][begin:end].transpose(1, 2) for x in self.caches}, made)
            return made
        caches = {name: in_order(named[name][rows]).transpose(1, 2) for name in self.caches}
        engine(None, given, lambda: caches, made)
        for name, cache in caches.items():
            named[name].index_copy_(0, rows, cache.transpose(1, 2))
        return made

    def _open(self, sizes: Mapping[str, int]) -> Any:
        """Return an engine for these sizes; it serves all sizes, or all with this batch, if their models are equal."""
        batch = sizes[BATCH]
        for served in (None, batch):
            if served in self._for_all:
                return self._for_all[served]
        packed = {names: weight.blocks() for names, weight in products_of_one_input(self._ops, self._packed).items()}
        for served in (None, batch):
            others = {symbol: size + (symbol != BATCH or served is None) for symbol, size in sizes.items()}
            model, apart = self._written(sizes, others, packed)
            if model == self._written(others, sizes, packed)[0]:
                break
        else:
            served = -1  # only these sizes
            model, apart = self._written(sizes, sizes, packed)
        del packed
        if served is None:  # no other engine will be made of the weights
            self._packed, self._known = {}, {}
        engine = self._for_all[served] = self._compile(model, apart)
        release_freed()
        return engine

    def _written(
        self, sizes: Mapping[str, int], others: Mapping[str, int], packed: Mapping[tuple[str, ...], Blocks | Halves]
    ) -> tuple[onnx.ModelProto, Arrays]:
        """Return a model, and its large constants by name."""
        apart: Arrays = {}
        return write_model(
            self._ops, self.inputs, self.outputs, self._known, self._shapes.at(sizes), sizes,
            others=self._shapes.at(others), packed=packed, caches=self.caches, apart=apart,
        ), apart  # fmt: skip
