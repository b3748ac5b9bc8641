"""The precision int8 of the eager runtime: linear layers' weights in 8 bits, for decoders limited by memory traffic."""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.errors import PlanError
from penstock.graph.ops import Op, Ref
from penstock.graph.program import StageProgram
from penstock.runtime.eager import Runtime
from penstock.runtime.layers import is_in_place, may_be_written, operations_of
from penstock.tensors import HOST

_LINEAR = "aten.linear.default"
_LARGEST = 127
_MULTIPLE = 32  # torch's kernel reads whole vectors, also beyond the end of a row


class Int8Runtime(Runtime):
    """A stage program whose linear layers have 8-bit weights; everything else is computed in float32.

    Each output channel of a weight has its own scale (symmetric, absolute maximum). Inputs of these layers are rounded
    to bfloat16, as torch's kernel requires; a row's result depends on that row only. Layers in `keep`, a list of module
    paths, stay in float32.

    Example:
        outputs = Int8Runtime(program, {"head.weight": weight, ...})({"batch": 1}, [tokens])

    Raises `PlanError` on a device other than the CPU; see `Runtime` for other errors.
    """

    def __init__(
        self, program: StageProgram, tensors: Mapping[str, Tensor], device: torch.device = HOST,
        keep: Sequence[str] = (),
    ) -> None:  # fmt: skip
        if device != HOST:
            raise PlanError(
                f"the runtime eager:int8 runs on the CPU only, not on {device}; use eager or eager:bfloat16"
            )
        super().__init__(program, tensors, device)
        self._kept = operations_of(program, keep)
        values = {state.value.name: state.value for state in program.states}
        read = {name for op in program.ops if (name := self._weight_of(op)) is not None and name in values}
        places = {state.value.name: index for index, state in enumerate(program.states)}
        self._weights = {
            name: quantize(self._state[places[name]]) for name in read - may_be_written(program)
            if values[name].dtype == torch.float32 and len(values[name].shape) == 2
        }  # fmt: skip
        self._rows = _Rows()
        self._again = _same_inputs(program, {op.name for op in program.ops if self._weight_of(op) in self._weights})
        for name in self._weights.keys() - self._read_elsewhere():
            # operations look up the 8-bit weight by name; nothing reads the state itself
            self._state[places[name]] = torch.empty(0).expand(values[name].evaluate({})[0], 0)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the runtime's tensors."""
        return super().weight_bytes + sum(w.nbytes + scale.nbytes for w, scale in self._weights.values())

    def copied(self) -> "Int8Runtime":
        """Return a copy with separate tensors, except for the 8-bit weights, which are never written."""
        made = copy.copy(self)
        made._state, made._bound, made._rows = [tensor.clone() for tensor in self._state], {}, _Rows()
        return made

    def _weight_of(self, op: Op) -> str | None:
        """Return the name of the weight if an operation is a linear layer in 8 bits."""
        if op.target != _LINEAR or op.name in self._kept or not isinstance(op.arguments[1], Ref):
            return None
        return op.arguments[1].name

    def _read_elsewhere(self) -> set[str]:
        """Return the names that something other than an 8-bit linear layer reads."""
        found = {value.name for value in self.program.outputs}
        for op in (*self.program.prelude, *self.program.ops):
            weight, uses = self._weight_of(op), list(op.uses())
            if weight is not None:
                uses.remove(weight)
            found.update(uses)
        return found

    def _function(self, op: Op) -> Callable[..., Any]:
        name = self._weight_of(op)
        found = self._weights.get(name) if name is not None else None
        return super()._function(op) if found is None else _linear(*found, self._rows, again=op.name in self._again)

    def _check_result(self, op: Op, sizes: Mapping[str, int], registers: list[Any]) -> None:
        name = self._weight_of(op)
        if name is None or name not in self._weights:
            super()._check_result(op, sizes, registers)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [O, I] in 8 bits, with rows padded for torch's kernel, and a bfloat16 scale for each row.

    >>> quantize(torch.tensor([[0.5, -1.0]]))[0][0, :2].tolist()
    [64, -127]
    """
    with torch.no_grad():
        scale = (weight.abs().amax(1) / _LARGEST).to(torch.bfloat16)
        scale[scale == 0] = 1.0
        # divide by the stored scale, so that its rounding does not change the weight
        rounded = (weight / scale.float()[:, None]).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
        return functional.pad(rounded, (0, -weight.shape[1] % _MULTIPLE)).contiguous(), scale


class _Rows:
    """The rows of the last linear layer's inputs in bfloat16, reused if the next layer has the same inputs."""

    def __init__(self) -> None:
        self.last = torch.empty(0)

    def of(self, inputs: Tensor, width: int) -> Tensor:
        """Return inputs [..., I] as rows [N, width], padded with zeros."""
        # there may be no elements, which makes -1 ambiguous
        rows = inputs.reshape(math.prod(inputs.shape[:-1]), inputs.shape[-1]).to(torch.bfloat16)
        missing = width - rows.shape[1]
        self.last = functional.pad(rows, (0, missing)) if missing else rows
        return self.last


def _linear(weight: Tensor, scale: Tensor, rows: _Rows, *, again: bool) -> Callable[..., Tensor]:
    """Return a linear layer in 8 bits; `again` means that it reads the same inputs as the layer before it."""
    multiply, width = torch.ops.aten._weight_int8pack_mm.default, weight.shape[1]

    def call(inputs: Tensor, _weight: Tensor, bias: Tensor | None = None) -> Tensor:
        given = rows.last if again else rows.of(inputs, width)
        result: Tensor = multiply(given, weight, scale).float().view(*inputs.shape[:-1], weight.shape[0])
        return result if bias is None else result.add_(bias)

    return call


def _same_inputs(program: StageProgram, layers: Collection[str]) -> set[str]:
    """Return the layers, by operation, with the same inputs as the layer before them, such as keys after queries."""
    found: set[str] = set()
    last: Ref | None = None
    for op in program.ops:
        if op.name in layers:
            inputs = op.arguments[0]
            if inputs == last:
                found.add(op.name)
            last = inputs if isinstance(inputs, Ref) else None
        elif is_in_place(op):
            last = None  # the operation may write into the inputs
    return found
