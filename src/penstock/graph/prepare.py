"""Preparation for cuts: refuse wrapped models; drop unused operations, separate constants, find possible cuts."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from torch import nn

from penstock.errors import UsageError
from penstock.graph.callbacks import Callback
from penstock.graph.decoders import inside_engine_operations
from penstock.graph.graph import Graph, Output, Visit
from penstock.graph.ops import CALLBACK, GETITEM, Op, effect, is_random, references
from penstock.values import Value


def prepare(graph: Graph) -> Graph:
    """Return a prepared graph from a translated graph, which has all operations in `ops`."""
    storage = Storage(graph.ops, [state.value.name for state in graph.states])
    live = _live(graph.ops, graph.outputs, storage)
    prelude = _prelude(
        live, {state.value.name for state in graph.states if state.kind in {"buffer", "constant"}}, storage
    )
    ordered = [op for op in live if op.name not in prelude]
    used = {name for op in live for name in op.uses()} | set(references(graph.outputs))
    return dataclasses.replace(
        graph,
        states=tuple(state for state in graph.states if state.value.name in used),
        prelude=tuple(op for op in live if op.name in prelude),
        ops=tuple(ordered),
        visits=_move_visits(graph.visits, graph.ops, {op.name for op in ordered}),
        forbidden=_forbidden(ordered, graph.outputs, prelude, storage, graph.values)
        | _forbidden_by_callbacks(ordered, graph.callbacks)
        | (inside_engine_operations(ordered) if graph.keeps_caches else {}),
    )


class Storage:
    """Sets of values that may share memory, and the operations that write to this memory.

    Two values share memory if one is a view of the other, or both are views of a third. A possible view counts as a
    view, so that a cut is forbidden too often rather than too rarely.
    """

    def __init__(self, ops: Sequence[Op], states: Iterable[str]) -> None:
        self._parent: dict[str, str] = {}
        self.states = set(states)
        self.effects = {op.name: effect(op) for op in ops}
        for op in ops:
            for name in self.effects[op.name].shares:
                self._parent[self.root(name)] = self.root(op.name)
        self.written = {self.root(name) for result in self.effects.values() for name in result.writes}

    def root(self, name: str) -> str:
        """Return the representative of all values that share memory with this value."""
        while (parent := self._parent.get(name, name)) != name:
            name = parent
        return name

    def is_written(self, name: str) -> bool:
        """Return True if any operation writes to this value's memory."""
        return self.root(name) in self.written


def _live(ops: Sequence[Op], outputs: tuple[Output, ...], storage: Storage) -> list[Op]:
    """Return the operations that an output depends on, and all writes to memory that is read."""
    needed = set(references(outputs))
    roots = {storage.root(name) for name in needed} | {storage.root(name) for name in storage.states}
    kept: list[Op] = []
    for op in reversed(ops):
        writes = {storage.root(name) for name in storage.effects[op.name].writes}
        if op.name in needed or writes & roots or op.target == CALLBACK:
            kept.append(op)
            needed.update(op.uses())
            roots.update(storage.root(name) for name in op.uses())
    return kept[::-1]


def _prelude(ops: Sequence[Op], constants: set[str], storage: Storage) -> set[str]:
    """Find operations that need neither inputs nor parameters, draw no random numbers and are never written to."""
    known = {name for name in constants if not storage.is_written(name)}
    found: set[str] = set()
    for op in ops:
        pure = op.target != CALLBACK and not is_random(op)
        if pure and set(op.uses()) <= known and not storage.is_written(op.name):
            known.add(op.name)
            found.add(op.name)
    return found


def _move_visits(visits: Sequence[Visit], ops: Sequence[Op], kept: set[str]) -> tuple[Visit, ...]:
    """Renumber positions by the operations that were kept."""
    position_after = [0, *accumulate(op.name in kept for op in ops)]
    return tuple(
        dataclasses.replace(visit, op=visit.op if visit.op in kept else None, position=position_after[visit.position])
        for visit in visits
    )


def last_uses(ops: Sequence[Op], outputs: Iterable[str]) -> dict[str, int]:
    """Return for every value the index of the last operation that reads it; outputs count as read at the end."""
    last = {name: index for index, op in enumerate(ops) for name in op.uses()}
    return last | dict.fromkeys(outputs, len(ops))


def _forbidden(
    ops: Sequence[Op], outputs: tuple[Output, ...], prelude: set[str], storage: Storage, values: Mapping[str, Value]
) -> dict[int, str]:
    """Return the positions at which the graph must not be cut, with the effect of a cut there.

    A cut is forbidden
    - across a list of tensors (the result of `split`): its items are read by getitem first;
    - between a write to a buffer and the other uses of that buffer;
    - across two values that share memory that is written later: messages would separate them.
    """
    forbidden: dict[int, str] = {}
    last = last_uses(ops, references(outputs))
    made = {op.name: index for index, op in enumerate(ops)}
    final_writes = {storage.root(name): i for i, op in enumerate(ops) for name in storage.effects[op.name].writes}
    for root, final_write in final_writes.items():
        # values of this memory cross every position from the first definition to the last use
        crossing: Counter[int] = Counter()
        for name in {name for op in ops for name in (op.name, *op.uses())}:
            if storage.root(name) == root and name not in prelude and name not in storage.states:
                crossing.update(range(made.get(name, -1) + 1, last.get(name, -1) + 1))
        shared = [position for position, count in crossing.items() if count > 1 and position <= final_write]
        forbidden |= dict.fromkeys(shared, "separate a view from a later write to its base")
    for first, final in _written_state(ops, storage):
        forbidden |= dict.fromkeys(range(first + 1, final + 1), "separate a write to a buffer from its other uses")
    for op in ops:
        if op.name not in values and op.target != GETITEM:
            torn = range(made[op.name] + 1, last.get(op.name, made[op.name]) + 1)
            forbidden |= dict.fromkeys(torn, "cross a list of tensors before its items are taken out")
    return forbidden


def _forbidden_by_callbacks(ops: Sequence[Op], callbacks: Sequence[Callback]) -> dict[int, str]:
    """Forbid cuts between a tensor and its hook, and inside a module with a backward hook."""
    forbidden: dict[int, str] = {}
    made = {op.name: index for index, op in enumerate(ops)}
    place = {op.arguments[2]: index for index, op in enumerate(ops) if op.target == CALLBACK}
    for number, index in place.items():
        callback = callbacks[number]
        if callback.with_producer:
            first = max(made.get(name, -1) for name in ops[index].uses())
            forbidden |= dict.fromkeys(range(first + 1, index + 1), "separate a tensor from its hook")
        if callback.since is not None:
            inside = range(place[callback.since] + 1, index + 1)
            forbidden |= dict.fromkeys(inside, "separate a module from its backward hook")
    return forbidden


def _written_state(ops: Sequence[Op], storage: Storage) -> list[tuple[int, int]]:
    """Return the first and last use of each state that is written to."""
    uses: dict[str, list[int]] = defaultdict(list)
    state_roots = {storage.root(name) for name in storage.states if storage.is_written(name)}
    for index, op in enumerate(ops):
        for name in (op.name, *op.uses()):
            if storage.root(name) in state_roots:
                uses[storage.root(name)].append(index)
    return [(indices[0], indices[-1]) for indices in uses.values()]


_BEFORE = "the model before it was wrapped"
# the way out of each wrapper, by class name, so that nothing is imported for them
_WAY_OUT = {
    "DistributedDataParallel": "{}.module",
    "DataParallel": "{}.module",
    "OptimizedModule": "{}._orig_mod",
    "DeepSpeedEngine": _BEFORE,
    "_FabricModule": "{}.module",
    "FullyShardedDataParallel": _BEFORE,
    "FSDPModule": _BEFORE,
}


def check_unwrapped(model: nn.Module) -> None:
    """Raise `UsageError` if a model, or a module in it, is wrapped; the message names the module inside."""
    for path, module in model.named_modules():
        at = f"model.{path}" if path else "model"
        for kind in (kind.__name__ for kind in type(module).__mro__):
            if kind in _WAY_OUT:
                raise UsageError(
                    f"{at} is wrapped in {kind}, which a pipeline replaces; use {_WAY_OUT[kind].format(at)}"
                )
        if module._compiled_call_impl is not None:
            raise UsageError(
                f"{at} was compiled by compile(), which a pipeline replaces; use a model that is not compiled"
            )
