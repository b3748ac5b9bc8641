"""The lines between the stages of one replica: activations forwards, gradients back."""

from collections.abc import Mapping, Sequence

import torch

from penstock.engine.channels import Apart, LocalEdge, RemoteInlet, RemoteOutlet
from penstock.engine.placement import Replica
from penstock.engine.training_stage import Edges
from penstock.graph.ops import Value
from penstock.graph.training_parts import TrainingPart
from penstock.plan.schedule.round_robin import RoundRobin
from penstock.transport.base import Transport
from penstock.transport.collectives import TRAINING_CHANNELS
from penstock.transport.messages import Format, Formats

# Two buffers at each end, as for inference.
DEPTH = 2
# per pair of neighbours: activations in training, gradients, activations in evaluation
_LANES = 4
ACTIVATIONS, GRADIENTS, EVALUATION = 0, 1, 2
# how many channels one set of lines takes; a larger microbatch makes another set
_SET = 4096


class Lines:
    """The edges of this process's stages, made again when microbatches outgrow their buffers.

    Both ends of a line know the sizes of a step, so both make new ones at the same step. With `direct`, this process's
    device, tensors go from device to device; then every process makes its lines cut by cut, activations first.
    """

    def __init__(
        self, transport: Transport, replica: Replica, parts: Sequence[TrainingPart], *, evaluation: bool = False,
        direct: torch.device | None = None,
    ) -> None:  # fmt: skip
        self._direct = direct
        self._transport = transport
        self._replica = replica
        self._parts = parts
        self._evaluation = evaluation
        self._sizes: dict[str, int] = {}
        self._generation = 0
        self._local: dict[tuple[int, int], LocalEdge] = {}

    def outgrown(self, sizes: Mapping[str, int]) -> bool:
        """Return whether these sizes need new lines."""
        return any(size > self._sizes.get(symbol, 0) for symbol, size in sizes.items())

    def make(self, sizes: Mapping[str, int]) -> dict[int, Edges]:
        """Make the edges of this process's stages for microbatches up to these sizes."""
        self._sizes = {symbol: max(size, self._sizes.get(symbol, 0)) for symbol, size in sizes.items()}
        self._generation += 1
        self._local = {}
        edges = {}
        for stage, rank in enumerate(self._replica.stages):
            if rank == self._transport.rank:
                edges[stage] = self._edges(stage)
        return edges

    def abort(self) -> None:
        """End every wait within this process."""
        for edge in self._local.values():
            edge.abort()

    def _edges(self, stage: int) -> Edges:
        part, last = self._parts[stage], len(self._parts) - 1
        lane = EVALUATION if self._evaluation else ACTIVATIONS
        made = Edges()
        if stage > 0:
            made.inlet = self._inlet(stage - 1, stage, lane, part.crossing)
            if part.backward_inputs and not self._evaluation:
                values = [part.crossing[position] for position in part.backward_inputs]
                made.gradient_outlet = self._outlet(stage, stage - 1, GRADIENTS, values)
        if stage < last:
            made.outlet = self._outlet(stage, stage + 1, lane, part.program.outputs)
            if part.backward_outputs and not self._evaluation:
                values = [part.program.outputs[position] for position in part.backward_outputs]
                made.gradient_inlet = self._inlet(stage + 1, stage, GRADIENTS, values)
        return made

    def _inlet(self, source: int, to: int, lane: int, values: Sequence[Value]) -> LocalEdge | RemoteInlet:
        rank = self._replica.stages[source]
        if rank == self._transport.rank:
            return self._local.setdefault((source, to), LocalEdge(None))
        layout = Formats(RoundRobin([Format(values, self._parts[to].program.symbols, self._sizes)]))
        num_bytes, apart = self._room(layout)
        channel = self._channel(min(source, to), lane)
        return RemoteInlet(self._transport, rank, channel, layout, num_bytes, DEPTH, apart=apart)

    def _outlet(self, source: int, to: int, lane: int, values: Sequence[Value]) -> LocalEdge | RemoteOutlet:
        rank = self._replica.stages[to]
        if rank == self._transport.rank:
            return self._local.setdefault((source, to), LocalEdge(None))
        layout = Formats(RoundRobin([Format(values, self._parts[source].program.symbols, self._sizes)]))
        num_bytes, apart = self._room(layout)
        channel = self._channel(min(source, to), lane)
        return RemoteOutlet(self._transport, rank, channel, layout, num_bytes, DEPTH, apart=apart)

    def _room(self, layout: Formats) -> tuple[int, Apart | None]:
        if self._direct is None:
            return layout.largest(self._sizes), None
        num_bytes, num_apart = layout.largest_apart(self._sizes)
        return num_bytes, Apart(self._direct, num_apart)

    def _channel(self, cut: int, lane: int) -> int:
        return TRAINING_CHANNELS + 2**24 + self._generation % 4096 * _SET + cut % (_SET // _LANES) * _LANES + lane
