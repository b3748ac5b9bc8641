"""The graph of a forward pass: an ordered list of operations; graphs of models that fix their batch size."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.graph.callbacks import Callback
from penstock.graph.live_module import Reads
from penstock.graph.ops import Op, State, references
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
