"""Accuracy and throughput of a model on images, with a runtime in this process."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.deploy.state import load_state
from penstock.errors import UsageError
from penstock.graph.capture import capture
from penstock.graph.stages import divide
from penstock.runtime.registry import RUNTIMES, RuntimeChoice, StageRuntime, parse_runtime
from penstock.zoo.weights.weights import ModuleWeights

_WARM_UP = 3
_TURN = 10  # microbatches per turn
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Examples:
    """Preprocessed images, and their classes."""

    inputs: Sequence[Tensor]
    labels: Sequence[int]


@dataclass(frozen=True, slots=True)
class Performance:
    """Performance on a runtime: the fraction of correctly classified images, and rows per second in one process."""

    accuracy: float
    rows_per_s: float


def names_of_runtimes() -> list[str]:
    """Return every runtime of a float32 model with each of its precisions, as written on the command line."""
    choices = [RuntimeChoice(name, precision) for name, kind in RUNTIMES.items() for precision in kind.precisions]
    return [str(choice) for choice in choices if not choice.is_stored]


class OnRuntimes:
    """A model that can run on any runtime; `program` and `tensors` describe it completely.

    Example:
        OnRuntimes(model, (image,)).measure("openvino:bfloat16", examples, microbatch_size=8)

    Raises `CaptureError` for a model that cannot be captured.
    """

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> None:
        self._graph = graph = capture(module, tuple(args), dict(kwargs or {}))
        (self.program,) = divide(graph, [])
        weights = ModuleWeights(module)
        self.tensors = {state.value.name: load_state(graph, state, weights) for state in graph.states}
        self.sizes = graph.sizes(1)

    def load(self, runtime: str) -> StageRuntime:
        """Load the model on a runtime; raises `PlanError` if the runtime cannot run it or is not installed."""
        return parse_runtime(runtime).load(self.program, self.tensors)

    def linear_layers(self) -> list[str]:
        """Return the paths of the modules with weights of linear operations, in order."""
        sources = {state.value.name: state.source for state in self.program.states}
        found = (
            sources[name] for op in self.program.ops if op.target == "aten.linear.default"
            for name in op.uses() if name in sources
        )  # fmt: skip
        return list(dict.fromkeys(source.rpartition(".")[0] for source in found))

    def measure(self, runtime: str, examples: Examples, microbatch_size: int = 1) -> Performance:
        """Measure accuracy and rate, with n images at a time.

        The rate is taken from the median microbatch, so that short disturbances do not count. Raises as `load` does,
        and `UsageError` if the model has a different fixed batch size.
        """
        run = self._runner(runtime, examples.inputs, microbatch_size)
        starts = range(0, len(examples.inputs), microbatch_size)
        scores, rates = zip(*map(run, starts), strict=True)
        right = int((torch.cat(scores).argmax(-1) == torch.tensor(examples.labels)).sum())
        return Performance(right / len(examples.labels), statistics.median(rates))

    def turn(self, runtime: str, inputs: Sequence[Tensor], microbatch_size: int = 1) -> Callable[[], float]:
        """Load a runtime, and return a function that measures its rate with a few microbatches, for `in_turns`."""
        run = self._runner(runtime, inputs, microbatch_size)
        starts = range(0, len(inputs), microbatch_size)[:_TURN]
        return lambda: statistics.median(run(start)[1] for start in starts)

    def _runner(
        self, runtime: str, inputs: Sequence[Tensor], microbatch_size: int
    ) -> Callable[[int], tuple[Tensor, float]]:  # fmt: skip
        """Load and warm up a runtime; return a function from a microbatch's start to its scores and rate."""
        fixed = self._graph.fixed_batch
        if fixed not in (None, microbatch_size):
            raise UsageError(
                f"{self._graph.model} fixes its batch size at {fixed}, so it cannot be measured with "
                f"{microbatch_size} images at a time; use --microbatch-size {fixed}"
            )
        loaded = self.load(runtime)

        def run(start: int) -> tuple[Tensor, float]:
            images = torch.stack(list(inputs[start : start + microbatch_size]))
            begin = time.perf_counter()
            with torch.no_grad():
                scores = loaded(self._graph.sizes(len(images)), [images])[0]
            return scores, len(images) / (time.perf_counter() - begin)

        for start in range(0, len(inputs), microbatch_size)[:_WARM_UP]:
            run(start)
        return run


def in_turns(turns: Sequence[Callable[[], float]]) -> list[tuple[float, ...]]:
    """Return the rates of several models, measured in alternating turns; every second round has the reverse order.

    A machine's speed drifts: rates of the same round are comparable, rates measured minutes apart are not.

    >>> in_turns([lambda: 1.0, lambda: 2.0])
    [(1.0, 1.0, 1.0, 1.0, 1.0), (2.0, 2.0, 2.0, 2.0, 2.0)]
    """
    rates: list[list[float]] = [[] for _ in turns]
    for number in range(_ROUNDS):
        for place in range(len(turns))[:: -1 if number % 2 else 1]:
            rates[place].append(turns[place]())
    return [tuple(each) for each in rates]
