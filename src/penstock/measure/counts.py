"""A profile without measurements: costs are counted from shapes."""

from itertools import accumulate, pairwise

from penstock.graph.cuts import Cuts
from penstock.graph.graph import Graph
from penstock.graph.stages import graph_fingerprint
from penstock.graph.work import SECONDS_PER_CROSSING_BYTE, count_work
from penstock.measure.costs import held_by_units
from penstock.measure.profiler import boundaries_of
from penstock.spec.profile import Profile, Unit


def counted_profile(graph: Graph, rows: int) -> Profile:
    """Return a profile of a graph for microbatches of n rows, in seconds of a nominal core.

    They are roughly proportional to real times, which suffices because device speeds are observed relative to the same
    counts.

    Example:
        plan = make_plan(counted_profile(graph, rows=1), cluster)
    """
    rows = graph.fixed_batch or rows
    cuts = list(Cuts(graph))
    positions = [0, *(cut.position for cut in cuts), len(graph.ops)]
    reached = [0.0, *accumulate(count_work(graph, graph.sizes(rows)))]
    units = tuple(
        Unit(forward_s=(reached[stop] - reached[start],), parameters=held)
        for (start, stop), held in zip(pairwise(positions), held_by_units(graph, positions), strict=True)
    )
    return Profile(
        model=graph.model, graph=graph_fingerprint(graph), device="counted", threads=1, rows=(rows,),
        boundaries=boundaries_of(graph, cuts), units=units,
        send_s_per_byte=SECONDS_PER_CROSSING_BYTE, receive_s_per_byte=SECONDS_PER_CROSSING_BYTE,
    )  # fmt: skip
