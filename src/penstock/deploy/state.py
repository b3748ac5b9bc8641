"""Tensors by name: read from a model, sent to another process, received there."""

from torch import Tensor

from penstock.errors import UsageError
from penstock.graph.graph import Graph
from penstock.graph.ops import State
from penstock.zoo.weights.weights import Weights


def load_state(graph: Graph, state: State, weights: Weights) -> Tensor:
    """Read one tensor of a model's state to the host: constants from the graph, the rest by name from the weights."""
    if state.kind == "constant":
        return graph.constants[state.source].cpu()
    if state.kind == "buffer" and state.source not in weights.names():
        # a buffer that checkpoints leave out: computed when the model was built
        return graph.constants[state.source].cpu()
    tensor = weights.load(state.source)
    wanted = state.value.evaluate({})
    if tuple(tensor.shape) != wanted:
        raise UsageError(f"{state.source} is {tuple(tensor.shape)} in the weights but {wanted} in the model")
    return tensor.detach().to("cpu", state.value.dtype)
