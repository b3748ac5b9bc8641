"""Steps of a decoder as CUDA graphs: a stage's calls are captured once for each size, and replayed.

first call of a size:   eager ──▶ outputs        capture ──▶ graph ──replay──▶ the same bits?
later calls:            inputs ──copy──▶ static buffers ──replay──▶ static outputs ──copy──▶ outputs
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.graph.ops import GETITEM, effect, resolve_operator
from penstock.graph.program import StageProgram
from penstock.runtime.bound_calls import Bound
from penstock.runtime.eager import Runtime
from penstock.runtime.training import draws
from penstock.tensors import HOST, copy_exactly
from penstock.text import first_line, note

ENABLED = True  # False in benchmarks that compare with eager
_KEPT_GRAPHS = 64
_PUT = "aten.index_put_.default"
_INDEX = "aten.index.Tensor"  # reads the host only for masks, and then its capture fails


def can_capture(device: torch.device) -> bool:
    """Return True if a device has graphs as CUDA has them."""
    return ENABLED and device != HOST and hasattr(torch.get_device_module(device), "CUDAGraph")


class GraphRuntime(Runtime):
    """A decoder's stage program that replays CUDA graphs, with the bits of eager.

    What cannot be captured, and a graph whose first replay differs from eager in a bit, runs eagerly, with a note.

    Example:
        runtime = GraphRuntime(program, {"head.weight": weight, ...}, torch.device("cuda", 0))
        outputs = runtime({"step": 1, "room": 64}, inputs)
    """

    def __init__(self, program: StageProgram, tensors: Mapping[str, Tensor], device: torch.device = HOST) -> None:
        super().__init__(program, tensors, device)
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._pool: Any = None  # memory of all graphs; each is done with it when its outputs are copied
        self.refused = why_not(program)
        if self.refused:
            _say(self.refused)

    def __call__(self, sizes: Mapping[str, int], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on one microbatch; `sizes` has a value for every symbol of the program."""
        if self.refused:
            return super().__call__(sizes, inputs)
        key = (*(sizes[symbol] for symbol in self.program.symbols), *(tensor.stride() for tensor in inputs))
        if key in self._graphs:
            return self._graphs[key].replay(inputs)
        given = [copy_exactly(tensor) for tensor in inputs]  # the program may write to its inputs
        outputs = super().__call__(sizes, inputs)
        try:
            graph = self._capture(sizes, [copy_exactly(tensor) for tensor in given])
            same = all(map(torch.equal, graph.replay(given), outputs))
            self.refused = "" if same else "the first replay has other bits than eager"
        except (RuntimeError, RunError) as error:
            self.refused = first_line(error)
        if self.refused:
            self._graphs.clear()
            _say(self.refused)
            return outputs
        if len(self._graphs) >= _KEPT_GRAPHS:
            self._graphs.pop(next(iter(self._graphs)))
        self._graphs[key] = graph
        return outputs

    def _capture(self, sizes: Mapping[str, int], inputs: Sequence[Tensor]) -> "_Graph":
        """Capture one call, which computes nothing yet."""
        module = torch.get_device_module(self.device)
        graph = module.CUDAGraph()
        # other threads copy messages concurrently
        with module.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = super().__call__(sizes, inputs)
        self._pool = self._pool or graph.pool()
        return _Graph(graph, inputs, outputs, self.bind(sizes))


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured call with the buffers that it reads and writes, and the constants that it reads."""

    graph: Any
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    bound: Bound

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for buffer, tensor in zip(self.inputs, inputs, strict=True):
            buffer.copy_(tensor)
        self.graph.replay()
        return [copy_exactly(output) for output in self.outputs]


def why_not(program: StageProgram) -> str:
    """Return the reason why a program cannot be captured and compared, or ""."""
    caches = {state.value.name for state in program.caches}  # and their views
    for op in program.ops:
        changed = effect(op)
        tags = () if op.target in {GETITEM, _INDEX} else resolve_operator(op.target).tags
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.intersection(tags):
            return f"{op.name} ({op.target}) reads values on the host"
        if draws(op):
            return f"{op.name} ({op.target}) draws random numbers"
        # keys and values are written at rows and positions; a second run would replace other states twice
        if caches.intersection(changed.writes) and not (op.target == _PUT and len(op.arguments[1]) > 1):
            return f"{op.name} ({op.target}) replaces a state of each sequence"
        if caches.intersection(changed.shares):
            caches.add(op.name)
    return ""


def _say(reason: str) -> None:
    note(f"decoding without CUDA graphs, with the same results: {reason}")
