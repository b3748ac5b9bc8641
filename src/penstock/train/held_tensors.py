"""Model tensors that one process holds: trained and frozen parameters, and buffers."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from penstock import trees
from penstock.deploy.state import Held, Wanted, load_state, redistribute, room_for
from penstock.engine.gradients import Weight
from penstock.engine.placement import Grid
from penstock.errors import UsageError
from penstock.graph.cuts import TrainingPart
from penstock.graph.ops import State, effect
from penstock.graph.program import StageProgram
from penstock.group.world import World
from penstock.tensors import HOST, moved
from penstock.train.captured import Captured
from penstock.train.optimizers import check_separable, drop_elsewhere, empty_allowed, nothing
from penstock.train.shared_module import LiveTensors, follow_parameters, follow_unused
from penstock.transport.base import BUFFERS, Transport
from penstock.wire import FEEDER

# limit on tensors in flight during a migration: enough to keep all links busy, few enough to fit into memory
IN_FLIGHT = 8


class HeldTensors:
    """The model tensors that this process's stages need, each held once, by its name in the model.

    An optimizer updates `parameters`. Each stage has separate leaves that share memory with them, so that gradients of
    a weight used in two stages are added up in a fixed order. All are on `device`. `unused` are tensors that no stage
    uses, kept in host memory on rank 0: parameters, and state used only by layers that have since been frozen, such as
    BatchNorm's count of batches. Tensors held `before`, in another placement, stay on processes that still need them,
    and migrate to the others.
    """

    def __init__(
        self,
        world: World,
        grid: Grid,
        captured: Captured,
        parts: Sequence[TrainingPart],
        device: torch.device = HOST,
        *,
        before: "HeldTensors | None" = None,
    ) -> None:
        self.device = device
        self._grid, self._parts = grid, parts
        used = {state.source for part in parts for state in part.program.states}
        left = {s.source: s for s in captured.graph.states if s.kind != "constant" and s.source not in used}
        self._unused = frozenset(captured.unused) | left.keys()
        self.stages = grid.stages_of(world.rank)
        self.unused: dict[str, Tensor] = {}
        if before is not None:
            self.unused = {name: tensor for name, tensor in before.unused.items() if name in self._unused}
        elif world.rank == FEEDER:
            self.unused = {name: captured.weights.load(name).detach().clone() for name in captured.unused}
        self._shared = captured.shared
        self._live = LiveTensors()
        self._buffers: list[str] = []  # buffers whose memory the caller's module shares
        self._never_used = dict.fromkeys(captured.unused)
        self.parameters: dict[str, nn.Parameter] = {}
        self.others: dict[str, Tensor] = {}
        for source, (state, tensor) in self._gather(world, captured, left, before).items():
            if source in left:
                self.unused[source] = moved(tensor, HOST)
                continue
            if state.kind != "parameter":
                self.others[source] = tensor
                if state.kind == "buffer":
                    self._share(source, tensor)
                continue
            kept = before.parameters.get(source) if before is not None else None  # same object, for its optimizer
            if kept is not None and self._shared is not None:
                self._shared.put_back(source, kept)
            trains = source in captured.trainable
            self.parameters[source] = kept if kept is not None else self._parameter(source, tensor)
            self.parameters[source].requires_grad_(trains)
            if not trains:  # drop a pending gradient, so that no norm includes it
                self.parameters[source].grad = None
        if self._shared is not None:
            for source in captured.unused:
                if source in self.unused:
                    self._shared.parameter(source, self.unused[source])
            self._shared.keep([*self.parameters, *self.unused])
        self.leaves: dict[int, dict[str, Tensor]] = {
            stage: {
                state.source: self._live.add(state.source, self.parameters[state.source].detach()).requires_grad_()
                for state in parts[stage].program.parameters
                if self.parameters[state.source].requires_grad
            }
            for stage in self.stages
        }

    def _parameter(self, name: str, tensor: Tensor) -> nn.Parameter:
        return nn.Parameter(tensor) if self._shared is None else self._shared.parameter(name, tensor)

    def _gather(
        self, world: World, captured: Captured, left: Mapping[str, State], before: "HeldTensors | None"
    ) -> dict[str, tuple[State, Tensor]]:
        """Receive this process's tensors from the processes that held them `before`; load tensors that none held.

        Rank 0 also receives the tensors `left`, which no stage uses. Constants are part of the graph, which every
        process has.
        """
        states = {**{state.source: state for part in self._parts for state in part.program.states}, **left}
        if before is None:
            return self._receive(world, captured, states)
        there = {name: before.holders(name) for name, s in states.items() if s.kind != "constant"}
        missing = {name: state for name, state in states.items() if not there.get(name)}
        have = Held({name: ranks for name, ranks in there.items() if ranks}, before.find)
        # ranks alternate as sources, so that all links are busy
        order = interleaved({name: ranks[0] for name, ranks in have.ranks.items()})
        want = Wanted({name: self.holders(name) for name in order}, lambda name: room_for(states[name]))
        arrived = redistribute(have, want, world.transport, in_flight=IN_FLIGHT)
        found = {
            name: (states[name], tensor if self._held_by(before, name) else moved(tensor, self.device))
            for name, tensor in arrived
        }
        found |= self._receive(world, captured, missing)
        return {name: found[name] for name in states if name in found}

    @staticmethod
    def _held_by(before: "HeldTensors", name: str) -> bool:
        return name in before.parameters or name in before.others

    def _receive(
        self, world: World, captured: Captured, states: Mapping[str, State]
    ) -> dict[str, tuple[State, Tensor]]:
        """Load this process's tensors, or receive them from rank 0 if they belong to a module of the caller.

        Every process created its own module, with different random weights; all processes use the weights of rank 0,
        which alone draws those of a seed, since other processors may round differently.
        """

        def load(name: str) -> Tensor:
            return load_state(captured.graph, states[name], captured.weights)

        random = getattr(captured.weights, "is_random", False)
        loaders = range(world.transport.size) if captured.own_weights and not random else (FEEDER,)
        have = Held(dict.fromkeys(states, loaders), load)
        want = Wanted({name: self.holders(name) for name in states}, lambda name: room_for(states[name]))
        return {
            name: (states[name], tensor.to(self.device, copy=True, memory_format=torch.contiguous_format))
            for name, tensor in redistribute(have, want, world.transport)
        }

    def make_optimizer(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Create the optimizer of the parameters held here; of parameters of other processes alone, an empty one.

        Raises `UsageError` if the optimizer has other parameters, or if its update of one parameter depends on others
        and several processes hold them.
        """
        own = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        with empty_allowed(self._is_divided):
            optimizer = make(own or [nothing()])
        drop_elsewhere(optimizer)
        known = {id(parameter) for parameter in own}
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = sum(id(parameter) not in known and bool(parameter.numel()) for parameter in given)
        if strange:
            raise UsageError(
                f"{strange} parameters of the optimizer are not this pipeline's; build it from the parameters that "
                "pipe.optimizer passes, as in pipe.optimizer(lambda parameters: AdamW(parameters))"
            )
        if self._is_divided:
            check_separable(optimizer)
        return optimizer

    @property
    def _is_divided(self) -> bool:
        """True if a replica's stages are in several processes."""
        return any(len(set(replica.stages)) > 1 for replica in self._grid.replicas)

    def divides(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether parameters of this optimizer's model are in several processes."""
        own = {id(parameter) for parameter in self.parameters.values()}
        given = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return self._is_divided and any(id(parameter) in own for parameter in given)

    def check_trained(self, trainable: Collection[str]) -> None:
        """Raise `UsageError` for a parameter that was unfrozen after the capture."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and name not in trainable:
                raise UsageError(
                    f"{name} was frozen when the pipeline was created, so no gradient is computed for it; unfreeze it "
                    "before, or create a new pipeline of the model"
                )

    def of_program(self, program: StageProgram, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a program's tensors by their names in the program."""
        return {s.value.name: leaves[s.source] if s.source in leaves else self._plain(s) for s in program.states}

    def _plain(self, state: State) -> Tensor:
        if state.kind == "parameter":
            if state.source not in self.parameters:
                raise UsageError(
                    f"evaluation uses {state.source}, which this stage does not use in training; "
                    "make the forward pass use it in both modes, or cut elsewhere"
                )
            return self._live.add(state.source, self.parameters[state.source].detach())
        return self.others[state.source]

    def follow(self) -> None:
        """Switch to the parameters and buffers that the caller's module has now, as the next forward in one process.

        Raises `UsageError` for a change that the stages cannot follow.
        """
        if self._shared is not None:
            self._shared.keep_elsewhere()
            follow_parameters(self.parameters, self._shared)
            follow_unused(self.unused, self._shared, self._never_used)
            for name in self._buffers:
                self._live.follow(name, self._shared.now(name))
        for name, parameter in self.parameters.items():
            self._live.follow(name, parameter)

    def moved_here(
        self, inputs: Mapping[str, Tensor], labels: Any, *, skipped: int = 0
    ) -> tuple[dict[str, Tensor], Any]:
        """Move to the device what this process's stages use of inputs and labels, but the first `skipped`; return all.

        Raises `UsageError` if an input of a stage has no values on this process.
        """
        used = {value.name: stage for stage in self.stages if stage >= skipped for value in self._parts[stage].own}
        for name, stage in used.items():
            if inputs[name].device.type == "meta":
                raise UsageError(
                    f"stage {stage} uses the input {name!r}, which has no values in this process; "
                    "pass the tensors of pipe.loader to train_step unchanged, and use a separate loader to evaluate"
                )
        there = {name: moved(x, self.device) if name in used else x for name, x in inputs.items()}
        if len(self._parts) - 1 in self.stages:
            labels = trees.map_tensors(lambda x: moved(x, self.device), labels)
        return there, labels

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Accumulate the gradients of a batch, as autograd does at the end of a backward: hooks run.

        A parameter that the caller has meanwhile frozen is skipped.
        """
        given = [(self.parameters[name], gradient) for name, gradient in gradients.items()]
        given = [(parameter, gradient) for parameter, gradient in given if parameter.requires_grad]
        if given:
            torch.autograd.backward([p for p, _ in given], [g for _, g in given])
        if self._shared is not None:
            self._shared.mark_gradients()

    @cached_property
    def counted_here(self) -> frozenset[str]:
        """Parameters whose gradient norm this process contributes; shared ones are contributed by their first stage."""
        return frozenset(name for name in self.parameters if holding(self._parts, name)[0] in self.stages)

    def norms(self) -> dict[str, float]:
        """Return the gradient norm of each parameter in `counted_here`."""
        return {
            name: float(torch.linalg.vector_norm(parameter.grad))
            for name, parameter in self.parameters.items()
            if parameter.grad is not None and name in self.counted_here
        }

    def share_buffers(self, transport: Transport) -> None:
        """Broadcast the first replica's statistics to the other replicas, as DistributedDataParallel does."""
        for stage in self.stages:
            first, *others = self._grid.holders(stage)
            names = self._written[stage] if others else []
            if not names:
                continue
            have = Held(dict.fromkeys(names, (first,)), self.others.__getitem__)
            want = Wanted(dict.fromkeys(names, others), self.others.__getitem__)
            for _ in redistribute(have, want, transport, BUFFERS):
                pass  # received into the buffer itself

    @cached_property
    def _written(self) -> dict[int, list[str]]:
        """Buffers that each stage of this process writes to."""
        return {stage: written_buffers(self._parts[stage]) for stage in self.stages}

    def find(self, name: str) -> Tensor:
        """Return a tensor that this process holds, by its name in the model."""
        if name in self.parameters:
            return self.parameters[name].detach()
        return self.unused[name] if name in self.unused else self.others[name]

    def holders(self, name: str) -> list[int]:
        """Return the ranks that hold a tensor; the first of them saves it, and sends it in a migration."""
        if name in self._unused:
            return [FEEDER]
        return list(dict.fromkeys(rank for stage in holding(self._parts, name) for rank in self._grid.holders(stage)))

    def renumber(self, ranks: Mapping[int, int]) -> None:
        """Switch to the ranks of another group, given by old rank; lost processes no longer count as holders."""
        self._grid = self._grid.renumbered(ranks)

    @property
    def grid(self) -> Grid:
        """The placement that determines which process holds which tensors, in the ranks of the current group."""
        return self._grid

    def written(self) -> dict[str, Tensor]:
        """Return the buffers that a step writes to on this process."""
        return {name: self.others[name] for names in self._written.values() for name in names}

    def weights(self) -> list[Weight]:
        """Return the trained parameters with their leaves and all ranks that hold them."""
        found = []
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                holders = holding(self._parts, name)
                stages = tuple(stage for stage in self.stages if stage in holders)
                ranks = tuple(sorted({rank for stage in holders for rank in self._grid.holders(stage)}))
                leaves = tuple(self.leaves[stage][name] for stage in stages)
                found.append(Weight(name, stages, leaves, ranks, tuple(holders)))
        return found

    def add_states(self, graph_states: Iterable[State], load: Captured) -> dict[str, Tensor]:
        """Add buffers that only evaluation needs; training's are shared. Return the evaluation's constants."""
        constants = {}
        for state in graph_states:
            if state.kind == "constant":  # one of training may have the same name
                constants[state.source] = moved(load_state(load.evaluation, state, load.weights), self.device)
            elif state.kind != "parameter" and state.source not in self.others:
                self.others[state.source] = self._of_evaluation(state, load)
        return constants

    def _of_evaluation(self, state: State, load: Captured) -> Tensor:
        if state.kind != "buffer" or self._shared is None:
            return moved(load_state(load.evaluation, state, load.weights), self.device)
        now = self._shared.now(state.source).detach()
        given = load.own_weights or now.device.type == "meta"
        tensor = moved(load_state(load.evaluation, state, load.weights) if given else now, self.device)
        self._share(state.source, tensor)
        return tensor

    def _share(self, source: str, tensor: Tensor) -> None:
        """Let the caller's module and the stages use one buffer."""
        if self._shared is not None and self._shared.buffer(source, tensor):
            self._live.add(source, tensor)
            self._buffers.append(source)


def interleaved(sources: Mapping[str, int]) -> list[str]:
    """Order names so that different sources alternate.

    >>> interleaved({"a": 0, "b": 0, "c": 1})
    ['a', 'c', 'b']
    """
    counts: Counter[int] = Counter()
    turns: dict[str, int] = {}
    for name, source in sources.items():
        turns[name] = counts[source]
        counts[source] += 1
    return sorted(sources, key=lambda name: turns[name])


def holding(parts: Sequence[TrainingPart], name: str) -> list[int]:
    """Return the stages that use a tensor; the first of them counts it in the norm and saves it."""
    return [index for index, part in enumerate(parts) if any(s.source == name for s in part.program.states)]


def written_buffers(part: TrainingPart) -> list[str]:
    """Return the names of buffers that a stage's forward pass writes to, such as BatchNorm's statistics."""
    sources = {state.value.name: state.source for state in part.program.states if state.kind == "buffer"}
    written = {name for op in part.program.ops for name in effect(op).writes}
    return [source for name, source in sources.items() if name in written]
