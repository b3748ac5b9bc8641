"""A decoder's program in alternating phases: operations that torch runs, and those that an engine may run as one.

    phase 0   torch    embedding, masks
    phase 1   engine   norm, queries, keys, values, rotary embedding
    phase 2   torch    write into the caches, read from them, attention
    phase 3   engine   output projection, norms, feed-forward layers; queries, keys, values of the next layer
    phase 4   torch    ...

Every phase runs after the one before it.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from penstock.graph.ops import CALLBACK, GETITEM, Op, effect
from penstock.graph.program import StageProgram
from penstock.runtime.onnx.onnx_nodes import ELEMENTS
from penstock.runtime.onnx.shapes import Shapes
from penstock.runtime.onnx.writer import is_supported
from penstock.values import BATCH, Size

# an engine has a constant of its own for a table, of which torch reads a few rows
_OF_TORCH = {"aten.embedding.default", CALLBACK}
_PRODUCTS = {"aten.linear.default", "aten.addmm.default", "aten.mm.default", "aten.matmul.default", "aten.bmm.default"}


def phases_of(program: StageProgram, shapes: Shapes) -> list[list[Op]]:
    """Return a program's operations by phases, of which an engine runs those with odd numbers.

    An operation is in the first phase of its kind in which all that it needs has been computed. Torch runs what
    touches a cache or has the attended length in a shape, so that neither is copied, and what has integers.
    """
    after = _dependencies(program)
    engine = _for_engine(program, shapes)
    phases = _in_phases(program, engine, after)
    # without a product there is nothing to gain
    engine -= {op.name for ops in phases[1::2] if not any(op.target in _PRODUCTS for op in ops) for op in ops}
    return _in_phases(program, engine, after)


def _in_phases(program: StageProgram, engine: Collection[str], after: Mapping[str, set[str]]) -> list[list[Op]]:
    number: dict[str, int] = {}
    phases: dict[int, list[Op]] = defaultdict(list)
    for op in program.ops:
        kind = op.name in engine
        before = (number[name] + ((name in engine) != kind) for name in after[op.name])
        number[op.name] = max(before, default=int(kind))  # the first of an engine's is 1
        phases[number[op.name]].append(op)
    return [phases[index] for index in range(max(phases, default=0) + 1)]


def _dependencies(program: StageProgram) -> dict[str, set[str]]:
    """Return the operations that must come before each: what it reads, and earlier uses of memory that is written."""
    memory: dict[str, str] = {}  # the value whose memory a value has
    writer: dict[str, str] = {}
    readers: dict[str, set[str]] = defaultdict(set)
    found: dict[str, set[str]] = {}
    for op in program.ops:
        changes = effect(op)
        used = {memory.get(name, name) for name in op.uses()}
        found[op.name] = {name for name in op.uses() if name in found} | {writer[m] for m in used if m in writer}
        for place in {memory.get(name, name) for name in changes.writes}:
            found[op.name] |= readers.pop(place, set())
            writer[place] = op.name
        for place in used:
            readers[place].add(op.name)
        if changes.shares:
            memory[op.name] = memory.get(changes.shares[0], changes.shares[0])
        found[op.name].discard(op.name)
    return found


def _for_engine(program: StageProgram, shapes: Shapes) -> set[str]:
    """Return the names of the operations that an engine may run."""
    torch_only = {state.value.name for state in program.caches}
    touched = {op.name: op for op in _touching(program, torch_only)}
    written = {name for op in program.ops for name in effect(op).writes}
    sliced = [size for op in touched.values() for size in op.arguments if isinstance(size, Size)]
    attended = _varying(program, shapes, {s for s in program.symbols if any(size.mentions(s) for size in sliced)})
    seen = shapes.at(_some_sizes(program))
    found: set[str] = set()
    for op in program.ops:
        if op.target == GETITEM:
            if set(op.uses()) <= found:
                found.add(op.name)
            continue
        near = {op.name, *op.uses()}
        if (
            op.target not in _OF_TORCH and op.name not in touched and not near & (attended | written)
            and not effect(op).writes and is_supported(op) and all(_is_plain(seen[name]) for name in near)
        ):  # fmt: skip
            found.add(op.name)
    return found


def _is_plain(seen: Tensor | Sequence[Tensor]) -> bool:
    tensors = [seen] if isinstance(seen, Tensor) else seen
    return all(x.dtype in ELEMENTS and (x.is_floating_point() or x.dtype == torch.bool) for x in tensors)


def _touching(program: StageProgram, caches: Collection[str]) -> Iterator[Op]:
    """Yield the operations that read or write the memory of caches."""
    same = set(caches)
    for op in program.ops:
        if same & set(op.uses()):
            yield op
            if same & set(effect(op).shares):
                same.add(op.name)


def _some_sizes(program: StageProgram) -> dict[str, int]:
    return {symbol: 2 + index for index, symbol in enumerate(program.symbols)}


def _varying(program: StageProgram, shapes: Shapes, symbols: Collection[str]) -> set[str]:
    """Return the names of the values whose shape has one of the symbols, but for the batch."""
    sizes = _some_sizes(program)
    before, after = shapes.at(sizes), shapes.at({s: n + (s in symbols and s != BATCH) for s, n in sizes.items()})
    return {name for name, value in before.items() if _shapes(value) != _shapes(after[name])}


def _shapes(value: Tensor | Sequence[Tensor]) -> list[torch.Size]:
    return [value.shape] if isinstance(value, Tensor) else [each.shape for each in value]
