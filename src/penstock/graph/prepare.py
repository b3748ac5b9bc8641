"""Put a translated graph in order: drop what nobody reads, set constants apart, find the possible cuts."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from penstock.graph.graph import Graph, Output, Plain, Visit
from penstock.graph.ops import GETITEM, Op, State, Value, effect, is_random, references


def prepare(
    *,
    model: str,
    symbols: tuple[str, ...],
    inputs: tuple[Value | None, ...],
    plain_inputs: Mapping[int, Plain],
    input_spec: Any,
    states: tuple[State, ...],
    ops: Sequence[Op],
    visits: Sequence[Visit],
    values: Mapping[str, Value],
    outputs: tuple[Output, ...],
    output_spec: Any,
    fixed_batch: int | None,
    constants: Mapping[str, Tensor],
) -> Graph:
    """Build a graph from translated operations."""
    storage = Storage(ops, [state.value.name for state in states])
    live = _live(ops, outputs, storage)
    prelude = _prelude(live, {state.value.name for state in states if state.kind != "parameter"}, storage)
    ordered = [op for op in live if op.name not in prelude]
    used = {name for op in live for name in op.uses()} | set(references(outputs))
    return Graph(
        model=model,
        symbols=symbols,
        inputs=inputs,
        plain_inputs=plain_inputs,
        input_spec=input_spec,
        states=tuple(state for state in states if state.value.name in used),
        prelude=tuple(op for op in live if op.name in prelude),
        ops=tuple(ordered),
        visits=_move_visits(visits, ops, {op.name for op in ordered}),
        values=values,
        outputs=outputs,
        output_spec=output_spec,
        fixed_batch=fixed_batch,
        constants=constants,
        forbidden=_forbidden(ordered, outputs, prelude, storage, values),
    )


class Storage:
    """Which values may share memory, and which operations write to it.

    Two values share when one is a view of the other, or of a common third; what may be a view counts
    as one, so that a cut is refused too often rather than too seldom.
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
        """Return the name that stands for all values sharing this one's memory."""
        while (parent := self._parent.get(name, name)) != name:
            name = parent
        return name

    def is_written(self, name: str) -> bool:
        """Return whether any operation writes to this value's memory."""
        return self.root(name) in self.written


def _live(ops: Sequence[Op], outputs: tuple[Output, ...], storage: Storage) -> list[Op]:
    """Keep what an output depends on, and every write to memory that is read."""
    needed = set(references(outputs))
    roots = {storage.root(name) for name in needed} | {storage.root(name) for name in storage.states}
    kept: list[Op] = []
    for op in reversed(ops):
        writes = {storage.root(name) for name in storage.effects[op.name].writes}
        if op.name in needed or writes & roots:
            kept.append(op)
            needed.update(op.uses())
            roots.update(storage.root(name) for name in op.uses())
    return kept[::-1]


def _prelude(ops: Sequence[Op], constants: set[str], storage: Storage) -> set[str]:
    """Find the operations that need neither inputs nor parameters, draw nothing and are never written to."""
    known = {name for name in constants if not storage.is_written(name)}
    found: set[str] = set()
    for op in ops:
        if set(op.uses()) <= known and not storage.is_written(op.name) and not is_random(op):
            known.add(op.name)
            found.add(op.name)
    return found


def _move_visits(visits: Sequence[Visit], ops: Sequence[Op], kept: set[str]) -> tuple[Visit, ...]:
    """Count positions by the operations that were kept."""
    position_after: list[int] = []
    count = 0
    for op in ops:
        position_after.append(count)
        count += op.name in kept
    position_after.append(count)
    return tuple(
        dataclasses.replace(
            visit,
            op=visit.op if visit.op in kept else None,
            position=position_after[visit.position],
        )
        for visit in visits
    )


def last_uses(ops: Sequence[Op], outputs: Iterable[str]) -> dict[str, int]:
    """Return for every value the index of the last operation that reads it; outputs are read at the end."""
    last = {name: index for index, op in enumerate(ops) for name in op.uses()}
    return last | dict.fromkeys(outputs, len(ops))


def _forbidden(
    ops: Sequence[Op],
    outputs: tuple[Output, ...],
    prelude: set[str],
    storage: Storage,
    values: Mapping[str, Value],
) -> dict[int, str]:
    """Find the positions where the graph may not be cut, and say what a cut there would do.

    Forbidden is a cut
    - across a list of tensors (the result of `split`): its items are read by getitem first;
    - between a write to a buffer and the other uses of that buffer;
    - across two values that share memory which is written further down: as messages they would part.
    """
    forbidden: dict[int, str] = {}
    last = last_uses(ops, references(outputs))
    made = {op.name: index for index, op in enumerate(ops)}
    for root, final_write in _final_writes(ops, storage).items():
        # a value of this memory crosses every position after its making up to its last use
        crossing: Counter[int] = Counter()
        for name in {name for op in ops for name in (op.name, *op.uses())}:
            if storage.root(name) == root and name not in prelude and name not in storage.states:
                crossing.update(range(made.get(name, -1) + 1, last.get(name, -1) + 1))
        shared = [position for position, count in crossing.items() if count > 1 and position <= final_write]
        forbidden |= dict.fromkeys(shared, "part a view from a later write to what it views")
    for first, final in _written_state(ops, storage):
        forbidden |= dict.fromkeys(range(first + 1, final + 1), "part a write to a buffer from its other uses")
    for op in ops:
        if op.name not in values and op.target != GETITEM:
            torn = range(made[op.name] + 1, last.get(op.name, made[op.name]) + 1)
            forbidden |= dict.fromkeys(torn, "cross a list of tensors before its items are taken out")
    return forbidden


def _final_writes(ops: Sequence[Op], storage: Storage) -> dict[str, int]:
    """Return for every memory that is written the index of the last operation that writes it."""
    return {storage.root(name): index for index, op in enumerate(ops) for name in storage.effects[op.name].writes}


def _written_state(ops: Sequence[Op], storage: Storage) -> list[tuple[int, int]]:
    """Return the first and last use of each piece of state that is written to."""
    uses: dict[str, list[int]] = defaultdict(list)
    state_roots = {storage.root(name) for name in storage.states if storage.is_written(name)}
    for index, op in enumerate(ops):
        for name in (op.name, *op.uses()):
            if storage.root(name) in state_roots:
                uses[storage.root(name)].append(index)
    return [(indices[0], indices[-1]) for indices in uses.values()]
