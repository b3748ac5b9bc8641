"""A model split into stages that run in sequence in this process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.deploy.policies import choose_cuts
from penstock.deploy.run_options import CutOptions
from penstock.deploy.state import load_state
from penstock.graph.call import bind_inputs, build_output, read_sizes
from penstock.graph.capture import capture
from penstock.graph.cuts import Cut, Cuts, divide
from penstock.graph.graph import Graph, count_work
from penstock.graph.program import StageProgram
from penstock.runtime.registry import EAGER, StageRuntime
from penstock.text import counted
from penstock.units import format_bytes
from penstock.zoo.weights.weights import ModuleWeights, Weights


@dataclass(frozen=True, slots=True)
class SplitStage:
    """One stage: its program, the cuts on both sides, and a call that runs it.

    A call takes the stage's input tensors and returns its output tensors; the batch size is read from the inputs.
    """

    index: int
    before: Cut | None
    after: Cut | None
    program: StageProgram
    runtime: StageRuntime
    work: float

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names in the model of the parameters of this stage."""
        return tuple(state.source for state in self.program.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters of this stage."""
        return sum(state.value.num_bytes({}) for state in self.program.parameters)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        sizes = read_sizes(self.program.symbols, self.program.inputs, inputs)
        with torch.no_grad():
            return tuple(self.runtime(sizes, inputs))


class SplitModel:
    """A model as stages that are called in sequence in this process.

    Called like the model, with any batch size, it returns the model's output.

    Example:
        parts = penstock.split(model, (images,), stages=4)
        assert torch.equal(parts(images), model(images))
    """

    def __init__(self, graph: Graph, cuts: Sequence[Cut], tensors: Mapping[str, Tensor], work: Sequence[float]) -> None:
        self.graph = graph
        self.cuts = tuple(cuts)
        programs = divide(graph, cuts)
        bounds = [0, *(cut.position for cut in cuts), len(graph.ops)]
        self.stages = tuple(
            SplitStage(
                index=index,
                before=cuts[index - 1] if index else None,
                after=cuts[index] if index < len(cuts) else None,
                program=program,
                runtime=EAGER.load(program, tensors),
                work=sum(work[bounds[index] : bounds[index + 1]]),
            )
            for index, program in enumerate(programs)
        )

    def __repr__(self) -> str:
        sizes = self.graph.sizes(self.graph.fixed_batch or 1)
        work = sum(stage.work for stage in self.stages) or 1.0
        rows = [("stage", "cut after it", "crossing", "work", "parameters", "operations")] + [
            (
                str(stage.index),
                stage.after.name if stage.after else "(the end)",
                format_bytes(stage.after.num_bytes(sizes)) if stage.after else "",
                f"{stage.work / work:.1%}",
                format_bytes(stage.parameter_bytes),
                str(len(stage.program.ops)),
            )
            for stage in self.stages
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join([f"{self.graph.model} in {counted(len(self.stages), 'stage')}", *lines])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs, sizes = bind_inputs(self.graph, args, kwargs)
        with torch.no_grad():
            for stage in self.stages:
                inputs = stage.runtime.own(stage.runtime(sizes, inputs), sizes)
        return build_output(self.graph, inputs, sizes)


def split(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int | None = None,
    cuts: str | Sequence[str] = "balanced",
    dynamic: Mapping[str, Mapping[str | int, int]] | None = None,
    weights: Weights | None = None,
) -> SplitModel:
    """Split a model into stages; the result is called like the model and returns the same.

    `stages` is 4 by default. `cuts` is a policy (see `choose_cuts`), or names the cuts, as in `["blocks.5:after"]`,
    which sets the number of stages too. `weights` is needed only if the model's parameters are on the meta device.

    Example:
        halves = penstock.split(model, (images,), stages=2)
        halves.stages[0].parameters, halves(images)

    Raises `CaptureError` for a model that does not export, `CutError` for cuts that are not possible,
    `UsageError` for stages and cuts that contradict each other.
    """
    cut = CutOptions(stages=stages, cuts=cuts)
    graph = capture(model, args, kwargs, dynamic=dynamic)
    work = count_work(graph, graph.sizes(graph.fixed_batch or 1))
    chosen = choose_cuts(graph, Cuts(graph), names=cut.names, stages=cut.count(4), policy=cut.policy, work=work)
    source = weights or ModuleWeights(model)
    tensors = {state.value.name: load_state(graph, state, source) for state in graph.states}
    return SplitModel(graph, chosen, tensors, work)
