"""A decoder's stage on an engine: the operations between the caches of two layers are one ONNX model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import onnx
import torch
from torch import Tensor

from penstock.errors import PlanError
from penstock.graph.callbacks import Callback
from penstock.graph.ops import CALLBACK, GETITEM, Op, Ref
from penstock.graph.program import StageProgram
from penstock.runtime.bfloat16 import check_bfloat16
from penstock.runtime.eager import Runtime
from penstock.runtime.layers import may_be_written, operations_of
from penstock.runtime.onnx.blocks import Blocks, pack, weight_of
from penstock.runtime.onnx.exported import Engine
from penstock.runtime.onnx.phases import phases_of
from penstock.runtime.onnx.value_shapes import Shapes
from penstock.runtime.onnx.writer import write_model
from penstock.tensors import HOST
from penstock.values import BATCH, Size

BITS: Mapping[str, int] = {"int8": 8, "int4": 4}


class JoinedRuntime(Runtime):
    """A stage program with caches; an engine runs the operations between the caches, torch runs the others.

    `compile_model` makes an engine from an ONNX model. With the precision `int8` or `int4`, weights of linear layers
    are rounded in blocks (see `blocks.py`), except in the layers `keep`.

    Example:
        runtime = JoinedRuntime(program, tensors, compile_model=compile_model, precision="int4")
        (logits,) = runtime({"batch": 1, "step": 1, ...}, [ids, positions, ...])

    Raises `PlanError` on a device other than the CPU.
    """

    def __init__(
        self, program: StageProgram, tensors: Mapping[str, Tensor], device: torch.device = HOST, *,
        compile_model: Callable[[onnx.ModelProto], Engine], precision: str = "float32", keep: Sequence[str] = (),
        name: str = "onnxruntime",
    ) -> None:  # fmt: skip
        if device != HOST:
            raise PlanError(
                f"the runtime {name} computes only on the CPU, but the device is {device}; use the runtime eager"
            )
        if precision == "bfloat16":
            check_bfloat16()
        shapes = Shapes(program)
        phases = phases_of(program, shapes)
        of_engine = [op for ops in phases[1::2] for op in ops]
        packed = pack(of_engine, tensors, BITS.get(precision), operations_of(program, keep))
        self._parts = [
            _Part(f"joined_{index}", program, ops, tensors, shapes, packed, compile_model)
            for index, ops in enumerate(phases[1::2])
        ]
        # the runtime calls an engine like a function of the caller in training
        calls = [Callback(name=part.name, run=part) for part in self._parts]
        joined = replace(program, ops=tuple(self._order(program, phases)), callbacks=calls)
        super().__init__(joined, tensors, device)
        read = {name for op in (*joined.prelude, *joined.ops) for name in op.uses()}
        for index, state in enumerate(joined.states):
            if state.value.name not in read:  # engines have their own copies
                self._state[index] = torch.empty(0)

    def _order(self, program: StageProgram, phases: Sequence[Sequence[Op]]) -> Iterator[Op]:
        """Yield torch's operations, and one call for the operations of each engine."""
        sizes = [Size(symbol) for symbol in program.symbols]
        for number, ops in enumerate(phases):
            if number % 2 == 0:
                yield from ops
                continue
            part = self._parts[number // 2]
            yield Op(part.name, CALLBACK, ([Ref(name) for name in part.inputs], sizes, number // 2), {})
            for index, name in enumerate(part.outputs):
                yield Op(name, GETITEM, (Ref(part.name), index), {})

    @property
    def weight_bytes(self) -> int:
        """Bytes of the runtime's tensors."""
        return super().weight_bytes + sum(part.weight_bytes for part in self._parts)

    def copied(self) -> None:  # type: ignore[override]
        """Return None: it cannot be copied."""

    def watched(
        self, sizes: Mapping[str, int], inputs: Sequence[Tensor], _clock: Callable[[], float]
    ) -> tuple[list[Tensor], list[float]]:
        """Run on one microbatch; single operations cannot be timed."""
        return self(sizes, inputs), []


class _Part:
    """Operations that an engine runs as one model; one engine serves all sizes if their models are equal."""

    def __init__(
        self, name: str, program: StageProgram, ops: Sequence[Op], tensors: Mapping[str, Tensor], shapes: Shapes,
        packed: Mapping[str, Blocks], compile_model: Callable[[onnx.ModelProto], Engine],
    ) -> None:  # fmt: skip
        self.name, self._ops, self._symbols = name, ops, program.symbols
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
        self._engines: dict[tuple[int, ...], Engine] = {}
        self._for_all: dict[int, Engine] = {}  # by batch

    def __call__(self, tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
        key = tuple(sizes)
        engine = self._engines.get(key)
        if engine is None:
            engine = self._engines[key] = self._open(dict(zip(self._symbols, sizes, strict=True)))
        given = {name: x.contiguous().numpy() for name, x in zip(self.inputs, tensors, strict=True)}
        return [torch.from_numpy(array) for array in engine(given)]

    def _open(self, sizes: Mapping[str, int]) -> Engine:
        """Return an engine for these sizes; it serves all sizes with this batch if their models are equal."""
        batch = sizes[BATCH]
        if batch in self._for_all:
            return self._for_all[batch]
        others = {symbol: size if symbol == BATCH else size + 1 for symbol, size in sizes.items()}
        model, other = self._written(sizes, others), self._written(others, sizes)
        if model.SerializeToString(deterministic=True) == other.SerializeToString(deterministic=True):
            engine = self._for_all[batch] = self._compile(model)
            return engine
        return self._compile(self._written(sizes, sizes))

    def _written(self, sizes: Mapping[str, int], others: Mapping[str, int]) -> onnx.ModelProto:
        return write_model(
            self._ops, self.inputs, self.outputs, self._known, self._shapes.at(sizes), sizes,
            others=self._shapes.at(others), packed=self._packed,
        )  # fmt: skip

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        plain = sum(x.nbytes for x in self._known.values() if x.device == HOST)
        return plain + sum(x.nbytes for x in self._packed.values())
