"""A graph with frozen leading layers, which compute as in evaluation and write no state; the rest still trains.

training     |  layers 0 .. k-1        | layers k ..  |
evaluation   |  layers 0 .. k-1  |  layers k ..    |
                        │               │
frozen       |  as evaluated     | as it trains |
"""

import dataclasses
from collections.abc import Mapping, Sequence

from penstock.errors import CutError, UsageError
from penstock.graph.cuts import Cut, Cuts, crossing_values, find_blocks, parameter_pieces
from penstock.graph.graph import Graph, count_work
from penstock.graph.ops import Op, Ref, State, substitute
from penstock.values import Value

_FROZEN = "frozen_"  # prefix for names that only the evaluation graph has, so that names stay unique


def find_layers(graph: Graph) -> list[Cut]:
    """Return the cut after each of a model's layers: its repeated blocks, or without them its pieces with parameters.

    Operations before the first block, such as an embedding, belong to the first layer. Raises `CutError` if the model
    allows no cut.
    """
    cuts = Cuts(graph)
    if not len(cuts):
        raise CutError(f"{graph.model} allows no cut, so no part of it can be frozen; train it as a whole")
    try:
        ends = [span.stop for span in find_blocks(graph, count_work(graph, graph.sizes(graph.fixed_batch or 1)))]
    except (
        CutError
    ):  # without blocks, every piece with parameters is a layer, except the last, after which there is no cut
        ends = parameter_pieces(graph, [])[0][1:]
    nearest = {min(cuts, key=lambda cut: abs(cut.position - end)).position for end in ends}
    return [cuts.at(position) for position in sorted(nearest)]


def sources_in(graph: Graph, start: int, end: int) -> set[str]:
    """Return the model's names of the parameters and buffers that the operations between two positions use."""
    by_name = {state.value.name: state.source for state in graph.states if state.kind != "constant"}
    return {by_name[name] for op in graph.ops[start:end] for name in op.uses() if name in by_name}


def sources_before(graph: Graph, position: int) -> set[str]:
    """Return the model's names of the parameters and buffers that operations before a position use."""
    return sources_in(graph, 0, position)


def check_apart(graph: Graph, position: int, trainable: set[str], layers: int) -> None:
    """Raise `UsageError` if frozen layers share a trained weight with the rest, naming the weight."""
    after = sources_in(graph, position, len(graph.ops))
    if shared := sorted(after & sources_before(graph, position) & trainable):
        raise UsageError(
            f"{layers} layers of {graph.model} cannot be frozen: they share {shared[0]} with layers that still train; "
            "untie it, freeze it yourself with requires_grad_(False), or use freeze='none'"
        )


def freeze_prefix(training: Graph, evaluation: Graph, cut: Cut, evaluated: Cut) -> Graph:
    """Return the training graph with the operations before a cut replaced by the evaluation graph's before `evaluated`.

    In the result, the cut is at `evaluated.position`. Operations after it keep their names, so they draw the same
    dropout. Raises `CutError` if the crossing values differ between evaluation and training.
    """
    renamed = _matched(
        training, cut, crossing_values(training)[cut.position], crossing_values(evaluation)[evaluated.position]
    )
    states, names = _states(training, evaluation)
    renamed |= names
    given = [(a.name, b.name) for a, b in zip(evaluation.tensor_inputs(), training.tensor_inputs(), strict=True)]
    renamed |= dict(given)
    prefix, rest = evaluation.ops[: evaluated.position], training.ops[cut.position :]
    for op in (*evaluation.prelude, *prefix):
        renamed.setdefault(op.name, _FROZEN + op.name)
    shift = evaluated.position - cut.position
    own = [visit for visit in evaluation.visits if visit.position < evaluated.position]
    after = [visit for visit in training.visits if visit.position >= cut.position]
    kept = {op.name for op in (*training.prelude, *rest)} | {value.name for value in training.tensor_inputs()}
    values = {name: value for name, value in training.values.items() if name in kept}
    values |= {
        renamed[name]: dataclasses.replace(value, name=renamed[name])
        for name, value in evaluation.values.items()
        if name in renamed
    }
    return dataclasses.replace(
        training,
        states=(*training.states, *states),
        prelude=(*training.prelude, *(_renamed(op, renamed) for op in evaluation.prelude)),
        ops=(*(_renamed(op, renamed) for op in prefix), *rest),
        visits=(
            *(dataclasses.replace(v, op=v.op and renamed[v.op]) for v in own),
            *(dataclasses.replace(v, position=v.position + shift) for v in after),
        ),
        values=values,
        constants={
            **training.constants,
            **{s.source: evaluation.constants[_original(s)] for s in states if _original(s) in evaluation.constants},
        },
        forbidden={
            **{p: why for p, why in evaluation.forbidden.items() if p < evaluated.position},
            **{p + shift: why for p, why in training.forbidden.items() if p > cut.position},
        },
    )


def _matched(training: Graph, cut: Cut, crossing: Sequence[Value], evaluated: Sequence[Value]) -> dict[str, str]:
    """Map the names of crossing values in evaluation to those in training."""
    alike = [(value.dtype, value.shape) for value in crossing] == [(value.dtype, value.shape) for value in evaluated]
    if not alike:
        raise CutError(
            f"the values crossing {cut.name} of {training.model} differ between training and evaluation, so layers "
            "before it cannot be frozen; freeze another number of layers"
        )
    return {was.name: value.name for was, value in zip(evaluated, crossing, strict=True)}


def _states(training: Graph, evaluation: Graph) -> tuple[list[State], dict[str, str]]:
    """Return the state that only the evaluation graph has, under new names, and the new names of all its state."""
    known = {state.source: state.value.name for state in training.states if state.kind != "constant"}
    added, names = [], {}
    for state in evaluation.states:
        name = known.get(state.source) if state.kind != "constant" else None
        if name is None:
            name = _FROZEN + state.value.name
            source = _FROZEN + state.source if state.kind == "constant" else state.source
            added.append(State(dataclasses.replace(state.value, name=name), source, state.kind))
        names[state.value.name] = name
    return added, names


def _original(state: State) -> str:
    return state.source.removeprefix(_FROZEN) if state.kind == "constant" else state.source


def _renamed(op: Op, names: Mapping[str, str]) -> Op:
    references = {old: Ref(new) for old, new in names.items()}
    arguments = tuple(substitute(argument, references) for argument in op.arguments)
    keywords = {key: substitute(argument, references) for key, argument in op.keywords.items()}
    return Op(names[op.name], op.target, arguments, keywords)
