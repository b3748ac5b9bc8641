"""The program of a stage: its state, inputs, operations and outputs, as JSON without code.

    {"format": "penstock-program", "version": 1, "symbols": ["batch"],
     "states":  [{"name": "head.weight", "source": "head.weight", "kind": "parameter",
                  "dtype": "float32", "shape": [1000, 384]}],
     "inputs":  [{"name": "add_23", "dtype": "float32", "shape": ["batch", 197, 384]}],
     "prelude": [],
     "ops":     [["linear_48", "aten.linear.default", [{"value": "select"}, ...], {}]],
     "outputs": [{"name": "linear_48", ...}]}

Reading a program validates all of it: operators against the allowlist and their schemas, definition of each value
before its use, names, dtypes and sizes. No part of a program is ever evaluated as code.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.graph.callbacks import Callback
from penstock.graph.operators import check_operator, listed_operators
from penstock.graph.ops import CALLBACK, DTYPES, GETITEM, Op, StageDevice, State, decode, encode, resolve_operator
from penstock.packing import is_packable
from penstock.values import Number, Size, Value, check_expression

FORMAT, VERSION = "penstock-program", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """The computation of a stage, which runs without the model's source."""

    symbols: tuple[str, ...]
    states: tuple[State, ...]
    inputs: tuple[Value, ...]
    prelude: tuple[Op, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]
    callbacks: Sequence[Callback] = field(default=(), repr=False, compare=False)  # only in this process, never written

    @property
    def parameters(self) -> tuple[State, ...]:
        """The states that are parameters of the model."""
        return tuple(state for state in self.states if state.kind == "parameter")

    @property
    def caches(self) -> tuple[State, ...]:
        """The states that the stage allocates itself."""
        return tuple(state for state in self.states if state.kind == "cache")

    def state_bytes(self, *, packed: bool = False) -> int:
        """Return the bytes of parameters, buffers, constants and caches; `packed` weights as in their file."""
        return sum(state.num_bytes(packed=packed) for state in self.states)


def states_of(programs: Iterable[StageProgram]) -> list[State]:
    """Return the states of alternating programs, without caches and without duplicates."""
    states = {state.value.name: state for program in programs for state in program.states}
    return [state for state in states.values() if state.kind != "cache"]


def write_program(program: StageProgram) -> str:
    """Write a program as JSON; `read_program` returns an equal program."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "symbols": list(program.symbols),
        "states": [_write_state(state) for state in program.states],
        "inputs": [_write_value(value) for value in program.inputs],
        "prelude": [_write_op(op) for op in program.prelude],
        "ops": [_write_op(op) for op in program.ops],
        "outputs": [_write_value(value) for value in program.outputs],
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def read_program(text: str | bytes) -> StageProgram:
    """Read and validate a program; raises `ProgramError`, with a one-line message, for anything unknown."""
    program = _read(text)
    _check(program)
    return program


def read_interface(text: str | bytes) -> StageProgram:
    """Read the inputs and outputs of a stage without operations; raises `ProgramError` as `read_program` does."""
    program = _read(text)
    if program.states or program.prelude or program.ops:
        raise ProgramError(f"an interface must not have operations; {_FORGED}")
    return program


def _read(text: str | bytes) -> StageProgram:
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"not a stage program: {str(error)[:120]}; {_FORGED}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ProgramError(f"not a stage program: the field 'format' is not {FORMAT!r}")
    version = document.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ProgramError(
            f"the program has version {_quoted(version)}, this Penstock reads {VERSION}; split the model again"
        )
    try:
        return _read_document(document)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:120]
        raise ProgramError(f"a field is missing or of the wrong kind ({reason}); {_FORGED}") from None


def _read_document(document: Mapping[str, Any]) -> StageProgram:
    symbols = tuple(_name(item) for item in _list(document["symbols"]))
    known = frozenset(symbols)
    return StageProgram(
        symbols=symbols,
        states=tuple(_read_state(item) for item in _list(document["states"])),
        inputs=tuple(_read_value(item, known) for item in _list(document["inputs"])),
        prelude=tuple(_read_op(item, known) for item in _list(document["prelude"])),
        ops=tuple(_read_op(item, known) for item in _list(document["ops"])),
        outputs=tuple(_read_value(item, known) for item in _list(document["outputs"])),
    )


def _read_state(item: Mapping[str, Any]) -> State:
    if item["kind"] not in {"parameter", "buffer", "constant", "cache"}:
        raise ProgramError(
            f"a state's kind must be parameter, buffer, constant or cache; got {_quoted(item['kind'])}; {_FORGED}"
        )
    requires_grad = item.get("requires_grad", False)
    value = _read_value(item, frozenset())
    can = value.dtype.is_floating_point or value.dtype.is_complex
    if not isinstance(requires_grad, bool) or (requires_grad and not can):
        raise ProgramError(f"requires_grad of {value.name} is {_quoted(requires_grad)}; {_FORGED}")
    packing = item.get("packing", "")
    if packing and not (value.dtype == torch.float32 and is_packable(value.shape, str(packing))):
        raise ProgramError(f"the packing of {value.name} is {_quoted(packing)}; {_FORGED}")
    return State(
        value=value, source=_name(item["source"]), kind=item["kind"], requires_grad=requires_grad, packing=packing
    )


def _write_state(state: State) -> dict[str, Any]:
    written = _write_value(state.value) | {"source": state.source, "kind": state.kind}
    written |= {"packing": state.packing} if state.packing else {}
    return written | ({"requires_grad": True} if state.requires_grad else {})


def _write_value(value: Value) -> dict[str, Any]:
    shape = [encode(d)["size"] if isinstance(d, Size) else d for d in value.shape]
    return {"name": value.name, "dtype": str(value.dtype).removeprefix("torch."), "shape": shape}


def _read_value(item: Mapping[str, Any], symbols: frozenset[str]) -> Value:
    name, dimensions = _name(item["name"]), _list(item["shape"])
    if item["dtype"] not in DTYPES:
        raise ProgramError(f"{_quoted(item['dtype'])} is not a dtype; {_FORGED}")
    if len(dimensions) > 16:
        raise ProgramError(f"{name} must have at most 16 dimensions; got {len(dimensions)}; {_FORGED}")
    checked = [check_expression(dimension, symbols) for dimension in dimensions]
    if any(isinstance(d, float) or (isinstance(d, int) and d < 0) for d in checked):
        raise ProgramError(f"{name} has a dimension that is not a size; {_FORGED}")
    shape = tuple(d if isinstance(d, int) else Size(d) for d in checked)
    _check_product(name, [d for d in shape if isinstance(d, int)])
    return Value(name=name, dtype=DTYPES[item["dtype"]], shape=shape)


def _write_op(op: Op) -> list[Any]:
    written = [op.name, op.target, [encode(a) for a in op.arguments], {k: encode(a) for k, a in op.keywords.items()}]
    return [*written, "no_grad"] if op.no_grad else written  # only in training, never read by other processes


def _read_op(item: Any, symbols: frozenset[str]) -> Op:
    name, target, arguments, keywords = _list(item)
    if target != GETITEM:
        check_operator(target)
    op = Op(
        name=_name(name),
        target=target,
        arguments=tuple(decode(argument, symbols) for argument in _list(arguments)),
        keywords={_name(key): decode(argument, symbols) for key, argument in keywords.items()},
    )
    _check_call(op)
    return op


def _name(text: Any) -> str:
    if not isinstance(text, str) or not 1 <= len(text) <= 512 or not text.isprintable():
        raise ProgramError(f"{_quoted(text)} is not a name; {_FORGED}")
    return text


def _list(item: Any) -> list[Any]:
    if not isinstance(item, list):
        raise TypeError(f"{_quoted(item)} is not a list")
    return item


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _quoted(item: Any) -> str:
    """Quote a part of a file for a one-line message."""
    return repr(item)[:80]


def _check(program: StageProgram) -> None:
    """Check that each name is defined once, before its use."""
    known: set[str] = set()
    states = [state.value for state in program.states]
    for given, ops in ((states, program.prelude), (program.inputs, program.ops)):
        _define(known, (value.name for value in given))
        for op in ops:
            _check_uses(known, op)
            _define(known, [op.name])
    missing = {value.name for value in program.outputs} - known
    if missing:
        raise ProgramError(f"the output {min(missing)!r} is never defined; {_FORGED}")


def _define(known: set[str], names: Iterable[str]) -> None:
    for name in names:
        if name in known:
            raise ProgramError(f"the value {name!r} is defined twice; {_FORGED}")
        known.add(name)


def _check_uses(known: set[str], op: Op) -> None:
    missing = set(op.uses()) - known
    if missing:
        raise ProgramError(f"{op.name} uses {min(missing)!r} before it is defined; {_FORGED}")


def operations_of(program: StageProgram, layers: Sequence[str]) -> set[str]:
    """Return the names of the operations that read weights of the given layers, which are module paths.

    Example:
        operations_of(program, ["blocks.3.mlp.fc2", "head"])
    """
    read = {
        state.value.name
        for state in program.states
        if any(state.source == layer or state.source.startswith(f"{layer}.") for layer in layers)
    }
    return {op.name for op in program.ops if read & set(op.uses())}


def is_in_place(op: Op) -> bool:
    """Return True if an operation may write to its arguments."""
    return op.target == CALLBACK or (op.target != GETITEM and resolve_operator(op.target)._schema.is_mutable)


def may_be_written(program: StageProgram) -> set[str]:
    """Return the names of values passed to in-place operations, whose rounded copies would become stale."""
    return {name for op in (*program.prelude, *program.ops) if is_in_place(op) for name in op.uses()}


_FORGED = "the program file is damaged or forged; split the model again"
_LARGEST_ELEMENTS = 2**36
_OPEN_END = 2**63 - 1  # a slice's end for "to the end"
# schema types for which a program may have constants
_CONSTANTS: Mapping[str, type] = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Device": StageDevice,
}
# integer arguments that determine the size of a result, which is at most their product
_AMOUNTS = {
    "size", "shape", "output_size", "repeats", "pad", "padding", "steps", "n", "m", "row", "col",
    "num_classes", "minlength", "bins", "window_length",
}  # fmt: skip


def marks_of_operators() -> list[str]:
    """Return a hash of each listed operator's schema in this PyTorch, ordered by name; empty if it lacks the operator.

    If two versions have equal hashes, the operator takes the same arguments in both.
    """
    return [_mark(name) for name in sorted(listed_operators())]


def unlike_operators(marks: Sequence[str], others: Sequence[str]) -> frozenset[str]:
    """Return the listed operators that differ between two versions, or that one of them lacks."""
    return frozenset(
        name for name, mark, other in zip(sorted(listed_operators()), marks, others, strict=True) if mark != other
    )


def _mark(name: str) -> str:
    try:
        return hashlib.blake2b(str(resolve_operator(name)._schema).encode(), digest_size=4).hexdigest()
    except AttributeError:
        return ""


def _check_call(op: Op) -> None:
    """Reject arguments that the operator does not have, and those that are missing, repeated or too large.

    Raises `ProgramError`.
    """
    if op.target == GETITEM:
        if len(op.arguments) != 2 or op.keywords or not isinstance(op.arguments[1], int):
            raise ProgramError(f"{op.name}: getitem takes a value and an index; {_FORGED}")
        return
    try:
        schema = resolve_operator(op.target)._schema
    except AttributeError:
        raise ProgramError(
            f"operator {op.target!r} not found in this PyTorch; capture and run with the same version"
        ) from None
    names = [parameter.name for parameter in schema.arguments]
    positional = [parameter.name for parameter in schema.arguments if not parameter.kwarg_only]
    given = set(names[: len(op.arguments)])
    if len(op.arguments) > len(positional) or not set(op.keywords) <= set(names) - given:
        raise ProgramError(f"{op.name}: {op.target} does not take these arguments; {_FORGED}")
    for parameter in schema.arguments:
        if parameter.name not in given and parameter.name not in op.keywords and not parameter.has_default_value():
            raise ProgramError(f"{op.name}: {op.target} lacks the argument {parameter.name!r}; {_FORGED}")
    _check_constants(op, schema)
    check_amounts(op, op.arguments, op.keywords)


def _check_constants(op: Op, schema: torch.FunctionSchema) -> None:
    """Reject numbers and text for dtypes, layouts and devices: torch accepts any integer and then crashes."""
    given = dict(zip((parameter.name for parameter in schema.arguments), op.arguments, strict=False)) | dict(
        op.keywords
    )
    for parameter in schema.arguments:
        value = given.get(parameter.name)
        kinds = [kind for word, kind in _CONSTANTS.items() if word in str(parameter.real_type)]
        if value is not None and kinds and not isinstance(value, kinds[0]):
            raise ProgramError(
                f"{op.name}: {parameter.name} of {op.target} must be a {kinds[0].__name__}; got {repr(value)[:80]}; "
                f"{_FORGED}"
            )


def check_amounts(op: Op, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Reject numbers that would create an excessively large tensor; unknown sizes are accepted.

    Raises `ProgramError`.
    """
    if op.target == GETITEM:
        return
    parameters = resolve_operator(op.target)._schema.arguments
    given = {**dict(zip((p.name for p in parameters), arguments, strict=False)), **keywords}
    made: list[Number] = []
    for parameter in parameters:
        numbers = _numbers(given.get(parameter.name))
        if "int" not in str(parameter.type).lower():
            continue
        if any(abs(n) > _LARGEST_ELEMENTS and n != _OPEN_END for n in numbers):
            raise ProgramError(_too_much(op.name))
        if parameter.name in _AMOUNTS or op.target.startswith("aten.tile."):
            made += numbers
    _check_product(op.name, made)
    if op.target.startswith(("aten.arange.", "aten.range.")):
        first, last, step = (_numbers(given.get(key)) for key in ("start", "end", "step"))
        if last and not abs(last[0] - sum(first)) <= _LARGEST_ELEMENTS * min(1, abs(step[0]) if step else 1):
            raise ProgramError(_too_much(op.name))


def _check_product(name: str, numbers: Sequence[Number]) -> None:
    """Reject a shape with too many elements; a dimension of 0 counts as 1."""
    product: Number = 1
    for number in numbers:
        product *= max(1, abs(number))
        if not product <= _LARGEST_ELEMENTS:
            raise ProgramError(_too_much(name))


def _numbers(argument: Any) -> list[Number]:
    items = argument if isinstance(argument, (list, tuple)) else [argument]
    return [item for item in items if isinstance(item, (int, float)) and not isinstance(item, bool)]


def _too_much(name: str) -> str:
    return f"{name} exceeds the limit of {_LARGEST_ELEMENTS} elements; {_FORGED}"
