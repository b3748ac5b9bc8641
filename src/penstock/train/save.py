"""Saving of the whole model as one safetensors file, gathered tensor by tensor from all processes."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from penstock.deploy.state import Held, Wanted, redistribute
from penstock.errors import ModelError
from penstock.train.agreement import agreed
from penstock.train.trainer import Trainer
from penstock.transport.base import STATE
from penstock.wire import FEEDER
from penstock.zoo.weights.weight_files import file_order, save_weights


class GatheredWeights:
    """The current tensors of the model on all processes; every process creates this object, and rank 0 loads.

    Names are as in the model's `state_dict`, so a tied weight is listed under each of its names. A tensor that no stage
    uses has its initial or resumed value. Tensors arrive in the order of the file; `finish` receives the remaining
    ones.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._names = trainer.now.captured.names
        self._states = {state.source: state for state in trainer.now.captured.graph.states}
        order = file_order(self)
        have = Held({name: self._holders(name)[:1] for name in order}, self._find)
        want = Wanted(dict.fromkeys(order, (FEEDER,)), self._room)
        self._arriving = redistribute(have, want, trainer.world.transport, STATE)

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        state = self._states.get(self._names[name])
        return state.value.evaluate({}) if state else self._trainer.now.captured.weights.shape(self._names[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype."""
        state = self._states.get(self._names[name])
        return state.value.dtype if state else self._trainer.now.captured.weights.dtype(self._names[name])

    def load(self, name: str) -> Tensor:
        """Return the next tensor, which must have this name, on the host."""
        arrived, tensor = next(self._arriving)
        if arrived != name:
            raise ModelError(
                f"tensors must be loaded in the order of the saved file; {name} was requested, but {arrived} is next"
            )
        return tensor.cpu()

    def finish(self) -> None:
        """Send or receive all remaining tensors."""
        for _ in self._arriving:
            pass

    def _room(self, name: str) -> Tensor:
        return torch.empty(self.shape(name), dtype=self.dtype(name))

    def _holders(self, name: str) -> list[int]:
        return self._trainer.now.tensors.holders(self._names[name]) if self._names[name] in self._states else [FEEDER]

    def _find(self, name: str) -> Tensor:
        source, tensors = self._names[name], self._trainer.now.tensors
        if source in self._states or source in tensors.unused:
            return tensors.find(source)
        return self._trainer.now.captured.weights.load(source)


def save_model(trainer: Trainer, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the whole model to a safetensors file (a collective call); rank 0 writes.

    `metadata` goes into the file's header.

    Raises `ModelError` on every process if the file cannot be written.
    """

    def write() -> None:
        weights = GatheredWeights(trainer)
        try:
            if trainer.world.rank == FEEDER:
                save_weights(weights, path, metadata=metadata)
        except ModelError:
            weights.finish()  # all of it is sent
            raise
        weights.finish()

    agreed(trainer.together, write)
