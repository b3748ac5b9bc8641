"""Gradient norms of each layer since the beginning of an epoch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.graph.cuts import Cut
from penstock.graph.freeze import sources_before
from penstock.graph.graph import Graph


class LayerNorms:
    """Sums of squared gradients by layer over the steps of an epoch, for the layers on one process.

    Example:
        norms = LayerNorms(layer_of(graph, layers), num_layers=12)
        norms.add({"blocks.0.norm1.weight": gradient})
        norms.squares()    # one sum per layer
    """

    def __init__(self, layers: Mapping[str, int], num_layers: int) -> None:
        self._layers = layers
        self._squares = [0.0] * num_layers

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add a step's gradients, by parameter name; parameters outside all layers are ignored."""
        for name, gradient in gradients.items():
            layer = self._layers.get(name)
            if layer is not None:
                self._squares[layer] += float(torch.linalg.vector_norm(gradient)) ** 2

    def take(self) -> list[float]:
        """Return the sums of squares, and reset them."""
        squares, self._squares = self._squares, [0.0] * len(self._squares)
        return squares

    def put(self, squares: Sequence[float]) -> None:
        """Set the sums of squares, to continue from them."""
        self._squares = list(squares)

    def squares(self) -> list[float]:
        """Return the sums of squares so far."""
        return list(self._squares)


def layer_of(graph: Graph, layers: Sequence[Cut]) -> dict[str, int]:
    """Return the layer of each parameter, by parameter name: the first layer that uses it."""
    found: dict[str, int] = {}
    for number, cut in reversed(list(enumerate(layers))):
        found |= dict.fromkeys(sources_before(graph, cut.position), number)
    return found
