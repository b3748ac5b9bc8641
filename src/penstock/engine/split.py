"""Split a model into stages that run one after the other in this process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from penstock.engine.runtime import Runtime
from penstock.engine.tree import bind_inputs, build_output, read_sizes
from penstock.errors import CutError, UsageError
from penstock.graph.blocks import find_blocks, parameter_pieces
from penstock.graph.capture import capture
from penstock.graph.cuts import Cut, Cuts
from penstock.graph.graph import Graph
from penstock.graph.ops import State
from penstock.graph.program import StageProgram
from penstock.graph.stages import divide
from penstock.graph.work import SECONDS_PER_CROSSING_BYTE, count_work
from penstock.plan import partition
from penstock.plan.dealt import balanced_devices
from penstock.zoo.weights import ModuleWeights, Weights

Policy = Literal["balanced", "equal-blocks", "equal-size", "smallest-crossing"]
POLICIES: tuple[str, ...] = get_args(Policy)


def choose_cuts(
    graph: Graph,
    cuts: Cuts,
    *,
    stages: int,
    policy: str = "balanced",
    work: Sequence[float] | None = None,
    sizes: Mapping[str, int] | None = None,
    places: Sequence[int] | None = None,
) -> list[Cut]:
    """Choose the cuts for a number of stages by a policy.

    - `balanced`: the largest stage does as little as it can, or the busiest device where devices hold several stages;
    - `smallest-crossing`: the fewest bytes cross among cuts that keep the largest stage within 10% of that;
    - `equal-blocks`: the same number of repeated blocks in every stage;
    - `equal-size`: stages filled up to an equal share of the parameters, as PiPPy does.

    `work` is seconds per operation of the graph, counted from shapes where it is not given; `sizes`
    are the microbatch's, one row where not given; `places` are the devices of the stages, each its own where
    not given. Raises `CutError` for a policy that is not known or that this model does not allow.
    """
    sizes = sizes or graph.sizes(graph.fixed_batch or 1)
    work = work if work is not None else count_work(graph, sizes)
    if policy not in POLICIES:
        raise CutError(f"the policy {policy!r} is not known; use one of {', '.join(POLICIES)}")
    partition.check_stages(len(cuts) + 1, stages)
    if stages == 1:
        return []
    if policy in {"balanced", "smallest-crossing"}:
        choose: Callable[..., list[int]] = partition.smallest_crossing
        if policy == "balanced":
            several = places is not None and len(set(places)) < stages
            choose = partial(balanced_devices, places=places or ()) if several else partition.balanced
        return _choose_among(list(cuts), choose, graph, work, sizes, stages)
    if policy == "equal-blocks":
        return _equal_blocks(graph, cuts, work, stages)
    return _equal_size(graph, cuts, work, stages)


def best_blocks(graph: Graph, cuts: Cuts, *, stages: int, sizes: Mapping[str, int]) -> list[Cut]:
    """Choose the cuts between whole blocks that make the largest stage smallest, by counted work.

    Raises `CutError` where the model has no repeated blocks, or fewer than stages.
    """
    work = count_work(graph, sizes)
    starts = {_nearest_cut(cuts, span.start) for span in find_blocks(graph, work)[1:]}
    among = sorted(starts, key=lambda cut: cut.position)
    return _choose_among(among, partition.balanced, graph, work, sizes, stages)


def _choose_among(
    cuts: Sequence[Cut], choose: Callable[..., list[int]], graph: Graph, work: Sequence[float],
    sizes: Mapping[str, int], stages: int,
) -> list[Cut]:  # fmt: skip
    """Let a function of `plan.partition` choose among cuts; every crossing byte is work on both sides."""
    bounds = [0, *(cut.position for cut in cuts), len(graph.ops)]
    units = [sum(work[a:b]) for a, b in pairwise(bounds)]
    crossing = [0, *(cut.num_bytes(sizes) for cut in cuts), 0]
    return [cuts[b - 1] for b in choose(units, crossing, stages, work_per_byte=SECONDS_PER_CROSSING_BYTE)]


def _equal_blocks(graph: Graph, cuts: Cuts, work: Sequence[float], stages: int) -> list[Cut]:
    starts = [span.start for span in find_blocks(graph, work)]
    chosen = [_nearest_cut(cuts, position) for position in partition.evenly(starts, stages)]
    if len({cut.position for cut in chosen}) < len(chosen):
        raise CutError(
            f"{graph.model} allows no cut between some of its blocks, so {stages} stages of whole blocks "
            "cannot be; use fewer stages or the policy 'balanced'"
        )
    return chosen


def _equal_size(graph: Graph, cuts: Cuts, work: Sequence[float], stages: int) -> list[Cut]:
    try:
        blocks = find_blocks(graph, work)
    except CutError:  # without blocks every operation with parameters is a piece
        blocks = []
    starts, sizes = parameter_pieces(graph, blocks)
    chosen = [_nearest_cut(cuts, starts[boundary]) for boundary in partition.fill(sizes, stages)]
    distinct = sorted({cut.position for cut in chosen})
    if len(distinct) != stages - 1:
        raise CutError(
            f"the parameters of {graph.model} lie in pieces too large for {stages} equal sizes; "
            "use fewer stages or the policy 'balanced'"
        )
    return [cuts.at(position) for position in distinct]


def _nearest_cut(cuts: Cuts, position: int) -> Cut:
    """Return the cut at a position, or the nearest where that one is not allowed."""
    return min(cuts, key=lambda cut: abs(cut.position - position))


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: its program, the cuts on both sides, and a call that runs it.

    Called with its input tensors it gives its output tensors; the batch size is read from them.
    """

    index: int
    before: Cut | None
    after: Cut | None
    program: StageProgram
    runtime: Runtime
    work: float

    @property
    def parameters(self) -> tuple[str, ...]:
        """The model's names of the parameters in this stage."""
        return tuple(state.source for state in self.program.parameters)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of the parameters in this stage."""
        return sum(state.value.num_bytes({}) for state in self.program.parameters)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        sizes = read_sizes(self.program.symbols, self.program.inputs, inputs)
        with torch.no_grad():
            return tuple(self.runtime(sizes, inputs))


class SplitModel:
    """A model as stages that are called one after the other in this process.

    Called like the model, with any batch size, it gives what the model gives.
    """

    def __init__(self, graph: Graph, cuts: Sequence[Cut], tensors: Mapping[str, Tensor], work: Sequence[float]) -> None:
        self.graph = graph
        self.cuts = tuple(cuts)
        programs = divide(graph, cuts)
        bounds = [0, *(cut.position for cut in cuts), len(graph.ops)]
        self.stages = tuple(
            Stage(
                index=index,
                before=cuts[index - 1] if index else None,
                after=cuts[index] if index < len(cuts) else None,
                program=program,
                runtime=Runtime(program, tensors),
                work=sum(work[bounds[index] : bounds[index + 1]]),
            )
            for index, program in enumerate(programs)
        )

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
    stages: int = 4,
    policy: str = "balanced",
    cuts: Sequence[str] | None = None,
    dynamic: Mapping[str, Mapping[str | int, int]] | None = None,
    weights: Weights | None = None,
) -> SplitModel:
    """Split a model into stages; called, the result gives what the model gives.

    `cuts` names the cuts by hand, as in `["blocks.5:after"]`, and then decides the number of stages.
    `weights` is needed only where the model's parameters lie on the meta device.

    Example:
        halves = penstock.split(model, (images,), stages=2)
        halves.stages[0].parameters, halves(images)

    Raises `CaptureError` for a model that does not export, `CutError` for cuts that cannot be.
    """
    graph = capture(model, args, kwargs, dynamic=dynamic)
    possible = Cuts(graph)
    work = count_work(graph, graph.sizes(graph.fixed_batch or 1))
    if cuts is not None:
        chosen = possible.find_all(cuts)
    else:
        chosen = choose_cuts(graph, possible, stages=stages, policy=policy, work=work)
    source = weights or ModuleWeights(model)
    tensors = {state.value.name: load_state(graph, state, source) for state in graph.states}
    return SplitModel(graph, chosen, tensors, work)


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
