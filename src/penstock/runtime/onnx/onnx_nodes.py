"""An ONNX graph as it is written: nodes, constants, names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

OPSET = 20
ELEMENTS: Mapping[torch.dtype, int] = {
    torch.float32: TensorProto.FLOAT, torch.float64: TensorProto.DOUBLE, torch.float16: TensorProto.FLOAT16,
    torch.int64: TensorProto.INT64, torch.int32: TensorProto.INT32, torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8, torch.uint8: TensorProto.UINT8, torch.bool: TensorProto.BOOL,
}  # fmt: skip


@dataclass(slots=True)
class Made:
    """A tensor of the graph: its dtype and shape at the graph's size, and its value if known."""

    nodes: "Nodes"
    dtype: torch.dtype
    shape: tuple[int, ...]
    value: Tensor | None = None
    known_as: str | None = None

    @property
    def name(self) -> str:
        """Its name in the graph; a known value becomes a constant at its first use."""
        if self.known_as is None:
            if self.value is None:
                raise ValueError("a tensor of a graph has a name or a value")
            self.known_as = self.nodes.constant(self.value)
        return self.known_as


@dataclass(slots=True)
class Nodes:
    """The nodes of a graph so far, in order, with the constants that they use.

    Example:
        nodes = Nodes()
        hidden = nodes.add("MatMul", [x.name, nodes.constant(weight)])
    """

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    operation: str = ""  # that is written; its nodes are named after it

    def add(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node with one output; returns the output's name."""
        name = f"{self.operation}/{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: Tensor | np.ndarray[Any, Any]) -> str:
        """Add a constant; returns its name."""
        array = value.detach().cpu().contiguous().numpy() if isinstance(value, Tensor) else value
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def numbers(self, values: Sequence[int]) -> str:
        """Add a constant of 64-bit integers, such as a shape or axes."""
        return self.constant(np.asarray(values, dtype=np.int64))

    def model(self, inputs: Sequence[Made], outputs: Sequence[Made]) -> onnx.ModelProto:
        """Return the model; outputs are renamed in the order of `outputs`."""
        given = [helper.make_tensor_value_info(x.name, ELEMENTS[x.dtype], x.shape) for x in inputs]
        named = [f"output_{index}" for index in range(len(outputs))]
        ends = [
            helper.make_node("Identity", [x.name], [name], name=name) for x, name in zip(outputs, named, strict=True)
        ]
        taken = [
            helper.make_tensor_value_info(name, ELEMENTS[x.dtype], x.shape)
            for x, name in zip(outputs, named, strict=True)
        ]
        graph = helper.make_graph([*self.nodes, *ends], "stage", given, taken, initializer=self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
