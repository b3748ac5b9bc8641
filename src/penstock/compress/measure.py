"""Accuracy and throughput of a model on images, on a runtime in this process."""

import statistics
import time
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Examples:
    """Images as a model takes them, and their classes."""

    inputs: Sequence[Tensor]
    labels: Sequence[int]


@dataclass(frozen=True, slots=True)
class Performance:
    """Performance of a model on a runtime: the fraction of correctly classified images, and rows per second of one
    process.
    """

    accuracy: float
    rows_per_s: float


def names_of_runtimes() -> list[str]:
    """Return every runtime with each of its precisions, as written on the command line."""
    return [str(RuntimeChoice(name, precision)) for name, kind in RUNTIMES.items() for precision in kind.precisions]


class OnRuntimes:
    """A model on any runtime; `program` and `tensors` are the whole of it.

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
        """Load the model on a runtime; raises `PlanError` if the runtime cannot run it, or is not installed."""
        return parse_runtime(runtime).load(self.program, self.tensors)

    def linear_layers(self) -> list[str]:
        """Return the paths of the modules whose weights linear operations use, in order."""
        sources = {state.value.name: state.source for state in self.program.states}
        found = (
            sources[name] for op in self.program.ops if op.target == "aten.linear.default"
            for name in op.uses() if name in sources
        )  # fmt: skip
        return list(dict.fromkeys(source.rpartition(".")[0] for source in found))

    def measure(self, runtime: str, examples: Examples, microbatch_size: int = 1) -> Performance:
        """Measure accuracy and rate, with n images at a time.

        The rate is that of the median microbatch, so that short disturbances do not count. Raises as `load` does, and
        `UsageError` for a model that takes another number of rows.
        """
        fixed = self._graph.fixed_batch
        if fixed not in (None, microbatch_size):
            raise UsageError(
                f"{self._graph.model} fixes its batch size at {fixed}, so it cannot be measured with "
                f"{microbatch_size} images at a time; use --microbatch-size {fixed}"
            )
        loaded = self.load(runtime)

        def run(start: int) -> tuple[Tensor, float]:
            images = torch.stack(list(examples.inputs[start : start + microbatch_size]))
            begin = time.perf_counter()
            scores = loaded(self._graph.sizes(len(images)), [images])[0]
            return scores, len(images) / (time.perf_counter() - begin)

        starts = range(0, len(examples.inputs), microbatch_size)
        classes, rates = [], []
        with torch.no_grad():
            for start in starts[:_WARM_UP]:
                run(start)
            for start in starts:
                scores, rate = run(start)
                rates.append(rate)
                classes.append(scores.argmax(-1))
        right = int((torch.cat(classes) == torch.tensor(examples.labels)).sum())
        return Performance(right / len(examples.labels), statistics.median(rates))
