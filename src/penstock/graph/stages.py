"""Division of a graph into stage programs at its cuts."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from penstock.graph.cuts import Cut, crossing_values
from penstock.graph.graph import Graph
from penstock.graph.ops import Op, Ref, State
from penstock.graph.program import StageProgram, write_program
from penstock.spec.fields import fingerprint
from penstock.values import Value


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
        symbols=graph.symbols, states=states, inputs=inputs, prelude=tuple(prelude[::-1]), ops=ops, outputs=outputs,
        callbacks=graph.callbacks,
    )  # fmt: skip


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
