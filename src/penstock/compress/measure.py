"""Accuracy and throughput of a model on images, with a runtime in this process."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from penstock.deploy.state import load_state
from penstock.errors import UsageError
from penstock.graph.capture import capture
from penstock.graph.cuts import divide
from penstock.measure.profiler import relative_error
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
    """Return every runtime of a float32 model with each of its precisions, as written on the command line.

    Without `compiled`, which would compile each pruned model, and those of a GPU.
    """
    choices = [RuntimeChoice(name, precision) for name, kind in RUNTIMES.items() for precision in kind.precisions]
    return [str(choice) for choice in choices if not choice.is_stored and choice.name not in {"compiled", "cuda"}]


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
            sources[name]
            for op in self.program.ops
            if op.target == "aten.linear.default"
            for name in op.uses()
            if name in sources
        )
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
    ) -> Callable[[int], tuple[Tensor, float]]:
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


INT8 = RuntimeChoice("onnxruntime", "int8")
_PASSES = 9


class LayerLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of quantizing a single linear layer to 8 bits.

    `error` is the norm of the change of the outputs, relative to the norm of the outputs; `saved_s` the seconds saved
    per row.
    """

    layer: str
    error: float
    saved_s: float


def layer_losses(model: OnRuntimes, inputs: Sequence[Tensor]) -> list[LayerLoss]:
    """Quantize each linear layer alone, and return the effects, largest error first.

    Example:
        for loss in layer_losses(OnRuntimes(model, (image,)), images):
            print(loss.layer, f"{loss.error:.2%}")

    Times are measured in one process; for single layers of small models they are within noise.
    """
    layers = model.linear_layers()
    exact = model.load(str(RuntimeChoice("onnxruntime")))
    wanted, exact_s = _run(model, exact, inputs)
    found = []
    for layer in layers:
        keep = tuple(other for other in layers if other != layer)
        outputs, seconds = _run(model, model.load(str(RuntimeChoice(INT8.name, INT8.precision, keep))), inputs)
        found.append(LayerLoss(layer=layer, error=relative_error(wanted, outputs), saved_s=exact_s - seconds))
    return sorted(found, key=lambda loss: -loss.error)


def keeping(losses: Sequence[LayerLoss], count: int) -> str:
    """Return the name of the 8-bit runtime that keeps the `count` most sensitive layers in float32.

    Example:
        keeping(losses, 2)      # 'onnxruntime:int8+blocks.11.mlp.fc2+blocks.0.attn.qkv'
    """
    return str(RuntimeChoice(INT8.name, INT8.precision, tuple(loss.layer for loss in losses[:count])))


def _run(model: OnRuntimes, runtime: StageRuntime, inputs: Sequence[Tensor]) -> tuple[Tensor, float]:
    with torch.no_grad():
        outputs = torch.cat([runtime(model.sizes, [image[None].clone()])[0] for image in inputs])
        seconds = []
        for _ in range(_PASSES):
            begin = time.perf_counter()
            runtime(model.sizes, [inputs[0][None].clone()])
            seconds.append(time.perf_counter() - begin)
    return outputs, statistics.median(seconds)
