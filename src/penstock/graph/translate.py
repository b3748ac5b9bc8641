"""Translation of torch.export's program to a graph: the same operations in the same order, with stable names."""

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
from penstock.graph.callbacks import Callback
from penstock.graph.decoders import check_steps, is_cache, share_heads
from penstock.graph.exporting import place_of
from penstock.graph.graph import Call, Graph, Output, Plain, Visit
from penstock.graph.live_module import Reads
from penstock.graph.operators import ALLOW, how_imported, is_allowed_here
from penstock.graph.ops import CALLBACK, GETITEM, STAGE_DEVICE, Op, Ref, State, returned_argument
from penstock.graph.prepare import prepare
from penstock.values import Expression, Size, Value

# torch's sympy functions, by class name, since their module is private
_FUNCTIONS = {
    "Add": "+", "Mul": "*", "Pow": "**", "PowByNatural": "**", "FloorDiv": "//", "CleanDiv": "//", "IntTrueDiv": "/",
    "FloatTrueDiv": "/", "Mod": "%", "PythonMod": "%", "Max": "max", "Min": "min",
}  # fmt: skip


def is_idle(target: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Return True if a call returns its input unchanged, like dropout in evaluation."""
    if target.split(".")[1] not in {"dropout", "feature_dropout", "alpha_dropout"}:
        return False
    given = [*arguments, *keywords.values()]
    return len(given) == 3 and given[2] is False


def module_calls(node: fx.Node) -> tuple[Call, ...]:
    """Return the chain of modules in which a node was called, outermost first."""
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    calls = []
    for key, (path, kind) in stack.items():
        if not path or path.startswith("_empty_nn_module_stack"):
            continue
        _, _, repeat = key.partition("@")
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        calls.append(Call(path=f"{path}@{repeat}" if repeat else path, kind=name.rsplit(".", 1)[-1]))
    return tuple(calls)


def from_sympy(expression: sympy.Basic, symbols: Mapping[str, str]) -> Expression | None:
    """Convert a symbolic size to an expression over named symbols, or None if it depends on data.

    `symbols` maps torch's names, such as `s77`, to this graph's, such as `batch`.
    """
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, (sympy.Float, sympy.Rational)):
        return float(expression)
    if isinstance(expression, sympy.Symbol):
        return symbols.get(expression.name)
    name = _FUNCTIONS.get(type(expression).__name__)
    if type(expression).__name__ == "ToFloat":
        return from_sympy(expression.args[0], symbols)
    if name is None:
        return None
    operands = [from_sympy(argument, symbols) for argument in expression.args]
    if any(operand is None for operand in operands):
        return None
    return (name, *[operand for operand in operands if operand is not None])


_KINDS = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "constant"}
# checks inserted by torch.export; Penstock checks other sizes itself
_CHECKS = {
    "aten._assert_tensor_metadata.default",
    "aten._assert_scalar.default",
    "aten._assert_async.msg",
    "aten.sym_constrain_range_for_size.default",
    "aten.sym_constrain_range.default",
}
_SHAPED = {"aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"}
# regions that only switch a mode, with their number of settings
_REGIONS: dict[str, int] = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


def translate(
    exported: ExportedProgram,
    model: nn.Module,
    labels: Sequence[Sequence[str | None]],
    *,
    fixed_batch: int | None,
    callbacks: Sequence[Callback] = (),
    left: Mapping[str, Any] | None = None,
    reads: Reads | None = None,
) -> Graph:
    """Translate an exported program to a graph; raises `CaptureError` for operations that a stage cannot run.

    `labels` has, for every input in the order of the call, the symbol of each dimension.
    """
    translator = _Translator(exported, model, labels)
    translator.placeholders()
    translator.nodes(exported.graph_module, exported.graph, translator.values)
    outputs = translator.outputs()
    translated = Graph(
        model=type(model).__name__, symbols=tuple(dict.fromkeys(translator.symbols.values())),
        inputs=tuple(translator.inputs), plain_inputs=translator.plain_inputs, input_spec=exported.call_spec.in_spec,
        states=tuple(translator.states), prelude=(), ops=tuple(translator.ops), visits=tuple(translator.visits),
        values=translator.tensors, outputs=outputs, output_spec=exported.call_spec.out_spec,
        fixed_batch=fixed_batch, constants=translator.constants, forbidden={},
        callbacks=callbacks, left=left or {}, reads=reads or {},
    )  # fmt: skip
    if not translated.keeps_caches:
        return prepare(translated)
    prepared = prepare(share_heads(translated))
    check_steps(prepared)
    return prepared


@dataclass
class _Translator:
    exported: ExportedProgram
    model: nn.Module
    labels: Sequence[Sequence[str | None]]
    plain_inputs: dict[int, Plain] = field(default_factory=dict)
    inputs: list[Value | None] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)
    tensors: dict[str, Value] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # torch's node name -> Ref, Size or constant
    constants: dict[str, Tensor] = field(default_factory=dict)
    symbols: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    first_names: dict[str, str] = field(default_factory=dict)  # for tensors with several names, such as tied weights
    no_grad: bool = False  # inside a region without gradients, in training

    def __post_init__(self) -> None:
        first: dict[Tensor, str] = {}
        for tensors in (self.model.named_parameters, self.model.named_buffers):
            for name, tensor in tensors(remove_duplicate=False):
                self.first_names[name] = first.setdefault(tensor, name)

    def placeholders(self) -> None:
        """Separate torch's placeholders into the model's state and the user's inputs."""
        nodes = [node for node in self.exported.graph.nodes if node.op == "placeholder"]
        specs = self.exported.graph_signature.input_specs
        # inputs keep their names; state with the same name is renamed
        self.used |= {node.name for node, spec in zip(nodes, specs, strict=True) if spec.kind is InputKind.USER_INPUT}
        for node, spec in zip(nodes, specs, strict=True):
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
        position = len(self.inputs)
        if isinstance(argument, ConstantArgument):
            self.inputs.append(None)
            self.plain_inputs[position] = Plain(name=node.name, value=argument.value)
            self.values[node.name] = argument.value
            return
        if not isinstance(argument, TensorArgument):
            raise CaptureError(
                f"{type(self.model).__name__} takes {node.name} as a {type(argument).__name__}; "
                "only tensors and plain values can be inputs of a stage"
            )
        for dimension, label in zip(node.meta["val"].shape, self.labels[position], strict=False):
            if isinstance(dimension, torch.SymInt) and isinstance(dimension.node.expr, sympy.Symbol) and label:
                self.symbols.setdefault(dimension.node.expr.name, label)
        self.inputs.append(self._value(node.name, node.meta["val"]))
        self.values[node.name] = Ref(node.name)

    def _state(self, node: fx.Node, source: str, kind: Any) -> None:
        source = self.first_names.get(source, source)
        if kind == "buffer" and is_cache(self.model, source):
            kind = "cache"
        elif kind != "parameter":
            self.constants[source] = self._constant(source, kind)
        self.values[node.name] = self._add_state(source, node.meta["val"], kind)

    def _add_state(self, source: str, meta: Tensor, kind: Any) -> Ref:
        """Add a tensor of the model, once for all its uses."""
        known = next((state.value.name for state in self.states if state.source == source), None)
        name = known or self._unique(source)
        if known is None:
            requires_grad = kind == "parameter" and self.model.get_parameter(source).requires_grad
            self.states.append(
                State(value=self._value(name, meta), source=source, kind=kind, requires_grad=requires_grad)
            )
        return Ref(name)

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
                self._call(node, values, outer)

    def _attribute(self, owner: fx.GraphModule, node: fx.Node) -> Any:
        target = operator.attrgetter(str(node.target))(owner)
        if isinstance(target, Tensor):
            source = str(node.target)
            while source in self.constants and self.constants[source] is not target:
                source += "_"  # every region numbers its constants from 0
            self.constants[source] = target
            return self._add_state(source, target, "constant")
        return target

    def _call(self, node: fx.Node, values: dict[str, Any], outer: Sequence[Call]) -> None:
        calls = module_calls(node) or tuple(outer)
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
        if is_idle(target, arguments, keywords):
            values[node.name] = arguments[0]
            self.visits.append(Visit(calls=calls, op=None, position=len(self.ops)))
            return
        if target in _SHAPED and -1 in arguments[1]:  # -1 is ambiguous for tensors without elements
            shape = [self._dimension(node.name, size) for size in node.meta["val"].shape]
            arguments = (arguments[0], [shape[at] if size == -1 else size for at, size in enumerate(arguments[1])])
        if target == GETITEM and not isinstance(arguments[0], Ref):
            values[node.name] = arguments[0][arguments[1]]
            return
        op_name = self._unique(node.name)
        if isinstance(node.meta.get("val"), Tensor):
            self._value(op_name, node.meta["val"])
        self.visits.append(Visit(calls=calls, op=op_name, position=len(self.ops)))
        op = Op(name=op_name, target=target, arguments=arguments, keywords=keywords, no_grad=self.no_grad)
        self.ops.append(op)
        # without gradients, export writes to a parameter through an alias
        written = returned_argument(op) if self.no_grad else None
        values[node.name] = written if isinstance(written, Ref) else Ref(op_name)

    def _region(self, node: fx.Node, values: dict[str, Any], calls: tuple[Call, ...], num_settings: int) -> None:
        """Inline a region's operations; in training, mark those without gradients."""
        settings = [self._argument(item, values) for item in node.args[:num_settings]]
        if len(settings) == 4 and settings[0] == "cpu" and settings[2]:
            raise CaptureError(
                f"{type(self.model).__name__} switches autocast on inside its forward pass; "
                "take autocast out of the model and convert it to the wanted dtype instead"
            )
        body = self._argument(node.args[num_settings], values)
        operands = [self._argument(item, values) for item in node.args[num_settings + 1 :]]
        placeholders = (inside.name for inside in body.graph.nodes if inside.op == "placeholder")
        inner: dict[str, Any] = dict(zip(placeholders, operands, strict=True))
        outside = self.no_grad
        if num_settings == 1:
            self.no_grad = self.model.training and not settings[0]
        self.nodes(body, body.graph, inner, calls)
        self.no_grad = outside
        result = next(inside for inside in body.graph.nodes if inside.op == "output").args[0]
        values[node.name] = [self._argument(item, inner) for item in result]

    def _scalar(self, node: fx.Node) -> Any:
        """Return a size as an expression of the inputs' sizes."""
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            expression = from_sympy(value.node.expr, self.symbols)
            if expression is not None:
                return Size(expression) if not isinstance(expression, (int, float)) else expression
            raise CaptureError(
                f"{type(self.model).__name__} takes a number from the values of a tensor{place_of(node)}; compute with "
                "the tensor instead of item(); sizes in a stage must follow from its inputs' sizes"
            )
        return value if isinstance(value, (bool, int, float)) else None

    def _target(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return GETITEM
        if isinstance(node.target, torch._ops.OpOverload):
            target = str(node.target)
            if node.target.namespace == "aten" or target == CALLBACK or is_allowed_here(target):
                return target
        raise CaptureError(
            f"{type(self.model).__name__} uses the operator {node.target}{place_of(node)}; a stage runs PyTorch's own "
            f"(aten) operators, and those that each process allows, by {ALLOW}={node.target}"
            f"{how_imported(str(node.target))}"
        )

    def _argument(self, item: Any, values: Mapping[str, Any]) -> Any:
        if isinstance(item, fx.Node):
            return values[item.name]
        if isinstance(item, (list, tuple)):
            return [self._argument(inner, values) for inner in item]
        if isinstance(item, torch.device):
            return STAGE_DEVICE
        if isinstance(item, slice):
            raise CaptureError(f"{type(self.model).__name__} passes a slice object to an operator")
        if isinstance(item, torch.SymInt):
            expression = from_sympy(item.node.expr, self.symbols)
            return Size(expression) if expression is not None else item
        return item

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
                f"{type(self.model).__name__} makes {name} with a size that depends on data ({dimension}); sizes in "
                "a stage must follow from its inputs' sizes"
            )
        return expression if isinstance(expression, int) else Size(expression)

    def _unique(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self.used:
            candidate, count = f"{name}_r{count}", count + 1
        self.used.add(candidate)
        return candidate

    def outputs(self) -> tuple[Output, ...]:
        """Return the model's flat output: values, sizes or constants."""
        result = next(node for node in self.exported.graph.nodes if node.op == "output").args[0]
        given = [self._argument(item, self.values) for item in result]
        specs = self.exported.graph_signature.output_specs
        return tuple(
            spec.arg.value if isinstance(spec.arg, ConstantArgument) else item
            for item, spec in zip(given, specs, strict=True)
            if spec.kind.name == "USER_OUTPUT"  # not a buffer's new value, since the write itself is in the graph
        )
