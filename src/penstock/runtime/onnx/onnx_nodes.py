"""An ONNX graph under construction: nodes, constants, names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from penstock.runtime.onnx.blocks import Blocks, Halves

OPSET = 20
OF_ENGINE = "com.microsoft"  # ONNX Runtime's own operators
_LARGE = 2**10  # bytes of a constant that may be apart from its model
Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]
ELEMENTS: Mapping[torch.dtype, int] = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}


@dataclass(frozen=True, slots=True)
class Flat:
    """The tensor [B, S, heads * D] that has the elements of a tensor [B, S, heads, D], or `turned` [B, heads, S, D]."""

    name: str
    turned: bool


@dataclass(slots=True)
class Made:
    """A tensor of the graph: dtype and shape at the graph's size, and the value if known.

    If the graph is for several sizes, `varies` has True for each dimension that depends on them; else it is empty. If
    the tensor is the inverse of another, `inverse_of` is the other's name: engines recognize a norm by a division. If
    it only has the elements of another in another order, that one is in `flat`: some operations take that one.
    """

    nodes: "Nodes"
    dtype: torch.dtype
    shape: tuple[int, ...]
    value: Tensor | None = None
    known_as: str | None = None
    varies: tuple[bool, ...] = ()
    inverse_of: str | None = None
    flat: Flat | None = None

    @property
    def name(self) -> str:
        """Name in the graph; a known value becomes a constant at its first use, an inverse or `flat` becomes nodes."""
        if self.known_as is None:
            if self.inverse_of is not None:
                self.known_as = self.nodes.add("Reciprocal", [self.inverse_of])
            elif self.flat is not None:
                self.known_as = self._parted(self.flat)
            elif self.value is not None:
                self.known_as = self.nodes.constant(self.value)
            else:
                raise ValueError("a tensor of a graph has a name or a value")
        return self.known_as

    def _parted(self, flat: Flat) -> str:
        heads, width = self.shape[1 if flat.turned else 2], self.shape[3]
        parted = self.nodes.add("Reshape", [flat.name, self.nodes.numbers([0, 0, heads, width])])  # 0 keeps a dimension
        return self.nodes.add("Transpose", [parted], perm=[0, 2, 1, 3]) if flat.turned else parted


@dataclass(slots=True)
class Nodes:
    """The nodes of a graph so far, in order, with the constants that they use.

    Example:
        nodes = Nodes()
        hidden = nodes.add("MatMul", [x.name, nodes.constant(weight)])

    Large constants are kept in `apart`, if there is one, by their names; the model has their checksums.
    """

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    operation: str = ""  # the current operation; nodes are named after it
    # weights of linear layers, by the operations that multiply the same input
    packed: Mapping[tuple[str, ...], Blocks | Halves] = field(default_factory=dict)
    products: dict[str, str] = field(default_factory=dict)  # of operations whose weight is one with an earlier one's
    # inputs that the graph writes to, as further outputs; not `Made`, since a circle would keep all weights for long
    written: list[onnx.ValueInfoProto] = field(default_factory=list)
    made: dict[tuple[str, str], str] = field(default_factory=dict)
    apart: Arrays | None = None

    def add(self, kind: str, inputs: Sequence[str], more: Sequence[str] = (), **attributes: Any) -> str:
        """Add a node; returns its first output's name. `more` are the names of its other outputs."""
        name = f"{self.operation}/{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name, *more], name=name, **attributes))
        return name

    def once(self, what: str, of: str, make: Callable[[], str]) -> str:
        """Return a tensor that is made from another one at most once."""
        if (what, of) not in self.made:
            self.made[what, of] = make()
        return self.made[what, of]

    def packed_product(self, inputs: "Made") -> str | None:
        """Add the product of the inputs with the operation's weight, if the weight is in blocks or in 16 bits."""
        if self.operation in self.products:
            return self.products.pop(self.operation)
        names = next((names for names in self.packed if self.operation in names), ())
        if not names:
            return None
        weight = self.packed[names]
        product = self._product(inputs, weight)
        if isinstance(weight, Halves) or len(names) == 1:
            return product
        others = {name: f"{product}/{name}" for name in names if name != self.operation}
        self.products |= others
        return self.add("Split", [product, self.numbers(weight.rows)], [*others.values()], axis=-1)

    def _product(self, inputs: "Made", weight: Blocks | Halves) -> str:
        if isinstance(weight, Halves):
            wide = (self.add("Cast", [self.constant(part)], to=TensorProto.FLOAT) for part in weight.parts)
            return self.add("Concat", [self.add("MatMul", [inputs.name, part]) for part in wide], axis=-1)
        constants = (weight.values, weight.scales, weight.zeros.reshape(-1))
        product = self.add(
            "MatMulNBits",
            [inputs.name, *(self.constant(array) for array in constants)],
            domain=OF_ENGINE,
            K=weight.shape[1],
            N=weight.shape[0],
            bits=weight.bits,
            block_size=weight.block,
            accuracy_level=weight.accuracy,
        )
        if weight.shifts is None:
            return product

        def sums() -> str:
            shape = self.numbers([*[0] * (len(inputs.shape) - 1), -1, weight.block])
            return self.add("ReduceSum", [self.add("Reshape", [inputs.name, shape]), self.numbers([-1])], keepdims=0)

        blocks = self.once(f"sums of {weight.block}", inputs.name, sums)
        return self.add("Add", [product, self.add("MatMul", [blocks, self.constant(weight.shifts.T)])])

    def constant(self, value: Tensor | np.ndarray[Any, Any]) -> str:
        """Add a constant; returns its name."""
        array = value.detach().cpu().contiguous().numpy() if isinstance(value, Tensor) else value
        name = f"constant_{len(self.constants)}"
        if self.apart is None or array.nbytes < _LARGE:
            self.constants.append(numpy_helper.from_array(array, name))
            return name
        self.apart[name] = array = np.ascontiguousarray(array)
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        made = TensorProto(name=name, data_type=kind, dims=array.shape, data_location=TensorProto.EXTERNAL)
        made.external_data.add(key="location", value=f"{crc32(array.reshape(-1).view(np.uint8).data):08x}")
        self.constants.append(made)
        return name

    def writes(self, made: Made) -> None:
        """Add an input that the graph writes to as a further output."""
        self.written.append(_described(written_name(made.name), made))

    def numbers(self, values: Sequence[int]) -> str:
        """Add a constant of 64-bit integers, such as a shape or axes."""
        return self.constant(np.asarray(values, dtype=np.int64))

    def scalar(self, value: int) -> str:
        """Add a constant of one 64-bit integer without dimensions, such as an index."""
        return self.constant(np.asarray(value, dtype=np.int64))

    def model(self, inputs: Sequence[Made], outputs: Sequence[Made]) -> onnx.ModelProto:
        """Return the model; outputs are renamed in the order of `outputs`, and followed by written inputs."""
        given = [_described(x.name, x) for x in inputs]
        named = [f"output_{index}" for index in range(len(outputs))]
        ends = [
            helper.make_node("Identity", [x.name], [name], name=name) for x, name in zip(outputs, named, strict=True)
        ]
        taken = [_described(name, x) for x, name in zip(outputs, named, strict=True)]
        taken += self.written
        graph = helper.make_graph([*self.nodes, *ends], "stage", given, taken, initializer=self.constants)
        versions = [
            helper.make_opsetid("", OPSET),
            *([helper.make_opsetid(OF_ENGINE, 1)] if self.packed or self.written else []),
        ]
        return helper.make_model(graph, opset_imports=versions, ir_version=9)


def written_name(name: str) -> str:
    """Return the name of the output that stands for an input that a graph writes to."""
    return f"written:{name}"


def _described(name: str, made: Made) -> onnx.ValueInfoProto:
    shape: list[int | str] = list(made.shape)
    for axis in (axis for axis, varies in enumerate(made.varies) if varies):
        shape[axis] = f"{name}_{axis}"
    return helper.make_tensor_value_info(name, ELEMENTS[made.dtype], shape)
