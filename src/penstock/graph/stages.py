"""Division of a graph at its cuts: into stage programs, and into the parts of stages that train."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from penstock.graph.cuts import Cut, crossing_values
from penstock.graph.graph import Graph
from penstock.graph.ops import Op, Ref, State, effect
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
