"""The precision bfloat16 of the eager runtime: products in 16 bits, everything else unchanged."""

import operator
import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PlanError
from penstock.graph.ops import Op, Ref
from penstock.graph.program import StageProgram, may_be_written
from penstock.resources import processor_features
from penstock.runtime.eager import Runtime
from penstock.tensors import HOST

# most of a model's work; processors have instructions for these
_PRODUCTS = frozenset({
    "aten.linear.default", "aten.addmm.default", "aten.mm.default", "aten.bmm.default", "aten.matmul.default",
    "aten.baddbmm.default", "aten.conv1d.default", "aten.conv2d.default", "aten.conv2d.padding",
    "aten.convolution.default",
})  # fmt: skip
_ATTENTION = "aten.scaled_dot_product_attention.default"
_FLAGS = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}  # the last on ARM


class Bfloat16Runtime(Runtime):
    """A stage program that computes products in bfloat16 and returns float32, so that cuts do not change outputs.

    Weights that only products read are kept in 16 bits; weights that other operations also read, in both precisions.

    Example:
        outputs = Bfloat16Runtime(program, {"head.weight": weight, ...})({"batch": 1}, [image])

    Raises `PlanError` if the processor has no instructions for bfloat16; see `Runtime` for other errors.
    """

    def __init__(self, program: StageProgram, tensors: Mapping[str, Tensor], device: torch.device = HOST) -> None:
        if device == HOST:
            check_bfloat16()
        super().__init__(program, tensors, device)
        halved = read_by_products(program)
        read = {name for op in program.ops if is_product(op) for name in op.uses()}
        written = may_be_written(program)
        # weights that other operations also read, as tied embeddings, are kept twice: rounding at each call is slow
        self._halves = {
            state.value.name: tensor.to(torch.bfloat16)
            for state, tensor in zip(program.states, self._state, strict=True)
            if state.value.name in read - halved - written and tensor.dtype == torch.float32
        }
        self._state = [
            tensor.to(torch.bfloat16) if state.value.name in halved and tensor.dtype == torch.float32 else tensor
            for state, tensor in zip(program.states, self._state, strict=True)
        ]

    def copied(self) -> "Bfloat16Runtime":
        """Return a copy with separate tensors."""
        pairs = zip(self.program.states, self._state, strict=True)
        tensors = {state.value.name: tensor.to(state.value.dtype, copy=True) for state, tensor in pairs}
        return Bfloat16Runtime(self.program, tensors, self.device)

    def _function(self, op: Op) -> Callable[..., Any]:
        function = super()._function(op)
        if not is_product(op):
            return function
        halves = {
            position: self._halves[argument.name]
            for position, argument in enumerate(op.arguments)
            if isinstance(argument, Ref) and argument.name in self._halves
        }
        return _in_bfloat16(function, halves)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the runtime's tensors."""
        return super().weight_bytes + sum(tensor.nbytes for tensor in self._halves.values())


def is_product(op: Op) -> bool:
    """Return True if an operation is computed in bfloat16.

    Attention with a mask is not: masks contain numbers that bfloat16 rounds to infinity.
    """
    if op.target != _ATTENTION:
        return op.target in _PRODUCTS
    masks = [*op.arguments[3:4], op.keywords.get("attn_mask")]
    return not any(isinstance(mask, Ref) for mask in masks)


def check_bfloat16() -> None:
    """Raise `PlanError` if the processor has no instructions for bfloat16."""
    if not has_bfloat16():
        raise PlanError(
            "the precision bfloat16 needs a processor with such instructions (avx512_bf16, amx_bf16, or bf16 on "
            f"ARM), which this {platform.machine()} does not have; plan with float32 or onnxruntime:int8"
        )


def has_bfloat16() -> bool:
    """Return True if this machine's processor multiplies in bfloat16, or does not report its features."""
    features = processor_features()
    return not features or bool(features & _FLAGS)


def read_by_products(program: StageProgram) -> set[str]:
    """Return the names of the states that only products read.

    Example:
        read_by_products(program)       # {'blocks.0.mlp.fc1.weight', ...}
    """
    others = {value.name for value in program.outputs}
    products: set[str] = set()
    for op in (*program.prelude, *program.ops):
        (products if is_product(op) else others).update(op.uses())
    return {state.value.name for state in program.states} & products - others


def _in_bfloat16(function: Callable[..., Any], halves: Mapping[int, Tensor]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        given = [halves[i] if i in halves else _rounded(argument) for i, argument in enumerate(arguments)]
        result = function(*given, **keywords)
        return result if all(map(operator.is_, given, arguments)) else result.float()

    return call


def _rounded(argument: Any) -> Any:
    if isinstance(argument, Tensor) and argument.dtype == torch.float32:
        return argument.to(torch.bfloat16)
    return argument
