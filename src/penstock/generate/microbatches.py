"""Steps as microbatches: their tensors, their logits, and whether a row may run alone."""

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.engine.driver import DeployedPipeline
from penstock.generate.lanes import Lanes, Step, room_of
from penstock.graph.call import bind_inputs, build_output
from penstock.graph.graph import Graph
from penstock.runtime.registry import RUNTIMES

_VOCABULARY = 4  # tokens that every model has


class Microbatches:
    """Feeds steps to the stages, and takes their logits in the same order.

    Example:
        sizes = microbatches.feed(pipeline, step)
        logits = microbatches.take(pipeline, sizes)
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        # by shapes of the inputs: the inputs' names in the graph's order, and the sizes
        self._known: dict[tuple[torch.Size, ...], tuple[list[str], dict[str, int]]] = {}

    @property
    def encodes(self) -> bool:
        """True if the model has an encoder."""
        return any(value.name == "source" for value in self._graph.tensor_inputs())

    def feed(self, pipeline: DeployedPipeline, step: Step) -> Mapping[str, int]:
        """Send a step; returns its sizes."""
        given = inputs_of(step)
        shapes = tuple(tensor.shape for tensor in given.values())
        if shapes not in self._known:
            tensors, sizes = bind_inputs(self._graph, (), given)
            names = {id(tensor): name for name, tensor in given.items()}
            self._known[shapes] = [names[id(tensor)] for tensor in tensors], sizes
        order, sizes = self._known[shapes]
        pipeline.feed([given[name] for name in order], [sizes[symbol] for symbol in self._graph.symbols])
        return sizes

    def take(self, pipeline: DeployedPipeline, sizes: Mapping[str, int]) -> Tensor:
        """Wait for the logits [B, K, V] of the oldest step; `sizes` are its own."""
        logits: Tensor = build_output(self._graph, pipeline.take(), sizes)
        return logits


def computes_single_rows(microbatches: Microbatches, deployed: DeployedPipeline, lanes: Lanes) -> bool:
    """Return True if these stages compute the same bits for a row alone as in a full lane.

    Most matrix products do not: they add up in another order for one row. The products of some runtimes do
    (`RuntimeKind.single_rows`), which depends on the processor, so it is tried: three tokens in the first slot, at both
    ends of its cache, with other tokens in the other slots and alone. It is a stream of its own, before any sequence
    is in the caches. Logits that are all equal, as of a padding token's zeros, show nothing.
    """
    runtimes = deployed.job.runtimes
    likely = bool(runtimes) and all(each.precision in RUNTIMES[each.name].single_rows for each in runtimes)
    if not likely or lanes.num_rows == 1 or lanes.recurrent or microbatches.encodes:
        return False
    deployed.begin()
    same = True
    for token, position in enumerate((0, 1, lanes.longest - 1)):
        found = []
        for rows in (lanes.num_rows, 1):
            step = Step(
                rows=list(range(rows)), ids=[[(token + row) % _VOCABULARY] for row in range(rows)],
                positions=[[position]] * rows, last=[0], room=room_of(position + 1),
            )  # fmt: skip
            found.append(microbatches.take(deployed, microbatches.feed(deployed, step))[0])
        same = same and torch.equal(*found) and bool((found[0] != found[0].flatten()[0]).any())
    deployed.finish()
    if deployed.tracer is not None:
        deployed.tracer.own()  # forgets what was recorded of it
        deployed.traces = []
    return same


def inputs_of(step: Step) -> dict[str, Tensor]:
    """Return the inputs of a call that runs one microbatch."""
    found = {
        "ids": torch.tensor(step.ids), "positions": torch.tensor(step.positions), "rows": torch.tensor(step.rows),
        "last": torch.tensor(step.last), "places": torch.arange(step.room),
    }  # fmt: skip
    if step.source:
        found |= {
            "source": torch.tensor(step.source, dtype=torch.int64),
            "source_sizes": torch.tensor(step.source_sizes),
            "source_places": torch.arange(step.source_room),
        }
    return found
