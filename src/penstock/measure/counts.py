"""A profile without measurements: seconds and bytes are counted from shapes."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import msgspec

from penstock.graph.cuts import Cut, Cuts, graph_fingerprint
from penstock.graph.graph import SECONDS_PER_CROSSING_BYTE, Graph, count_work
from penstock.measure.backward import Loss, TrainingBytes, loss_bytes, unit_bytes
from penstock.measure.costs import cached_by_units, held_by_units, line_through, working_bytes
from penstock.runtime.onnx.blocks import PART_BYTES
from penstock.spec.profile import COUNTED, Boundary, Profile, Unit


def counted_profile(graph: Graph, rows: int, count: Callable[[Sequence[Cut]], Sequence[Unit]] | None = None) -> Profile:
    """Return a profile of a graph for microbatches of n rows, in seconds of a nominal core.

    Units have the bytes that `count` finds between cuts, by default only those of parameters. Seconds are roughly
    proportional to real times, which suffices because device speeds are observed relative to the same counts.

    Example:
        plan = make_plan(counted_profile(graph, rows=1), cluster)
    """
    rows = graph.fixed_batch or rows
    cuts = list(Cuts(graph))
    positions = _positions(graph, cuts)
    reached = [0.0, *accumulate(count_work(graph, graph.sizes(rows)))]
    held = held_by_units(graph, positions) if count is None else []
    counted = count(cuts) if count else [Unit(forward_s=(0.0,), parameters=each) for each in held]
    units = tuple(
        msgspec.structs.replace(unit, forward_s=(reached[stop] - reached[start],))
        for (start, stop), unit in zip(pairwise(positions), counted, strict=True)
    )
    return Profile(
        model=graph.model, graph=graph_fingerprint(graph), device=COUNTED, threads=1, rows=(rows,),
        boundaries=boundaries_of(graph, cuts), units=units,
        send_s_per_byte=SECONDS_PER_CROSSING_BYTE, receive_s_per_byte=SECONDS_PER_CROSSING_BYTE,
    )  # fmt: skip


def units_in_bytes(
    graph: Graph, cuts: Sequence[Cut], rows: int, *, largest: Mapping[str, int] | None = None,
    single: Mapping[str, int] | None = None, training: bool = False, loss: Loss | None = None,
) -> tuple[Unit, ...]:  # fmt: skip
    """Return the units between cuts with their bytes, and without seconds; for the arguments, see `profile_graph`.

    Example:
        sum(unit.kept_bytes_per_row for unit in units_in_bytes(graph, list(Cuts(graph)), rows=4, training=True))
    """
    positions, boundaries = _positions(graph, cuts), boundaries_of(graph, cuts)
    held, cached = held_by_units(graph, positions, packed=True), cached_by_units(graph, positions)
    one, two = (working_bytes(graph, positions, count, largest) for count in (1, 2))
    least = working_bytes(graph, positions, 1, single) if single is not None else [0.0] * len(one)
    if any(state.packing for state in graph.states):
        least = [max(some, making) for some, making in zip(least, _making_bytes(held), strict=True)]
    units = [
        Unit(
            forward_s=(0.0,), parameters=held[index], kept_bytes_per_row=cached[index],
            working_bytes_per_row=two[index] - one[index], working_bytes=max(least[index], 2 * one[index] - two[index]),
        )
        for index in range(len(positions) - 1)
    ]  # fmt: skip
    if training:
        needs = zip(units, unit_bytes(graph, cuts), boundaries[1:], strict=True)
        units = [_with_bytes(unit, need, rows, after) for unit, need, after in needs]
    if loss is not None:
        units[-1] = _with_bytes(units[-1], loss_bytes(graph, loss), rows)
    return tuple(units)


def _making_bytes(held: Sequence[tuple[tuple[str, int], ...]]) -> list[float]:
    """Return the bytes that an engine takes for a moment while it is made of a unit's weights in blocks.

    It is made in parts of 32 MiB, or of one weight.
    """
    sizes = [max(dict(unit).values(), default=0) for unit in held]
    part = min(sum(sum(dict(unit).values()) for unit in held), 2 * PART_BYTES)
    return [max(2.0 * size, 1.5 * part) for size in sizes]


def _positions(graph: Graph, cuts: Sequence[Cut]) -> list[int]:
    return [0, *(cut.position for cut in cuts), len(graph.ops)]


def _with_bytes(unit: Unit, needs: TrainingBytes, rows: int, after: Boundary | None = None) -> Unit:
    """Add the bytes kept until a backward, and use the backward's working memory if larger, for `rows` rows.

    The backward of a unit begins with the gradients of the values that cross after it.
    """
    per_row, constant = needs.working_per_row, needs.working
    if after is not None:
        per_row, constant = per_row + after.bytes_per_row, constant + after.constant_bytes
    if unit.working_bytes_per_row * rows + unit.working_bytes < per_row * rows + constant:
        unit = msgspec.structs.replace(unit, working_bytes_per_row=per_row, working_bytes=constant)
    return msgspec.structs.replace(unit, kept_bytes_per_row=unit.kept_bytes_per_row + needs.kept_per_row)


def boundaries_of(graph: Graph, cuts: Sequence[Cut]) -> tuple[Boundary, ...]:
    """Return the boundaries of a graph, its ends and cuts, with the bytes that cross there."""
    results = [graph.values[output.name] for output in graph.outputs if hasattr(output, "name")]
    groups = [("input", graph.tensor_inputs()), *((cut.name, cut.crossing) for cut in cuts), ("output", results)]
    boundaries = []
    for name, values in groups:
        per_row, constant = line_through(values, graph)
        boundaries.append(Boundary(name=name, bytes_per_row=max(0.0, per_row), constant_bytes=max(0.0, constant)))
    return tuple(boundaries)
