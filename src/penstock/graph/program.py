"""A stage's program: its state, inputs, operations and outputs, as JSON that holds no code.

    {"format": "penstock-program", "version": 1, "symbols": ["batch"],
     "states":  [{"name": "head.weight", "source": "head.weight", "kind": "parameter",
                  "dtype": "float32", "shape": [1000, 384]}],
     "inputs":  [{"name": "add_23", "dtype": "float32", "shape": ["batch", 197, 384]}],
     "prelude": [],
     "ops":     [["linear_48", "aten.linear.default", [{"value": "select"}, ...], {}]],
     "outputs": [{"name": "linear_48", ...}]}

Reading one back checks everything: operators by an allow-list and against their schemas, that each
value is made before it is used, names, dtypes and sizes. Nothing in it is ever evaluated as code.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ProgramError
from penstock.graph.encoding import DTYPES, decode, encode
from penstock.graph.expressions import Size, check_expression
from penstock.graph.ops import GETITEM, Op, State, Value, references, resolve_operator

FORMAT, VERSION = "penstock-program", 1
_FORGED = "the program file is damaged or forged; split the model again"
_NAME = re.compile(r"[\w.@/-]{1,512}", re.ASCII)
_TARGET = re.compile(r"aten\.[A-Za-z0-9_]+\.[A-Za-z0-9_]+", re.ASCII)
# aten operators that reach outside of tensors: files, storages, devices
_REFUSED = {"from_file", "set_", "set_data", "pin_memory", "_pin_memory", "record_stream", "resize_", "resize_as_"}
_LARGEST_ELEMENTS = 2**36


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """What one stage computes, ready to run where the model's source is not installed."""

    symbols: tuple[str, ...]
    states: tuple[State, ...]
    inputs: tuple[Value, ...]
    prelude: tuple[Op, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]

    @property
    def parameters(self) -> tuple[State, ...]:
        """The states that are parameters of the model."""
        return tuple(state for state in self.states if state.kind == "parameter")

    def state_bytes(self) -> int:
        """Give the bytes of parameters, buffers and constants."""
        return sum(state.value.num_bytes({}) for state in self.states)


def write_program(program: StageProgram) -> str:
    """Write a program as JSON; `read_program` gives an equal one back."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "symbols": list(program.symbols),
        "states": [_write_value(s.value) | {"source": s.source, "kind": s.kind} for s in program.states],
        "inputs": [_write_value(value) for value in program.inputs],
        "prelude": [_write_op(op) for op in program.prelude],
        "ops": [_write_op(op) for op in program.ops],
        "outputs": [_write_value(value) for value in program.outputs],
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def read_program(text: str | bytes) -> StageProgram:
    """Read a program and check all of it; raises `ProgramError` in one line for anything unknown."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"not a stage program: {str(error)[:120]}; {_FORGED}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ProgramError(f"not a stage program: the field 'format' is not {FORMAT!r}")
    if document.get("version") != VERSION:
        raise ProgramError(
            f"the program has version {document.get('version')!r}, this Penstock reads {VERSION}; split the model again"
        )
    try:
        program = _read_document(document)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ProgramError(f"a field is missing or of the wrong kind ({type(error).__name__}: {error}); {_FORGED}") from None
    _check(program)
    return program


def _read_document(document: Mapping[str, Any]) -> StageProgram:
    symbols = tuple(_name(item) for item in document["symbols"])
    known = frozenset(symbols)
    states = []
    for item in document["states"]:
        if item["kind"] not in {"parameter", "buffer", "constant"}:
            raise ProgramError(f"a state's kind is parameter, buffer or constant, not {item['kind']!r}; {_FORGED}")
        states.append(State(value=_read_value(item, frozenset()), source=_name(item["source"]), kind=item["kind"]))
    return StageProgram(
        symbols=symbols,
        states=tuple(states),
        inputs=tuple(_read_value(item, known) for item in document["inputs"]),
        prelude=tuple(_read_op(item, known) for item in document["prelude"]),
        ops=tuple(_read_op(item, known) for item in document["ops"]),
        outputs=tuple(_read_value(item, known) for item in document["outputs"]),
    )


def _write_value(value: Value) -> dict[str, Any]:
    shape = [encode(d)["size"] if isinstance(d, Size) else d for d in value.shape]
    return {"name": value.name, "dtype": str(value.dtype).removeprefix("torch."), "shape": shape}


def _read_value(item: Mapping[str, Any], symbols: frozenset[str]) -> Value:
    if item["dtype"] not in DTYPES:
        raise ProgramError(f"{str(item['dtype'])[:40]!r} is not a dtype; {_FORGED}")
    if len(item["shape"]) > 16:
        raise ProgramError(f"{item['name']} has {len(item['shape'])} dimensions, more than 16; {_FORGED}")
    shape: list[int | Size] = []
    for dimension in item["shape"]:
        checked = check_expression(dimension, symbols)
        shape.append(checked if isinstance(checked, int) else Size(checked))
    fixed = math.prod(d for d in shape if isinstance(d, int))
    if not 0 <= fixed <= _LARGEST_ELEMENTS:
        raise ProgramError(f"{item['name']} has {fixed} elements, beyond the limit of {_LARGEST_ELEMENTS}; {_FORGED}")
    return Value(name=_name(item["name"]), dtype=DTYPES[item["dtype"]], shape=tuple(shape))


def _write_op(op: Op) -> list[Any]:
    return [op.name, op.target, [encode(a) for a in op.arguments], {k: encode(a) for k, a in op.keywords.items()}]


def _read_op(item: Any, symbols: frozenset[str]) -> Op:
    name, target, arguments, keywords = item
    if target != GETITEM and not (
        isinstance(target, str) and _TARGET.fullmatch(target) and target.split(".")[1] not in _REFUSED
    ):
        raise ProgramError(f"the operator {str(target)[:80]!r} is not allowed in a stage program; {_FORGED}")
    op = Op(
        name=_name(name),
        target=target,
        arguments=tuple(decode(argument, symbols) for argument in arguments),
        keywords={_name(key): decode(argument, symbols) for key, argument in keywords.items()},
    )
    _check_call(op)
    return op


def _name(text: Any) -> str:
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise ProgramError(f"{str(text)[:80]!r} is not a name; {_FORGED}")
    return text


def _check_call(op: Op) -> None:
    """Check a call against its operator's schema, and its literal sizes against the limit."""
    if op.target == GETITEM:
        if len(op.arguments) != 2 or op.keywords or not isinstance(op.arguments[1], int):
            raise ProgramError(f"{op.name}: getitem takes a value and an index; {_FORGED}")
        return
    try:
        schema = resolve_operator(op.target)._schema
    except AttributeError:
        raise ProgramError(f"this PyTorch has no operator {op.target!r}; capture and run with the same version") from None
    names = [parameter.name for parameter in schema.arguments]
    if len(op.arguments) > len(names) or not set(op.keywords) <= set(names):
        raise ProgramError(f"{op.name}: {op.target} does not take these arguments; {_FORGED}")
    for name, argument in [*zip(names, op.arguments, strict=False), *op.keywords.items()]:
        check_elements(op.name, name, argument)


def check_elements(op_name: str, parameter: str, argument: Any) -> None:
    """Refuse a size, count or end so large that making the tensor would exhaust the machine."""
    if parameter not in {"size", "shape", "end", "steps", "repeats", "n", "m"}:
        return
    numbers = argument if isinstance(argument, list) else [argument]
    product = math.prod(abs(n) for n in numbers if isinstance(n, (int, float)) and not isinstance(n, bool) and n)
    # an open end of a slice is the largest 64-bit integer
    if product > _LARGEST_ELEMENTS and product != 2**63 - 1:
        raise ProgramError(f"{op_name} asks for {product} elements, beyond the limit of {_LARGEST_ELEMENTS}; {_FORGED}")


def _check(program: StageProgram) -> None:
    """Check that each name is made once, before it is used."""
    known: set[str] = set()
    _define(known, (state.value.name for state in program.states))
    for op in program.prelude:
        _check_uses(known, op)
        _define(known, [op.name])
    _define(known, (value.name for value in program.inputs))
    for op in program.ops:
        _check_uses(known, op)
        _define(known, [op.name])
    missing = {value.name for value in program.outputs} - known
    if missing:
        raise ProgramError(f"the output {min(missing)!r} is never made; {_FORGED}")


def _define(known: set[str], names: Iterable[str]) -> None:
    for name in names:
        if name in known:
            raise ProgramError(f"the value {name!r} is made twice; {_FORGED}")
        known.add(name)


def _check_uses(known: set[str], op: Op) -> None:
    missing = {name for argument in (*op.arguments, *op.keywords.values()) for name in references(argument)} - known
    if missing:
        raise ProgramError(f"{op.name} uses {min(missing)!r} before it is made; {_FORGED}")

