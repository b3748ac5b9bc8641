"""Inputs whose results are known, so that whatever computes them can be held against them bit for bit."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from penstock.engine.driver import Microbatch
from penstock.graph.graph import Graph
from penstock.measure.costs import random_input
from penstock.zoo.models.models import ZooModel

_NUM_DISTINCT = 8


class Samples:
    """A few distinct inputs of a model, which a stream takes round-robin, and what they should return.

    Example:
        samples = Samples(zoo, graph, {"batch": 1})
        samples.expect(outputs)                    # of one process, one list of tensors for each of samples.inputs
        difference = samples.difference()
        for index, outputs in enumerate(deployment.stream(samples.feed(200))):
            difference.add(index, outputs)
    """

    def __init__(self, zoo: ZooModel, graph: Graph, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        generator = torch.Generator().manual_seed(0)
        self.inputs = [
            [_example_input(zoo, graph, i, sizes, generator) for i in range(len(graph.tensor_inputs()))]
            for _ in range(_NUM_DISTINCT)
        ]
        self._expected: Sequence[Sequence[Tensor]] = ()

    def expect(self, outputs: Sequence[Sequence[Tensor]]) -> None:
        """Take these outputs for the right ones, unless there are some already."""
        self._expected = self._expected or outputs

    def feed(self, count: int) -> Iterator[Microbatch]:
        """Yield this many microbatches."""
        for index in range(count):
            yield self.inputs[index % _NUM_DISTINCT], self._sizes

    def difference(self) -> "Difference":
        """Begin to compare a stream's results."""
        return Difference(self._expected)


class Difference:
    """How far results are from the expected ones: whether they are equal, and the largest distance."""

    def __init__(self, expected: Sequence[Sequence[Tensor]]) -> None:
        self._expected = expected
        self.equal = True
        self.largest = 0.0

    def add(self, index: int, outputs: Sequence[Tensor]) -> None:
        """Compare the result of one microbatch."""
        for expected, given in zip(self._expected[index % _NUM_DISTINCT], outputs, strict=True):
            if not torch.equal(expected, given):
                self.equal = False
                self.largest = max(self.largest, float((expected - given).abs().max()))


def _example_input(
    zoo: ZooModel, graph: Graph, index: int, sizes: Mapping[str, int], generator: torch.Generator
) -> Tensor:
    """Make one input like the example: other numbers where it has floats, other rows where it has integers."""
    value = graph.tensor_inputs()[index]
    if value.dtype.is_floating_point:
        return random_input(value, dict(sizes), generator)
    examples = [x for x in [*zoo.example_args, *zoo.example_kwargs.values()] if isinstance(x, Tensor)]
    example = examples[index]
    shape = value.evaluate(sizes)
    if example.dtype == torch.bool or int(example.max()) <= 1:
        return example[:1].expand(shape).clone() if example.dim() else example.clone()
    return torch.randint(0, int(example.max()) + 1, shape, generator=generator, dtype=value.dtype)
