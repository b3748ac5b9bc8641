"""The whole model as one safetensors file, gathered tensor by tensor from the processes that hold it."""

import json
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import ModelError, PenstockError
from penstock.train.tensors import holding
from penstock.train.trainer import Trainer
from penstock.transport.base import FEEDER, WORD_BYTES, receive_bytes, receive_tensor, send_bytes, send_tensor
from penstock.transport.collectives import exchange
from penstock.transport.tags import STATE
from penstock.zoo.weights.write_tensors import save_weights


class GatheredWeights:
    """The model's tensors as they are now, wherever they are; for the first process, while the others `serve`.

    Names are those of the model's `state_dict`, so a tied weight has each of its names.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._names = trainer.captured.names
        graph = trainer.captured.graph
        self._states = {state.source: state for state in graph.states}

    def names(self) -> Collection[str]:
        """Return every name that can be loaded."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        state = self._states.get(self._names[name])
        return state.value.evaluate({}) if state else self._trainer.captured.weights.shape(self._names[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype."""
        state = self._states.get(self._names[name])
        return state.value.dtype if state else self._trainer.captured.weights.dtype(self._names[name])

    def load(self, name: str) -> Tensor:
        """Return one tensor, from the process that has it; one that no stage uses is as it was given or resumed."""
        source = self._names[name]
        if source in self._trainer.tensors.unused:
            return self._trainer.tensors.unused[source]
        if source not in self._states:
            return self._trainer.captured.weights.load(source)
        rank = self._trainer.grid.replicas[0].stages[holding(self._trainer.parts, source)[0]]
        transport = self._trainer.world.transport
        if rank == transport.rank:
            return held(self._trainer, source).cpu()
        send_bytes(transport, json.dumps({"name": source}).encode(), rank, STATE)
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        receive_tensor(transport, tensor, rank, STATE)
        return tensor


def held(trainer: Trainer, source: str) -> Tensor:
    """Return a tensor of this process by its name in the model."""
    tensors = trainer.tensors
    return (tensors.parameters[source] if source in tensors.parameters else tensors.others[source]).detach()


def save_model(trainer: Trainer, path: Path) -> None:
    """Write the whole model to a safetensors file; every process calls this, the first one writes.

    Raises `ModelError` on every process where the file cannot be written.
    """
    transport = trainer.world.transport
    message = ""
    with trainer.explained():
        if transport.rank == FEEDER:
            try:
                save_weights(GatheredWeights(trainer), path)
            except ModelError as error:
                message = str(error)
            for rank in range(1, transport.size):
                send_bytes(transport, b"{}", rank, STATE)
        else:
            while (
                name := json.loads(receive_bytes(transport, FEEDER, STATE, limit=WORD_BYTES)).get("name")
            ) is not None:
                send_tensor(transport, held(trainer, name), FEEDER, STATE)
        told = exchange(transport, {"failed": message})
    if told[FEEDER]["failed"]:
        raise _everywhere(ModelError(told[FEEDER]["failed"]))


def _everywhere(error: PenstockError) -> PenstockError:
    error.everywhere = True  # type: ignore[attr-defined]
    return error
