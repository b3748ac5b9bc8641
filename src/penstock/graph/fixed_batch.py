"""Graphs of models that fix their batch size: every microbatch must have that many rows."""

import dataclasses

from penstock.errors import UsageError
from penstock.graph.graph import Graph
from penstock.graph.ops import references
from penstock.values import BATCH, Size, Value


def with_rows(graph: Graph) -> Graph:
    """Return a graph with a fixed batch size whose inputs and outputs have the batch as a symbol; others as they are.

    So a batch is bound, labelled and joined as that of any model, and `check_fixed` compares its size.
    """
    rows = graph.fixed_batch
    if rows is None or graph.symbols:
        return graph

    def marked(value: Value) -> Value:
        is_batch = bool(value.shape) and value.shape[0] == rows
        return dataclasses.replace(value, shape=(Size(BATCH), *value.shape[1:])) if is_batch else value

    inputs = tuple(value if value is None else marked(value) for value in graph.inputs)
    given = {value.name: value for value in inputs if value is not None}
    returned = {name: marked(graph.values[name]) for name in references(graph.outputs) if name in graph.values}
    return dataclasses.replace(graph, symbols=(BATCH,), inputs=inputs, values={**graph.values, **returned, **given})


def check_fixed(graph: Graph, rows: int) -> None:
    """Raise `UsageError` if a model that fixes its batch size gets another number of rows."""
    if graph.fixed_batch is not None and rows != graph.fixed_batch:
        raise UsageError(
            f"{graph.model} was captured with {graph.fixed_batch} rows, and {graph.why_fixed}; got {rows} rows; give "
            "it batches of that size, as with drop_last=True, or make its forward pass take any number of rows"
        )


def check_whole(graph: Graph, num_microbatches: int, num_replicas: int) -> None:
    """Raise `UsageError` if batches of a model that fixes its batch size would be cut."""
    if graph.fixed_batch is not None and (num_microbatches > 1 or num_replicas > 1):
        raise UsageError(
            f"{graph.model} was captured with {graph.fixed_batch} rows, and {graph.why_fixed}, so no batch can be cut "
            f"into {num_microbatches} microbatches and {num_replicas} replicas; use microbatches=1 and replicas=1 with "
            f"batches of {graph.fixed_batch} rows, or make its forward pass take any number of rows"
        )
