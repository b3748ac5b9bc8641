"""Row independence: check that each row of a graph's outputs depends only on the same row of the inputs.

Only then may a batch be cut into microbatches. The graph is run on labels (`row_labels`) instead of values: each row of
the inputs has its own label, and each operator combines the labels of its operands. Values that depend only on sizes
and constants are computed, since they may permute rows (`x[torch.arange(len(x))]`) or depend on the number of rows.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ProgramError, UsageError
from penstock.graph.graph import Graph
from penstock.graph.ops import CALLBACK, GETITEM, Op, Ref, is_random, resolve_operator, settled
from penstock.graph.prepare import Storage
from penstock.graph.row_labels import (
    PLACE,
    ROWS,
    Labelled,
    OperatorCall,
    are_rows,
    is_mixed,
    join,
    keep_once,
    label_constant,
    no_label,
    row_labels,
    total,
)
from penstock.graph.row_rules import apply_rule, label_callback
from penstock.tensors import HOST
from penstock.values import Size, Value, write_expression

BATCH = Size("batch")
# integer arguments of operators that define a shape, not a position in a dimension
_SHAPES = {"size", "shape", "sizes", "repeats", "split_size", "split_sizes", "normalized_shape", "output_size", "end"}


@dataclass(frozen=True, slots=True)
class Mixing:
    """The first operation through which an output's row depends on other rows of the batch."""

    module: str
    operator: str
    dims: str

    def __str__(self) -> str:
        return f"{self.module or 'its forward pass'} ({self.operator}{self.dims})"


def batch_dim(value: Value) -> int | None:
    """Return the dimension of a value that is the batch; None if there is none.

    >>> batch_dim(Value("x", torch.float32, (4, Size("batch")))), batch_dim(Value("x", torch.float32, (4, 4)))
    (1, None)
    """
    return next((dim for dim, size in enumerate(value.shape) if isinstance(size, Size) and _is_batch(size)), None)


def _is_batch(size: Size) -> bool:
    with suppress(ProgramError):  # raised if it contains another symbol
        return size == BATCH or all(size.evaluate({"batch": rows}) == rows for rows in (ROWS, ROWS + 1, 2 * ROWS))
    return False


def input_dims(graph: Graph) -> dict[str, int | None]:
    """Return the dimension of each input in which a batch is cut; None for an input that all rows share.

    Raises `UsageError` for an input of which no dimension is the batch itself, or several.
    """
    found = {}
    for value in graph.tensor_inputs():
        places = [size for size in value.shape if isinstance(size, Size) and size.mentions("batch")]
        found[value.name] = batch_dim(value)
        if len(places) != (found[value.name] is not None):
            raise UsageError(
                f"the input {value.name!r} of [{', '.join(map(_dimension, value.shape))}] must have the batch in one "
                "dimension to be cut into microbatches; use microbatches=1 and replicas=1"
            )
    return found


def take_rows(tensor: Tensor, dim: int | None, rows: range) -> Tensor:
    """Return some rows of a tensor whose rows are in dimension `dim`; all of it without rows."""
    return tensor if dim is None else tensor.narrow(dim, rows.start, len(rows))


def find_mixing(graph: Graph, sizes: Mapping[str, int], *, statistics_apart: bool = False) -> Mixing | None:
    """Find the first interaction between rows of a batch; None if each row of the outputs depends only on its own row.

    `sizes` has the values of symbols other than the batch. With `statistics_apart`, BatchNorm statistics in training
    are computed per microbatch and do not count as an interaction. Outputs without dimensions are ignored.

    Example:
        find_mixing(graph, {"batch": 8, "length": 32})
    """
    key = (tuple(sizes.get(symbol, 1) > 1 for symbol in graph.symbols if symbol != "batch"), statistics_apart)
    if key not in graph.verdicts:
        with torch.inference_mode():
            graph.verdicts[key] = _search(graph, sizes, apart=statistics_apart)
    found: Mixing | None = graph.verdicts[key]
    return found


def check_rows(
    graph: Graph, sizes: Mapping[str, int], advice: str, *, trains: bool = False, statistics_apart: bool = False
) -> None:
    """Raise `UsageError` unless a batch may be cut into microbatches.

    In training, outputs are passed to a loss function and need not have the batch as a dimension, and BatchNorm
    statistics are computed per microbatch, as with `statistics_apart`. The error names the operation through which rows
    interact, or the output that does not have a row for each row of the batch.
    """
    for output in () if trains else graph.outputs:
        value = graph.values.get(output.name) if isinstance(output, Ref) else None
        if value is None or batch_dim(value) is None:
            shape = "" if value is None else f" of [{', '.join(map(_dimension, value.shape))}]"
            raise UsageError(f"{graph.model} returns an output{shape} of which no dimension is the batch; {advice}")
    mixing = find_mixing(graph, sizes, statistics_apart=trains or statistics_apart)
    if mixing is not None:
        raise UsageError(f"{graph.model} mixes rows of a batch at {mixing}, so a batch cannot be cut; {advice}")


def _dimension(dimension: int | Size) -> str:
    return write_expression(dimension.expression) if isinstance(dimension, Size) else str(dimension)


def _search(graph: Graph, sizes: Mapping[str, int], *, apart: bool) -> Mixing | None:
    labelling = _Labelling(graph, sizes, apart=apart)
    for _ in labelling.run():
        pass
    wrong = labelling.wrong()
    if not wrong:
        return None
    labelling, suspects = _Labelling(graph, sizes, apart=apart), set()
    marked: set[str] = set()
    for op in labelling.run():
        if not labelling.is_constant(op.name) and labelling.is_wrong(op.name):
            if not marked & set(op.uses()):
                suspects.add(op.name)
            marked |= {*labelling.made_by(op)}
    return labelling.describe(labelling.first(suspects, wrong))


class _Labelling:
    """A run of a graph on labels."""

    def __init__(self, graph: Graph, sizes: Mapping[str, int], *, apart: bool) -> None:
        self._graph, self._apart = graph, apart
        others = {symbol: size for symbol, size in sizes.items() if symbol != "batch"}
        self._sizes, self._twice = (graph.sizes(rows, **others) for rows in (ROWS, 2 * ROWS))
        self.ops = (*graph.prelude, *graph.ops)
        self._storage = Storage(self.ops, [state.value.name for state in graph.states])
        self._constants = self._find_constants()
        self._values: dict[str, tuple[Any, Any]] = {}  # values of constants, for both numbers of rows
        self._labels: dict[str, Any] = {}
        self._items = {op.arguments[0].name: op.name for op in reversed(self.ops) if op.target == GETITEM}

    def _find_constants(self) -> set[str]:
        """Return the names of values that depend only on constants and sizes, taking writes into account."""
        known = {
            state.value.name
            for state in self._graph.states
            if state.kind != "parameter"
            and self._graph.constants[state.source].device.type == "cpu"
            and not self._storage.is_written(state.value.name)
        }
        torn: set[str] = set()  # memory to which non-constants are also written
        while True:
            found, before = set(known), len(torn)
            for op in self.ops:
                if set(op.uses()) <= found and not is_random(op) and self._storage.root(op.name) not in torn:
                    found.add(op.name)
                else:
                    torn |= {self._storage.root(name) for name in self._storage.effects[op.name].writes}
            if len(torn) == before:
                return found

    def run(self) -> Iterator[Op]:
        """Label all values; yields each operation after labelling its result."""
        for state in self._graph.states:
            self._begin(state.value, no_label())
            if state.value.name in self._constants:
                self._values[state.value.name] = (self._graph.constants[state.source],) * 2
        for value in self._graph.tensor_inputs():
            dim = batch_dim(value)
            self._begin(value, no_label() if dim is None else row_labels(len(value.shape), dim))
        for op in self.ops:
            if op.name in self._constants:
                self._values[op.name] = self._compute(op)
            else:
                self._labels[op.name] = self._run(op)
            yield op

    def wrong(self) -> set[str]:
        """The outputs with a row that depends on other rows."""
        outputs = (self._graph.values[output.name] for output in self._graph.outputs if isinstance(output, Ref))
        return {value.name for value in outputs if value.shape and self.is_wrong(value.name)}

    def is_constant(self, name: str) -> bool:
        """Return True if a value depends only on constants and sizes."""
        return name in self._constants

    def is_wrong(self, name: str) -> bool:
        """Return True if a value mixes rows."""
        labels = self._of(name)
        return any(map(is_mixed, labels if isinstance(labels, list) else [labels]))

    def _begin(self, value: Value, labels: Tensor) -> None:
        self._labels[value.name] = self._settled(value.name, labels.expand(value.evaluate(self._sizes)))

    def _settled(self, name: str, labels: Tensor) -> Tensor:
        """Copy labels to separate memory if the value is written to later."""
        return labels.contiguous() if self._storage.is_written(name) and 0 in labels.stride() else labels

    def _compute(self, op: Op) -> tuple[Any, Any]:
        """Compute a constant, for both numbers of rows."""

        def compute(sizes: Mapping[str, int], which: int) -> Any:
            settle = partial(settled, sizes=sizes, device=HOST, value_of=lambda name: self._values[name][which])
            arguments = [settle(argument) for argument in op.arguments]
            if op.target == GETITEM:
                return arguments[0][arguments[1]]
            return resolve_operator(op.target)(*arguments, **{key: settle(item) for key, item in op.keywords.items()})

        return compute(self._sizes, 0), compute(self._twice, 1)

    def _of(self, name: str) -> Any:
        """Return a value's labels; labels of a constant are computed at its first use with other values."""
        if name in self._constants and (name not in self._labels or self._storage.is_written(name)):
            self._labels[name] = _label_constants(*self._values[name])
        return self._labels[name]

    def _run(self, op: Op) -> Any:
        """Return the labels of an operation's result, or a list for several results; writes update all aliases."""
        value, writes = self._graph.values.get(op.name), self._storage.effects[op.name].writes
        if op.target == GETITEM:
            labels = self._of(op.arguments[0].name)
            labels = labels[op.arguments[1]] if isinstance(labels, list) else labels
        elif op.target == CALLBACK:
            labels = self._call_back(op)
        elif not writes and not is_random(op) and all(name in self._values for name in op.uses()):
            labels = _label_constants(*self._compute(op))  # a constant, until a non-constant is written to its memory
        else:
            reading, depends = self._read(op)
            labels = self._apply(reading)
            if depends:
                labels = join(total(*(labels if isinstance(labels, list) else [labels])), _place())
            if (
                writes and reading.name != "batch_norm" and isinstance(labels, Tensor)
            ):  # running statistics are not labelled
                written: Tensor = self._of(writes[0])
                is_row = bool(written.any()) and self._is_fixed(writes[0])  # such as x[0] = 1
                written.copy_(_fitted(join(labels, _place()) if is_row else labels, written.shape))
                return self._completed(op.name, written)
            if reading.name in ("to", "type_as") and not self._same_dtype(op):
                labels = labels.clone()
        if value is None:
            return list(labels) if isinstance(labels, (list, tuple)) else labels
        labels = _fitted(labels if isinstance(labels, Tensor) else total(*labels), value.evaluate(self._sizes))
        return self._completed(op.name, self._settled(op.name, labels))

    def _call_back(self, op: Op) -> list[Tensor]:
        references, numbers, which = op.arguments
        values = [self._graph.values[reference.name] for reference in references]
        return label_callback(
            self._graph.callbacks[which],
            values,
            [self._of(value.name) for value in values],
            [value.evaluate(self._sizes) for value in values],
            *(settled(numbers, sizes, HOST, self._of) for sizes in (self._sizes, self._twice)),
        )

    def _completed(self, name: str, labels: Tensor) -> Tensor:
        """Add labels that follow from a value's shape: one per row along the batch, none along fixed sizes.

        Other values that grow with the batch, such as `x[:, :len(x)]`, have more elements per row in a larger batch.
        """
        value = self._graph.values[name]
        shape, twice = value.evaluate(self._sizes), value.evaluate(self._twice)
        grown = [dim for dim, (size, other) in enumerate(zip(shape, twice, strict=True)) if size != other]
        if self._is_fixed(name):
            added = _place() if labels.any() else no_label()
        elif math.prod(twice) != 2 * math.prod(shape):
            added = _place()
        elif len(grown) == 1 and shape[grown[0]] == ROWS:
            added = row_labels(len(shape), grown[0])
        else:
            added = no_label()
        return labels.bitwise_or_(added) if self._storage.is_written(name) else join(keep_once(labels), added)

    def _is_fixed(self, name: str) -> bool:
        shape = self._graph.values[name]
        return math.prod(shape.evaluate(self._sizes)) == math.prod(shape.evaluate(self._twice))

    def _same_dtype(self, op: Op) -> bool:
        return self._graph.values[next(op.uses())].dtype == self._graph.values[op.name].dtype

    def _apply(self, reading: OperatorCall) -> Any:
        try:
            return apply_rule(reading)
        except (RuntimeError, IndexError, KeyError, ValueError):  # no rule for such arguments: combine all operands
            return total(*reading.tensors())

    def _read(self, op: Op) -> tuple[OperatorCall, bool]:
        """Bind an operation's arguments; also return whether a number among them depends on the number of rows."""
        operator = resolve_operator(op.target)
        parameters = {parameter.name: parameter for parameter in operator._schema.arguments}
        given = dict(zip(parameters, op.arguments, strict=False)) | dict(op.keywords)

        def labelled(name: str) -> Labelled:
            return Labelled(self._of(name), self._values.get(name, (None,))[0])

        named = {key: item.default_value for key, item in parameters.items() if item.has_default_value()}
        named |= {key: settled(item, self._sizes, HOST, labelled) for key, item in given.items()}
        named = {key: named[key] for key in parameters if key in named}
        shown = self._graph.values.get(op.name) or self._graph.values.get(self._items.get(op.name, ""))
        packet = op.packet
        shape = shown.evaluate(self._sizes) if shown else ()
        depends = any(self._depends(key, str(parameters[key].type), item, named) for key, item in given.items())
        return OperatorCall(packet.rstrip("_"), operator, named, shape, self._apart), depends

    def _depends(self, key: str, kind: str, item: Any, named: Mapping[str, Any]) -> bool:
        """Return True if an argument is a number, or a position in a dimension, that depends on the number of rows."""
        if not any(size.evaluate(self._sizes) != size.evaluate(self._twice) for size in _sizes_in(item)):
            return False
        if "int" not in kind.lower():
            return True
        dim, labelled = named.get("dim"), named.get("self")
        rows = isinstance(dim, int) and isinstance(labelled, Labelled) and are_rows(labelled.labels, dim)
        return key not in _SHAPES and not rows

    def first(self, suspects: set[str], wrong: set[str]) -> Op:
        """Return the first suspect operation on which a wrong output depends, or the one that computes the output."""
        needed, found = {self._storage.root(name) for name in wrong}, None
        for op in reversed(self.ops):
            if {self._storage.root(name) for name in self.made_by(op)} & needed:
                needed |= {self._storage.root(name) for name in op.uses()}
                found = op if op.name in suspects or found is None else found
        return found or self.ops[-1]

    def made_by(self, op: Op) -> tuple[str, ...]:
        """Return the names of an operation's result and of the values it writes to."""
        return (op.name, *self._storage.effects[op.name].writes)

    def describe(self, op: Op) -> Mixing:
        calls = next((visit.calls for visit in self._graph.visits if visit.op == op.name), ())
        dim = self._read(op)[0].named.get("dim") if op.target != GETITEM else None
        dims = f" over dimension {dim}" if isinstance(dim, int) else ""
        return Mixing(calls[-1].path if calls else "", op.packet, dims)


def _fitted(labels: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Expand labels to a result's shape; if a rule's shape differs, use the union of all labels everywhere."""
    try:
        return labels.expand(shape)
    except RuntimeError:
        return total(labels).expand(shape)


def _label_constants(value: Any, twice: Any) -> Any:
    if isinstance(value, Tensor):
        return label_constant(value, twice)
    return [label_constant(*pair) for pair in zip(value, twice, strict=False)]


def _place() -> Tensor:
    return torch.tensor(PLACE, dtype=torch.uint8)


def _sizes_in(argument: Any) -> Iterator[Size]:
    if isinstance(argument, Size):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _sizes_in(item)
