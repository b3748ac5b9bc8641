"""Cuts of a graph: their positions, crossing values and names, the repeated blocks, and the division at cuts.

A graph is divided into stage programs, and into the parts of stages that train.
"""

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from penstock.errors import CutError
from penstock.graph.graph import Call, Graph
from penstock.graph.ops import Op, Ref, State, effect, references
from penstock.graph.prepare import last_uses
from penstock.graph.program import StageProgram, write_program
from penstock.spec.fields import fingerprint
from penstock.values import Value

BEFORE, AFTER = ":before", ":after"
_INDEXED = re.compile(r"(?:.*\.)?\d+(?:@\d+)?|.*@\d+")


@dataclass(frozen=True, slots=True)
class Cut:
    """A position between two operations.

    `name` is the shortest path of a module that ends or begins there, with its side, as in `blocks.2.attn.proj:after`;
    between operations of one module it is the module and the operation, as in `blocks.2.attn/transpose:after`.
    `aliases` are other names of the same position.
    """

    position: int
    name: str
    aliases: tuple[str, ...]
    crossing: tuple[Value, ...]

    def num_bytes(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes that cross the cut for one microbatch of these sizes."""
        return sum(value.num_bytes(sizes) for value in self.crossing)


class Cuts(Sequence[Cut]):
    """All cuts that a graph allows, in order, by index or by name; with `among`, those with one of these names.

    Example:
        Cuts(graph).find("blocks.2.norm2:after")
    """

    def __init__(self, graph: Graph, among: Collection[str] | None = None) -> None:
        self.graph = graph
        self._spans = module_spans(graph)
        self._names = _names(graph, self._spans)
        crossing = crossing_values(graph)
        self._cuts = [
            Cut(position=p, name=names[0], aliases=tuple(names[1:]), crossing=crossing[p])
            for p in graph.allowed
            if (names := self._names[p]) and (among is None or not set(names).isdisjoint(among))
        ]
        self._by_position = {cut.position: cut for cut in self._cuts}
        self._positions = {name: p for p, names in self._names.items() for name in names}

    def __len__(self) -> int:
        return len(self._cuts)

    def __iter__(self) -> Iterator[Cut]:
        return iter(self._cuts)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._cuts[index]

    def at(self, position: int) -> Cut:
        """Return the cut at a position of the graph."""
        return self._by_position[position]

    def find(self, name: str) -> Cut:
        """Return the cut with this name; raises `CutError` with the nearest names if not found."""
        position = self._positions.get(name)
        if position is None:
            raise CutError(f"cut {name!r} not found in {self.graph.model}; {self._nearest(name)}")
        if position in self._by_position:
            return self._by_position[position]
        if position <= 0 or position >= len(self.graph.ops):
            raise CutError(f"the cut {name!r} leaves an empty stage; cut inside the model")
        nearest = min(self._cuts, key=lambda cut: abs(cut.position - position), default=None)
        advice = f"the nearest allowed cut is {nearest.name}" if nearest else "this model allows no cut"
        raise CutError(f"the cut {name!r} would {self.graph.forbidden[position]}; {advice}")

    def find_all(self, names: Sequence[str]) -> list[Cut]:
        """Return the cuts with these names, in the model's order; raises `CutError` for repeats."""
        found = sorted((self.find(name) for name in names), key=lambda cut: cut.position)
        for first, second in pairwise(found):
            if first.position == second.position:
                raise CutError(f"two cuts are at the same position, {first.name}; give each position once")
        return found

    def _nearest(self, name: str) -> str:
        path, _, side = name.partition(":")
        if side not in {"before", "after"}:
            return f"a cut is a module path and a side, as in {path or 'blocks.3'}:after or {path or 'blocks.3'}:before"
        near = difflib.get_close_matches(name, self._positions, n=3, cutoff=0.4)
        return f"the nearest names are {', '.join(near)}" if near else "see `penstock split` for the names"


@dataclass(frozen=True, slots=True)
class ModuleSpan:
    """The operations of one module call: positions `start` up to `stop`."""

    call: Call
    start: int
    stop: int
    depth: int


def module_spans(graph: Graph) -> dict[str, ModuleSpan]:
    """Return the span of every module call by path, outer modules before inner ones."""
    spans: dict[str, ModuleSpan] = {}
    for visit in graph.visits:
        stop = visit.position + (visit.op is not None)
        for depth, call in enumerate(visit.calls):
            known = spans.get(call.path)
            start = min(known.start, visit.position) if known else visit.position
            last = max(known.stop, stop) if known else stop
            spans[call.path] = ModuleSpan(call=call, start=start, stop=last, depth=depth)
    return spans


def _names(graph: Graph, spans: Mapping[str, ModuleSpan]) -> dict[int, list[str]]:
    """Map every position to its names, best first: outer modules, `:after` before `:before`."""
    ranked: dict[int, list[tuple[tuple[int, int, int], str]]] = defaultdict(list)
    for path, span in spans.items():
        ranked[span.stop].append(((0, span.depth, 0), path + AFTER))
        ranked[span.start].append(((0, span.depth, 1), path + BEFORE))
    for position, name in _operation_names(graph).items():
        ranked[position + 1].append(((1, 0, 0), name + AFTER))
        ranked[position].append(((1, 0, 1), name + BEFORE))
    return {position: [name for _, name in sorted(names)] for position, names in ranked.items()}


def _operation_names(graph: Graph) -> dict[int, str]:
    """Name operations by innermost module and operator, numbered within the module."""
    counts: Counter[str] = Counter()
    names: dict[int, str] = {}
    for visit in graph.visits:
        if visit.op is None:
            continue
        operator = graph.ops[visit.position].packet
        path = visit.calls[-1].path if visit.calls else ""
        base = f"{path}/{operator}"
        counts[base] += 1
        names[visit.position] = base if counts[base] == 1 else f"{base}.{counts[base]}"
    return names


def crossing_values(graph: Graph) -> list[tuple[Value, ...]]:
    """Return for every position the values that are computed before it and used after it, in order."""
    last = last_uses(graph.ops, references(graph.outputs))
    num_positions = len(graph.ops) + 1
    crossing: list[list[Value]] = [[] for _ in range(num_positions)]
    made = [(0, value) for value in graph.tensor_inputs()]
    made += [(index + 1, graph.values[op.name]) for index, op in enumerate(graph.ops) if op.name in graph.values]
    for first, value in made:
        for position in range(first, last.get(value.name, -1) + 1):
            crossing[position].append(value)
    return [tuple(values) for values in crossing]


def find_blocks(graph: Graph, work: Sequence[float]) -> list[ModuleSpan]:
    """Return the repeated blocks in order: the numbered modules of the most frequent class that has half of the work.

    For DeiT these are `blocks.0` to `blocks.11`, for T5 the blocks of encoder and decoder, for Swin the 24 blocks of
    all four levels. Raises `CutError` if a model has no such class.
    """
    spans = module_spans(graph)
    kinds: dict[str, list[ModuleSpan]] = defaultdict(list)
    called_again = {path.partition("@")[0] for path in spans if "@" in path}
    for path, span in spans.items():
        if span.stop > span.start and (_INDEXED.fullmatch(path) or path in called_again):
            kinds[span.call.kind].append(span)
    total = sum(work)
    candidates = [
        sorted(group, key=lambda span: span.start)
        for group in map(_outermost, kinds.values())
        if len(group) > 1 and sum(sum(work[span.start : span.stop]) for span in group) >= total / 2
    ]
    if not candidates:
        raise CutError(f"{graph.model} has no repeated blocks with half of its work; use the policy 'balanced'")
    return max(candidates, key=lambda group: (len(group), -min(span.depth for span in group)))


def _outermost(group: list[ModuleSpan]) -> list[ModuleSpan]:
    """Remove spans inside other spans of the same class."""
    kept: list[ModuleSpan] = []
    for span in sorted(group, key=lambda span: (span.start, -span.stop, span.depth)):
        if not kept or span.start >= kept[-1].stop:
            kept.append(span)
    return kept


def parameter_pieces(graph: Graph, blocks: Sequence[ModuleSpan]) -> tuple[list[int], list[int]]:
    """Return the start positions and bytes of the pieces with parameters, in order.

    A piece is a child of a repeated block (norm, attention, MLP), or any other operation with parameters. A parameter
    is counted at its first use.
    """
    spans = module_spans(graph)
    pieces: dict[int, int] = {}
    sizes = {state.value.name: state.value.num_bytes({}) for state in graph.states if state.kind == "parameter"}
    home = _piece_starts(spans, blocks)
    for position, op in enumerate(graph.ops):
        for name in op.uses():
            size = sizes.pop(name, 0)  # later uses of the same parameter count 0
            if size:
                start = home.get(position, position)
                pieces[start] = pieces.get(start, 0) + size
    starts = sorted(pieces)
    return starts, [pieces[start] for start in starts]


def _piece_starts(spans: Mapping[str, ModuleSpan], blocks: Sequence[ModuleSpan]) -> dict[int, int]:
    """Map positions inside a block's child module to the child's first position."""
    home: dict[int, int] = {}
    for block in blocks:
        for span in spans.values():
            if span.depth == block.depth + 1 and block.start <= span.start and span.stop <= block.stop:
                home.update(dict.fromkeys(range(span.start, span.stop), span.start))
    return home


def divide(graph: Graph, cuts: Sequence[Cut]) -> list[StageProgram]:
    """Return the stage programs between these cuts, which must be in order.

    Values that cross a cut are outputs of one stage and inputs of the next, in the same order. A stage gets the part of
    the prelude that it needs, and only the state that it uses; a parameter used in two stages is in both.

    Example:
        divide(graph, Cuts(graph).find_all(["blocks.5:after"]))
    """
    bounds = [0, *(cut.position for cut in cuts), len(graph.ops)]
    crossing = crossing_values(graph)
    inputs = [graph.tensor_inputs(), *(crossing[cut.position] for cut in cuts)]
    outputs = [*inputs[1:], output_values(graph)]
    return [
        make_program(graph, graph.ops[start:stop], given, made)
        for (start, stop), given, made in zip(pairwise(bounds), inputs, outputs, strict=True)
    ]


def output_values(graph: Graph) -> tuple[Value, ...]:
    """Return the tensors that the model returns, without duplicates, in order of appearance."""
    names = dict.fromkeys(output.name for output in graph.outputs if isinstance(output, Ref))
    return tuple(graph.values[name] for name in names)


def make_program(
    graph: Graph, ops: tuple[Op, ...], inputs: tuple[Value, ...], outputs: tuple[Value, ...]
) -> StageProgram:
    """Return the program of a range of operations, with the state and the part of the prelude that it needs."""
    needed = {name for op in ops for name in op.uses()} | {value.name for value in outputs}
    prelude: list[Op] = []
    for op in reversed(graph.prelude):
        if op.name in needed:
            prelude.append(op)
            needed.update(op.uses())
    states = tuple(state for state in graph.states if state.value.name in needed)
    return StageProgram(
        symbols=graph.symbols,
        states=states,
        inputs=inputs,
        prelude=tuple(prelude[::-1]),
        ops=ops,
        outputs=outputs,
        callbacks=graph.callbacks,
    )


def graph_fingerprint(graph: Graph) -> str:
    """Return the fingerprint by which plans refer to a graph: equal graphs have equal fingerprints.

    The number of sequences that caches hold does not count.

    Example:
        plan.graph == graph_fingerprint(capture(model, (image,)))
    """
    (program,) = divide(graph, [])
    # a plan for a model is also valid with frozen parameters, and with weights in the blocks of their file
    states = tuple(replace(_of_one(state), requires_grad=False, packing="") for state in program.states)
    return fingerprint(write_program(replace(program, states=states)))


def _of_one(state: State) -> State:
    """Return a cache without its dimension of sequences, and other state as it is."""
    return replace(state, value=replace(state.value, shape=state.value.shape[1:])) if state.kind == "cache" else state


# operators that block gradients although their result is a float
_STOPS = {"aten.detach.default", "aten.detach_.default", "aten.zeros_like.default", "aten.ones_like.default"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPart:
    """A stage of a model in training.

    The program's inputs are the values that cross the cut before it, then `own`: inputs of the model that this stage
    uses, which its process loads itself. `backward_inputs` and `backward_outputs` are the positions of the inputs and
    outputs whose gradients are sent back.

        before ──crossing──▶ stage ──outputs──▶ after
               ◀──gradients──       ◀──gradients──
    """

    program: StageProgram
    crossing: tuple[Value, ...]
    own: tuple[Value, ...]
    backward_inputs: tuple[int, ...]
    backward_outputs: tuple[int, ...]


def divide_for_training(graph: Graph, cuts: Sequence[Cut], trainable: Collection[str]) -> list[TrainingPart]:
    """Return the stages between these cuts, which must be in order; `trainable` names the trained parameters.

    Example:
        divide_for_training(graph, cuts, {"head.weight", "head.bias"})
    """
    bounds = [0, *(cut.position for cut in cuts), len(graph.ops)]
    given = {value.name for value in graph.tensor_inputs()}
    crossing = [tuple(v for v in values if v.name not in given) for values in crossing_values(graph)]
    differentiable = differentiable_values(graph, trainable)
    parts = []
    for start, stop in pairwise(bounds):
        ops = graph.ops[start:stop]
        last = stop == len(graph.ops)
        outputs = output_values(graph) if last else crossing[stop]
        before = crossing[start] if start else ()
        used = {name for op in ops for name in op.uses()} | ({value.name for value in outputs} if last else set())
        own = tuple(value for value in graph.tensor_inputs() if value.name in used)
        program = make_program(graph, ops, (*before, *own), outputs)
        back, out = (tuple(i for i, v in enumerate(values) if v.name in differentiable) for values in (before, outputs))
        parts.append(
            TrainingPart(program=program, crossing=before, own=own, backward_inputs=back, backward_outputs=out)
        )
    return parts


def differentiable_values(graph: Graph, trainable: Collection[str], inputs: Collection[str] = ()) -> set[str]:
    """Return the names of values through which a gradient may reach a trainable parameter, or one of these inputs."""
    found = {s.value.name for s in graph.states if s.kind == "parameter" and s.source in trainable} | set(inputs)
    for op in graph.ops:
        if op.no_grad or op.target in _STOPS or found.isdisjoint(op.uses()):
            continue
        if _is_float(graph, op):
            found.add(op.name)
            found.update(effect(op).writes)
    return found


def written_inputs(part: TrainingPart) -> set[str]:
    """Return the inputs of a stage that its own operations write to; autograd needs copies of these."""
    written = {name for op in part.program.ops for name in effect(op).writes}
    shares: dict[str, set[str]] = {}
    for op in part.program.ops:
        origins = {origin for name in effect(op).shares for origin in shares.get(name, {name})}
        shares[op.name] = origins or {op.name}
    roots = {origin for name in written for origin in shares.get(name, {name})}
    return roots & {value.name for value in part.program.inputs}


def _is_float(graph: Graph, op: Op) -> bool:
    value = graph.values.get(op.name)
    return value is None or value.dtype.is_floating_point or value.dtype.is_complex
