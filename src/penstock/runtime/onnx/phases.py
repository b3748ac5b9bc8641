"""A decoder's program in alternating phases: operations that torch runs, and operations that an engine runs as one.

    phase 0   torch    embedding, masks
    phase 1   engine   norm, queries, keys, values, rotary embedding
    phase 2   torch    write into the caches, read from them, attention
    phase 3   engine   output projection, norms, feed-forward layers; queries, keys, values of the next layer
    phase 4   torch    ...

Phases run in order. Attention over caches may be an operation of the engine (`cached_attention.py`); phase 1 then goes
from the first norm to the last.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from penstock.graph.decoders import ATTENTION, ROTARY
from penstock.graph.ops import CALLBACK, GETITEM, Op
from penstock.graph.prepare import Storage
from penstock.graph.program import StageProgram
from penstock.runtime.onnx.onnx_nodes import ELEMENTS
from penstock.runtime.onnx.writer import Shapes, is_supported
from penstock.values import BATCH, Size

# embedding tables would be copied into an engine, although only a few rows are read
_OF_TORCH = {"aten.embedding.default", CALLBACK}
_OF_ENGINE = {ATTENTION, ROTARY}
_PRODUCTS = {"aten.linear.default", "aten.addmm.default", "aten.mm.default", "aten.matmul.default", "aten.bmm.default"}


def pieces(ops: Sequence[Op], num_bytes: Callable[[Op], int], most: int) -> Iterator[list[Op]]:
    """Divide the operations of a phase into consecutive pieces whose weights take at most `most` bytes if possible.

    A piece begins with a product, so that engines fuse the same operations whatever the pieces are.
    """
    last = {op.arguments[0].name: index for index, op in enumerate(ops) if op.target == GETITEM}
    piece: list[Op] = []
    held, needed = 0, -1  # index of the last operation that must be in this piece
    for index, op in enumerate(ops):
        if piece and held + num_bytes(op) > most and index > needed and op.target in _PRODUCTS:
            yield piece
            piece, held = [], 0
        piece.append(op)
        held += num_bytes(op)
        needed = max(needed, last.get(op.name, -1))
    if piece:
        yield piece


def phases_of(program: StageProgram, shapes: Shapes) -> list[list[Op]]:
    """Return a program's operations by phase; an engine runs the phases with odd numbers.

    An operation is in the first phase of its kind in which all its inputs have been computed. Torch runs operations
    that use a cache or have the attended length in a shape, so that neither is copied, and operations on integers.
    """
    storage = Storage(program.ops, [state.value.name for state in program.states])
    after = _dependencies(program, storage)
    engine = _for_engine(program, shapes, storage)
    phases = _in_phases(program, engine, after)
    # operations without a product gain nothing from an engine
    worth = _PRODUCTS | _OF_ENGINE
    engine -= {op.name for ops in phases[1::2] if not any(op.target in worth for op in ops) for op in ops}
    return _in_phases(program, engine, after)


def _in_phases(program: StageProgram, engine: Collection[str], after: Mapping[str, set[str]]) -> list[list[Op]]:
    number: dict[str, int] = {}
    phases: dict[int, list[Op]] = defaultdict(list)
    for op in program.ops:
        kind = op.name in engine
        before = (number[name] + ((name in engine) != kind) for name in after[op.name])
        number[op.name] = max(before, default=int(kind))  # the first engine phase is 1
        phases[number[op.name]].append(op)
    return [phases[index] for index in range(max(phases, default=0) + 1)]


def _dependencies(program: StageProgram, storage: Storage) -> dict[str, set[str]]:
    """Return for each operation those that must come before it: its inputs, and earlier uses of memory it writes."""
    writer: dict[str, str] = {}
    readers: dict[str, set[str]] = defaultdict(set)
    found: dict[str, set[str]] = {}
    for op in program.ops:
        used = {storage.root(name) for name in op.uses()}
        found[op.name] = {name for name in op.uses() if name in found} | {writer[m] for m in used if m in writer}
        for memory in {storage.root(name) for name in storage.effects[op.name].writes}:
            found[op.name] |= readers.pop(memory, set())
            writer[memory] = op.name
        for memory in used:
            readers[memory].add(op.name)
    return found


def _for_engine(program: StageProgram, shapes: Shapes, storage: Storage) -> set[str]:
    """Return the names of the operations that an engine may run."""
    caches = {storage.root(state.value.name) for state in program.caches}
    at_caches = [op for op in program.ops if any(storage.root(name) in caches for name in op.uses())]
    sliced = [size for op in at_caches for size in op.arguments if isinstance(size, Size)]
    attended = _varying(program, shapes, {s for s in program.symbols if any(size.mentions(s) for size in sliced)})
    seen = shapes.at(some_sizes(program))
    found: set[str] = set()
    for op in program.ops:
        if op.target == GETITEM:
            if set(op.uses()) <= found:
                found.add(op.name)
            continue
        near = {op.name, *op.uses()}
        if op.target in _OF_ENGINE or (
            op.target not in _OF_TORCH
            and not near & attended
            and not any(map(storage.is_written, near))
            and is_supported(op)
            and all(_is_plain(seen[name]) for name in near)
        ):
            found.add(op.name)
    return found


def _is_plain(seen: Tensor | Sequence[Tensor]) -> bool:
    tensors = [seen] if isinstance(seen, Tensor) else seen
    return all(x.dtype in ELEMENTS and (x.is_floating_point() or x.dtype == torch.bool) for x in tensors)


def some_sizes(program: StageProgram) -> dict[str, int]:
    """Return small sizes that differ from each other."""
    return {symbol: 2 + index for index, symbol in enumerate(program.symbols)}


def _varying(program: StageProgram, shapes: Shapes, symbols: Collection[str]) -> set[str]:
    """Return the names of the values whose shape depends on one of the symbols, except for the batch."""
    sizes = some_sizes(program)
    before, after = shapes.at(sizes), shapes.at({s: n + (s in symbols and s != BATCH) for s, n in sizes.items()})
    return {name for name, value in before.items() if _shapes(value) != _shapes(after[name])}


def _shapes(value: Tensor | Sequence[Tensor]) -> list[torch.Size]:
    return [value.shape] if isinstance(value, Tensor) else [each.shape for each in value]
