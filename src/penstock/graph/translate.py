"""From torch.export's program to our graph: same operations, same order, names that last."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument

from penstock.errors import CaptureError
from penstock.graph.expressions import Size
from penstock.graph.graph import Call, Graph, Output, Visit
from penstock.graph.ops import GETITEM, Op, Ref, State, Value
from penstock.graph.prepare import prepare
from penstock.graph.symbolic import from_sympy

_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}
# Checks that torch.export leaves behind; a run with other sizes is checked by us instead.
_CHECKS = {
    "aten._assert_tensor_metadata.default",
    "aten._assert_scalar.default",
    "aten._assert_async.msg",
    "aten.sym_constrain_range_for_size.default",
    "aten.sym_constrain_range.default",
}
# Regions that only switch a mode which is already as they want it when nothing is trained.
_REGIONS: dict[str, int] = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


def translate(exported: ExportedProgram, model: nn.Module, *, fixed_batch: int | None) -> Graph:
    """Turn an exported program into a graph; raises `CaptureError` for what a stage cannot run."""
    translator = _Translator(exported, model)
    translator.placeholders()
    translator.nodes(exported.graph_module, exported.graph, translator.values)
    return prepare(
        model=type(model).__name__,
        symbols=translator.symbol_names,
        inputs=tuple(translator.inputs),
        input_spec=exported.call_spec.in_spec,
        states=tuple(translator.states),
        ops=translator.ops,
        visits=translator.visits,
        values=translator.tensors,
        outputs=translator.outputs(),
        output_spec=exported.call_spec.out_spec,
        fixed_batch=fixed_batch,
        constants=translator.constants,
    )


@dataclass
class _Translator:
    exported: ExportedProgram
    model: nn.Module
    inputs: list[Value | None] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)
    tensors: dict[str, Value] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # torch's node name -> Ref, Size or constant
    constants: dict[str, Tensor] = field(default_factory=dict)
    symbols: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    @property
    def symbol_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.symbols.values()))

    def placeholders(self) -> None:
        """Sort torch's placeholders into the model's state and the user's inputs."""
        nodes = [node for node in self.exported.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(nodes, self.exported.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                self._user_input(node, spec.arg)
            elif spec.kind in _KINDS:
                self._state(node, str(spec.target), _KINDS[spec.kind])
            else:
                raise CaptureError(
                    f"{type(self.model).__name__} takes {spec.kind.name.lower()} {spec.target!r}; "
                    "only tensors and plain values can be inputs of a stage"
                )

    def _user_input(self, node: fx.Node, argument: object) -> None:
        if not isinstance(argument, TensorArgument):
            self.inputs.append(None)
            self.values[node.name] = getattr(argument, "value", None)
            return
        for dimension in node.meta["val"].shape:
            self._learn_symbol(dimension)
        self.used.add(node.name)
        value = self._value(node.name, node.meta["val"])
        self.inputs.append(value)
        self.values[node.name] = Ref(node.name)

    def _learn_symbol(self, dimension: object) -> None:
        """Give torch's symbols our names: `batch` first, then the order of appearance."""
        if isinstance(dimension, torch.SymInt) and isinstance(dimension.node.expr, sympy.Symbol):
            names = ("batch", "sequence", *(f"size{index}" for index in range(2, 99)))
            self.symbols.setdefault(dimension.node.expr.name, names[len(self.symbols)])

    def _state(self, node: fx.Node, source: str, kind: Any) -> None:
        value = self._value(source, node.meta["val"])
        if kind != "parameter":
            self.constants[source] = self._constant(source, kind)
        if source not in self.tensors or all(state.value.name != source for state in self.states):
            self.states.append(State(value=value, source=source, kind=kind))
        self.used.add(source)
        self.values[node.name] = Ref(source)

    def _constant(self, source: str, kind: str) -> Tensor:
        if kind == "buffer":
            return self.model.get_buffer(source)
        constant = self.exported.constants[source]
        if not isinstance(constant, Tensor):
            raise CaptureError(f"the constant {source!r} is a {type(constant).__name__}; only tensors can be shipped")
        return constant

    def nodes(self, owner: fx.GraphModule, graph: fx.Graph, values: dict[str, Any], outer: Sequence[Call] = ()) -> None:
        """Translate every call of a graph, in order."""
        for node in graph.nodes:
            if node.op == "get_attr":
                values[node.name] = self._attribute(owner, node)
            elif node.op == "call_function":
                self._call(owner, node, values, outer)

    def _attribute(self, owner: fx.GraphModule, node: fx.Node) -> Any:
        target = operator.attrgetter(str(node.target))(owner)
        if isinstance(target, Tensor):
            source = str(node.target)
            self.constants[source] = target
            value = self._value(source, target)
            self.states.append(State(value=value, source=source, kind="constant"))
            return Ref(source)
        return target

    def _call(self, owner: fx.GraphModule, node: fx.Node, values: dict[str, Any], outer: Sequence[Call]) -> None:
        calls = _module_calls(node) or tuple(outer)
        name = getattr(node.target, "__name__", str(node.target))
        if name in _REGIONS and isinstance(node.target, torch._ops.HigherOrderOperator):
            self._region(node, values, calls, _REGIONS[name])
            return
        scalar = self._scalar(node)
        if scalar is not None:
            values[node.name] = scalar
            return
        target = self._target(node)
        if target in _CHECKS:
            return
        arguments = tuple(self._argument(item, values) for item in node.args)
        keywords = {key: self._argument(item, values) for key, item in node.kwargs.items()}
        if _is_idle(target, arguments, keywords):
            values[node.name] = arguments[0]
            self.visits.append(Visit(calls=calls, op=None, position=len(self.ops)))
            return
        if target == GETITEM and not isinstance(arguments[0], Ref):
            values[node.name] = arguments[0][arguments[1]]
            return
        op_name = self._unique(node.name)
        self._record(op_name, node.meta.get("val"))
        self.visits.append(Visit(calls=calls, op=op_name, position=len(self.ops)))
        self.ops.append(Op(name=op_name, target=target, arguments=arguments, keywords=keywords))
        values[node.name] = Ref(op_name)

    def _region(self, node: fx.Node, values: dict[str, Any], calls: tuple[Call, ...], num_settings: int) -> None:
        """Put a region's operations in line: its mode makes no difference to a forward pass here."""
        settings = [self._argument(item, values) for item in node.args[:num_settings]]
        if len(settings) == 4 and settings[0] == "cpu" and settings[2]:
            raise CaptureError(
                f"{type(self.model).__name__} switches autocast on inside its forward pass; "
                "take autocast out of the model and convert it to the wanted dtype instead"
            )
        body = values[node.args[num_settings].name]  # type: ignore[union-attr]
        operands = [self._argument(item, values) for item in node.args[num_settings + 1 :]]
        inner: dict[str, Any] = {}
        placeholders = [inside for inside in body.graph.nodes if inside.op == "placeholder"]
        inner.update({inside.name: operand for inside, operand in zip(placeholders, operands, strict=True)})
        self.nodes(body, body.graph, inner, calls)
        result = next(inside for inside in body.graph.nodes if inside.op == "output").args[0]
        values[node.name] = [self._argument(item, inner) for item in result]

    def _scalar(self, node: fx.Node) -> Any:
        """Give a size as an expression where it follows from the inputs' sizes."""
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            expression = from_sympy(value.node.expr, self.symbols)
            if expression is not None:
                return Size(expression) if not isinstance(expression, (int, float)) else expression
            raise CaptureError(
                f"{type(self.model).__name__} computes the size {value} from data at {node.name}; "
                "a stage can only know sizes that follow from its inputs' sizes"
            )
        if isinstance(value, (bool, int, float)):
            return value
        return None

    def _target(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return GETITEM
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
            return str(node.target)
        raise CaptureError(
            f"{type(self.model).__name__} uses the operator {node.target} at {node.name}; "
            "a stage runs only PyTorch's own (aten) operators"
        )

    def _argument(self, item: Any, values: Mapping[str, Any]) -> Any:
        if isinstance(item, fx.Node):
            return values[item.name]
        if isinstance(item, (list, tuple)):
            return [self._argument(inner, values) for inner in item]
        if isinstance(item, slice):
            raise CaptureError(f"{type(self.model).__name__} passes a slice object to an operator")
        if isinstance(item, torch.SymInt):
            expression = from_sympy(item.node.expr, self.symbols)
            return Size(expression) if expression is not None else item
        return item

    def _record(self, name: str, meta: object) -> None:
        if isinstance(meta, Tensor):
            self._value(name, meta)

    def _value(self, name: str, meta: Tensor) -> Value:
        shape = tuple(self._dimension(name, dimension) for dimension in meta.shape)
        value = Value(name=name, dtype=meta.dtype, shape=shape)
        self.tensors[name] = value
        return value

    def _dimension(self, name: str, dimension: int | torch.SymInt) -> int | Size:
        if isinstance(dimension, int):
            return dimension
        expression = from_sympy(dimension.node.expr, self.symbols)
        if expression is None:
            raise CaptureError(
                f"{type(self.model).__name__} makes {name} with a size that depends on data ({dimension}); "
                "a stage can only know sizes that follow from its inputs' sizes"
            )
        return expression if isinstance(expression, int) else Size(expression)

    def _unique(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self.used:
            candidate, count = f"{name}_r{count}", count + 1
        self.used.add(candidate)
        return candidate

    def outputs(self) -> tuple[Output, ...]:
        """Give what the model returns, flat: values, sizes or constants."""
        result = next(node for node in self.exported.graph.nodes if node.op == "output").args[0]
        given = [self._argument(item, self.values) for item in result]
        specs = self.exported.graph_signature.output_specs
        kept: list[Output] = []
        for item, spec in zip(given, specs, strict=True):
            if spec.kind.name != "USER_OUTPUT":
                continue  # a mutated buffer's new value: the operation that writes it is in the graph
            kept.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else item)
        return tuple(kept)


def _is_idle(target: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Tell whether a call hands back its input: dropout in evaluation."""
    if target.split(".")[1] not in {"dropout", "feature_dropout", "alpha_dropout"}:
        return False
    given = [*arguments, *keywords.values()]
    return len(given) == 3 and given[2] is False


def _module_calls(node: fx.Node) -> tuple[Call, ...]:
    """Read the chain of modules that a node was called in, outermost first."""
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    calls = []
    for key, (path, kind) in stack.items():
        if not path or path.startswith("_empty_nn_module_stack"):
            continue
        _, _, repeat = key.partition("@")
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        calls.append(Call(path=f"{path}@{repeat}" if repeat else path, kind=name.rsplit(".", 1)[-1]))
    return tuple(calls)
