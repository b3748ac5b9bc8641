"""Stage programs as ONNX models, one for each microbatch size, for an engine to run; bounds of their integers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from penstock.errors import PlanError, RunError
from penstock.graph.ops import Op, Ref
from penstock.graph.program import StageProgram, operations_of
from penstock.runtime.bfloat16 import check_bfloat16
from penstock.runtime.eager import Runtime, compare_outputs
from penstock.runtime.onnx.blocks import pack, products_of_one_input
from penstock.runtime.onnx.writer import check_supported, write_model
from penstock.tensors import HOST
from penstock.text import first_line
from penstock.values import Value

_KEPT_SIZES = 4  # sessions have their own copies of the weights
_MOST_BYTES = 2**31 - 2**20  # protobuf's limit for a model
Engine = Callable[[Mapping[str, np.ndarray[Any, Any]]], Sequence[np.ndarray[Any, Any]]]
# writes to caches and outputs; see `CachingEngine`
InPlaceEngine = Callable[
    [Hashable | None, Mapping[str, np.ndarray[Any, Any]], Callable[[], Mapping[str, Tensor]], Sequence[Tensor]], None
]
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


class ExportedRuntime(ABC):
    """A stage program as ONNX models with weights, run by an engine on the CPU; outputs are contiguous.

    The first microbatch of each size is also run eagerly, to determine every shape and to compare the outputs.

    Raises `PlanError` for an operator without an ONNX equivalent, and on other devices than the CPU.
    """

    name = ""
    integers_of_32_bits = False

    def __init__(
        self,
        program: StageProgram,
        tensors: Mapping[str, Tensor],
        device: torch.device = HOST,
        precision: str = "float32",
        keep: Sequence[str] = (),
    ) -> None:
        if device != HOST:
            raise PlanError(
                f"the runtime {self.name} computes only on the CPU, but the device is {device}; use the runtime eager"
            )
        if precision == "bfloat16":
            check_bfloat16()  # without bfloat16 instructions engines silently compute in float32
        check_supported(program)
        self.program, self.device = program, device
        self.precision = precision
        self.kept = operations_of(program, keep)
        rounded = pack(program.ops, tensors, 4 if precision == "int4" else None, self.kept)
        products = products_of_one_input(program.ops, rounded)
        self._packed = {names: weight.blocks() for names, weight in products.items()}
        self._eager = Runtime(program, tensors, device)
        self._engines: dict[tuple[int, ...], Engine] = {}

    @abstractmethod
    def _compile(self, model: onnx.ModelProto) -> Engine:
        """Return a function that runs a model: from arrays by input name to the outputs in order."""

    def __call__(self, sizes: Mapping[str, int], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on one microbatch; `sizes` has a value for every symbol of the program."""
        key = tuple(sizes[symbol] for symbol in self.program.symbols)
        engine = self._engines.get(key)
        if engine is None:
            if len(self._engines) >= _KEPT_SIZES:
                self._engines.pop(next(iter(self._engines)))
            engine = self._engines[key] = self._open(sizes, inputs)
        return self._run(engine, inputs)

    @torch.no_grad()
    def _open(self, sizes: Mapping[str, int], inputs: Sequence[Tensor]) -> Engine:
        # a program may write into its inputs
        expected, seen = self._eager.likes(sizes, [tensor.detach().clone() for tensor in inputs])
        known = self._eager.constants(sizes)
        if self.integers_of_32_bits:
            check_integers(self.name, self.program, known, seen)
        given, taken = ([value.name for value in values] for values in (self.program.inputs, self.program.outputs))
        model = write_model(self.program.ops, given, taken, known, seen, sizes, packed=self._packed)
        if model.ByteSize() > _MOST_BYTES:
            raise PlanError(
                f"a stage of the runtime {self.name} must have at most 2 GiB; plan with more stages, or eager"
            )
        try:
            engine = self._compile(model)
        # the packages' errors have no common base class except Exception
        except Exception as error:
            raise RunError(f"the runtime {self.name} refuses the stage: {first_line(error)}") from error
        if self.precision == "float32":
            compare_outputs(self.name, self.program.outputs, expected, self._run(engine, inputs))
        return engine

    def _run(self, engine: Engine, inputs: Sequence[Tensor]) -> list[Tensor]:
        if self.integers_of_32_bits:
            check_inputs(self.name, self.program.inputs, inputs)
        given = {
            value.name: tensor.detach().contiguous().numpy()
            for value, tensor in zip(self.program.inputs, inputs, strict=True)
        }
        try:
            return [torch.from_numpy(array) for array in engine(given)]
        except Exception as error:
            raise RunError(f"the runtime {self.name} failed: {first_line(error)}") from error

    def watched(
        self, sizes: Mapping[str, int], inputs: Sequence[Tensor], _clock: Callable[[], float]
    ) -> tuple[list[Tensor], list[float]]:
        """Run on one microbatch; single operations cannot be timed."""
        return self(sizes, inputs), []

    def own(self, outputs: Sequence[Tensor], _sizes: Mapping[str, int]) -> list[Tensor]:
        """Return outputs that the caller may write to: each run makes its own."""
        return list(outputs)

    def copied(self) -> None:
        """Return None: it cannot be copied."""
        return

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the runtime's tensors."""
        return self._eager.weight_bytes


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
    packet = op.packet
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
