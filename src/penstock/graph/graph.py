"""The graph of a forward pass: an ordered list of operations, and their work, counted from shapes.

Work is in seconds on a nominal core, and only the proportions matter: matrix products run at about NOMINAL_FLOPS_PER_S,
other operations at the speed of memory, and every call has a small overhead. This is accurate enough to divide a model;
`measure` times the operations instead.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.graph.callbacks import Callback
from penstock.graph.live_module import Reads
from penstock.graph.ops import GETITEM, Op, State, references, resolve_operator
from penstock.values import BATCH, Size, Value

# an entry of a model's flat output: a Ref to a tensor, a Size, or a constant
Output: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module: its path (with `@k` from the second call on) and class name."""

    path: str
    kind: str


@dataclass(frozen=True, slots=True)
class Visit:
    """The module calls that contain an operation, outermost first.

    `op` is None for an operation that was dropped, such as dropout in evaluation; `position` is its former position, so
    that cuts can still be named after its module.
    """

    calls: tuple[Call, ...]
    op: str | None
    position: int


@dataclass(frozen=True, slots=True)
class Plain:
    """An input that is not a tensor: its name and its value at the capture."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A captured forward pass: state, inputs, operations in order, and outputs.

    `prelude` has the operations that depend only on sizes and constants (masks, position tables): every stage that
    needs such a value computes it itself, once per microbatch size. `ops` are the other operations; a cut may be
    between any two of them, except at positions in `forbidden`, which has the reasons. `plain_inputs` are the
    non-tensor inputs, by position in the call; their values are part of the graph.

        position   0     1     2           N
                   | op0 | op1 | op2 … opN-1 |
    """

    model: str
    symbols: tuple[str, ...]
    inputs: tuple[Value | None, ...]
    plain_inputs: Mapping[int, Plain]
    input_spec: Any
    states: tuple[State, ...]
    prelude: tuple[Op, ...]
    ops: tuple[Op, ...]
    visits: tuple[Visit, ...]
    values: Mapping[str, Value]
    outputs: tuple[Output, ...]
    output_spec: Any
    fixed_batch: int | None
    constants: Mapping[str, Tensor] = field(repr=False)
    forbidden: Mapping[int, str] = field(repr=False)
    callbacks: Sequence[Callback] = field(default=(), repr=False)
    left: Mapping[str, Any] = field(default_factory=dict, repr=False)  # attributes assigned by the forward
    reads: Reads = field(default_factory=dict, repr=False, compare=False)  # attributes of modules that the forward read
    why_fixed: str = field(default="", compare=False)  # reason for `fixed_batch`
    # cached results of `graph/rows.py`
    verdicts: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def allowed(self) -> tuple[int, ...]:
        """Positions of possible cuts."""
        return tuple(position for position in range(1, len(self.ops)) if position not in self.forbidden)

    @property
    def keeps_caches(self) -> bool:
        """True if stages keep caches between microbatches; all microbatches must then take the same route."""
        return any(state.kind == "cache" for state in self.states)

    def computes_as(self, other: "Graph") -> bool:
        """Return whether another capture of the model computes the same; Python code in `callbacks` may differ."""
        if self.callbacks or other.callbacks:
            return False
        mine, others = (
            (
                g.ops,
                g.prelude,
                g.inputs,
                g.outputs,
                g.values,
                g.symbols,
                [(s.value, s.source, s.kind) for s in g.states],
            )
            for g in (self, other)
        )
        constants = [s.source for s in self.states if s.kind == "constant"]
        return mine == others and all(torch.equal(self.constants[name], other.constants[name]) for name in constants)

    def tensor_inputs(self) -> tuple[Value, ...]:
        """The tensor inputs, in the order of the call."""
        return tuple(value for value in self.inputs if value is not None)

    def sizes(self, batch: int, **further: int) -> dict[str, int]:
        """Return a value for every symbol: the batch size, values in `further`, and 1 for all others.

        Example:
            graph.sizes(3, sequence=128)
        """
        return {symbol: batch if symbol == "batch" else further.get(symbol, 1) for symbol in self.symbols}


def with_rows(graph: Graph) -> Graph:
    """Return a graph with a fixed batch size whose inputs and outputs have the batch as a symbol; others as they are.

    So a batch is bound, labelled and joined as that of any model, and `check_fixed` compares its size.
    """
    rows = graph.fixed_batch
    if rows is None or graph.symbols:
        return graph

    def marked(value: Value) -> Value:
        is_batch = bool(value.shape) and value.shape[0] == rows
        return dataclasses.replace(value, shape=(Size(BATCH), *value.shape[1:])) if is_batch else value

    inputs = tuple(value if value is None else marked(value) for value in graph.inputs)
    given = {value.name: value for value in inputs if value is not None}
    returned = {name: marked(graph.values[name]) for name in references(graph.outputs) if name in graph.values}
    return dataclasses.replace(graph, symbols=(BATCH,), inputs=inputs, values={**graph.values, **returned, **given})


def check_fixed(graph: Graph, rows: int) -> None:
    """Raise `UsageError` if a model that fixes its batch size gets another number of rows."""
    if graph.fixed_batch is not None and rows != graph.fixed_batch:
        raise UsageError(
            f"{graph.model} was captured with {graph.fixed_batch} rows, and {graph.why_fixed}; got {rows} rows; give "
            "it batches of that size, as with drop_last=True, or make its forward pass take any number of rows"
        )


def check_whole(graph: Graph, num_microbatches: int, num_replicas: int) -> None:
    """Raise `UsageError` if batches of a model that fixes its batch size would be cut."""
    if graph.fixed_batch is not None and (num_microbatches > 1 or num_replicas > 1):
        raise UsageError(
            f"{graph.model} was captured with {graph.fixed_batch} rows, and {graph.why_fixed}, so no batch can be cut "
            f"into {num_microbatches} microbatches and {num_replicas} replicas; use microbatches=1 and replicas=1 with "
            f"batches of {graph.fixed_batch} rows, or make its forward pass take any number of rows"
        )


NOMINAL_FLOPS_PER_S = 60e9
NOMINAL_BYTES_PER_S = 12e9
SECONDS_PER_CALL = 4e-6
# copy, checksum and system calls on each side of a cut
SECONDS_PER_CROSSING_BYTE = 2e-9
# elements per second of transcendental functions: exp, erf, tanh and similar
_TRANSCENDENTAL = {
    "gelu": 1.2e9,
    "silu": 1.2e9,
    "sigmoid": 1.2e9,
    "tanh": 1.0e9,
    "softmax": 0.8e9,
    "exp": 1.5e9,
    "erf": 1.0e9,
    "pow": 0.8e9,
}

# operators that read or write only selected rows of their first argument, such as an embedding's weight or a cache
_CHOSEN_ROWS = {"embedding", "index_select", "index", "gather", "index_put_", "index_copy_", "scatter_"}

Shape = tuple[int, ...]


def count_work(graph: Graph, sizes: Mapping[str, int]) -> list[float]:
    """Return the counted work of every operation, in nominal seconds, for one microbatch.

    Example:
        sum(count_work(graph, graph.sizes(1)))
    """
    return [_work(graph, op, sizes) for op in graph.ops]


def _work(graph: Graph, op: Op, sizes: Mapping[str, int]) -> float:
    if _is_view(op):
        return SECONDS_PER_CALL / 4
    result = _result(graph, op, sizes)
    shapes = [graph.values[name].evaluate(sizes) for name in op.uses() if name in graph.values]
    flops = _flops(op, shapes, result)
    kind = op.packet
    moved = 4 * (math.prod(result) + sum(math.prod(shape) for shape in shapes))
    if kind in _CHOSEN_ROWS and shapes:
        others = sum(math.prod(shape) for shape in shapes[1:])
        moved = 8 * (others if kind.endswith("_") else math.prod(result))
    speed = _TRANSCENDENTAL.get(kind)
    computed = math.prod(result) / speed if speed else 0.0
    return flops / NOMINAL_FLOPS_PER_S + moved / NOMINAL_BYTES_PER_S + computed + SECONDS_PER_CALL


def _is_view(op: Op) -> bool:
    if op.target == GETITEM:
        return True
    schema = resolve_operator(op.target)._schema
    return not any(a.alias_info and a.alias_info.is_write for a in schema.arguments) and any(
        a.alias_info for a in schema.arguments
    )


def _result(graph: Graph, op: Op, sizes: Mapping[str, int]) -> Shape:
    value = graph.values.get(op.name)
    return value.evaluate(sizes) if value else (0,)


def _flops(op: Op, shapes: list[Shape], result: Shape) -> float:
    """Return the FLOPs of matrix products, two per multiply-add; other operations count 0."""
    kind = op.packet
    if kind in {"linear", "mm", "bmm", "matmul"} and shapes:
        return 2.0 * math.prod(result) * (shapes[0][-1] if shapes[0] else 1)
    if kind in {"addmm", "baddbmm"} and len(shapes) > 1:
        return 2.0 * math.prod(result) * shapes[1][-1]
    if kind.startswith("conv") and len(shapes) > 1:
        return 2.0 * math.prod(result) * math.prod(shapes[1][1:])
    if kind == "scaled_dot_product_attention" and len(shapes) > 2:
        keys = shapes[1][-2]
        return 2.0 * math.prod(result[:-1]) * keys * (shapes[0][-1] + shapes[2][-1])
    if kind == "einsum" and len(shapes) > 1:
        return 2.0 * math.prod(result) * max(shape[-1] for shape in shapes)
    return 0.0
