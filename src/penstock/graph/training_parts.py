"""Division of a captured graph for training: activations, locally loaded inputs, and gradients."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.graph.cuts import Cut, crossing_values
from penstock.graph.graph import Graph
from penstock.graph.ops import Op, effect
from penstock.graph.program import StageProgram
from penstock.graph.stages import make_program, output_values
from penstock.values import Value

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
