"""Evaluation during training: forward passes without gradients for losses, metrics and outputs."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.engine.executor import run_schedule
from penstock.engine.observer import Observer
from penstock.engine.placement import Replica
from penstock.engine.stages import Head, MicrobatchRows, Sizes, TrainingStage
from penstock.engine.wiring import GrowingChannels, training_links
from penstock.graph.call import build_output
from penstock.graph.cuts import Cut, TrainingPart
from penstock.graph.graph import Graph
from penstock.graph.rows import batch_dim, check_rows
from penstock.group.world import World
from penstock.plan.schedule.schedules import forward_only
from penstock.runtime.registry import EAGER
from penstock.train.batches import WHOLE, RowCut, cut_rows, largest
from penstock.train.captured import Captured
from penstock.train.held_tensors import HeldTensors
from penstock.train.loss_convention import LossFunction, MeasuredLoss
from penstock.train.losses import Losses, OwnLoss, described
from penstock.train.row_exchange import StepInputs
from penstock.transport.base import OUTPUTS, receive_tensor, send_tensor


class Evaluation:
    """The stages of a model in evaluation mode, with the current weights of the training run.

    The graph is captured on first use.
    """

    def __init__(
        self, world: World, captured: Captured, replica: Replica, tensors: HeldTensors, *, cuts: Sequence[Cut],
        autocast: torch.dtype | None, num_microbatches: int, direct: bool = False,
        first_generation: int = 0,
    ) -> None:  # fmt: skip
        self._world, self._captured, self._replica, self._tensors = world, captured, replica, tensors
        self._cuts, self._autocast, self._num_microbatches = cuts, autocast, num_microbatches
        self._direct, self._first_generation = direct, first_generation

    def measures(
        self,
        given: StepInputs,
        functions: Sequence[LossFunction | None],
        losses: Losses,
        cut: RowCut,
        *,
        only_replica: bool,
    ) -> list[dict[str, Any]]:
        """Return each function's values on every microbatch, from a single forward pass over this replica's rows."""
        found: list[list[MeasuredLoss]] = [[] for _ in functions]

        def head(_index: int, microbatch: MicrobatchRows, outputs: Sequence[Tensor]) -> None:
            alone = only_replica and microbatch.sizes["batch"] == given.sizes["batch"]
            for function, measured in zip(functions, found, strict=True):
                measured.append(
                    losses.measure(function, self.graph, outputs, microbatch, own=self._own_loss, alone=alone)
                )

        self._forward(given, head, cut)
        return [described(measured) for measured in found]

    def outputs(self, given: StepInputs) -> Any:
        """Return the model's output for this replica's rows, on the host of every process of the replica."""
        outputs: list[list[Tensor]] = []

        def keep(_index: int, _microbatch: MicrobatchRows, tensors: Sequence[Tensor]) -> None:
            outputs.append([tensor.to("cpu", copy=True) for tensor in tensors])

        made = self._forward(given, keep, RowCut(), joins=True)
        results = self._spread(outputs, made)
        return build_output(self.graph, self._join(results, given.sizes), given.sizes)

    def _join(self, results: list[list[Tensor]], sizes: Sizes) -> list[Tensor]:
        """Concatenate the microbatches' outputs; without rows the outputs are empty."""
        if len(results) == 1:
            return results[0]
        values = self.parts[-1].program.outputs
        if not results:
            return [torch.empty(value.evaluate(sizes), dtype=value.dtype) for value in values]
        dims = [batch_dim(value) or 0 for value in values]
        return [torch.cat(parts, dim) for *parts, dim in zip(*results, dims, strict=True)]

    def abort(self) -> None:
        """Abort every wait within this process."""
        if "_made" in vars(self):
            self._made[0].channels.abort()

    @property
    def num_openings(self) -> int:
        """Number of sets of tags that its channels have used."""
        return self._made[0].generation - self._first_generation if "_made" in vars(self) else 0

    @cached_property
    def graph(self) -> Graph:
        """The graph in evaluation mode."""
        return self._captured.evaluation

    @cached_property
    def parts(self) -> list[TrainingPart]:
        """All stages of the model."""
        return self._captured.evaluation_parts(self._cuts, self._autocast, self._tensors.device)

    @cached_property
    def _own_loss(self) -> OwnLoss:
        return OwnLoss(self.graph)

    @cached_property
    def _made(self) -> tuple[GrowingChannels, dict[int, TrainingStage]]:
        stages = {}
        for index in self._tensors.stages:
            program = self.parts[index].program
            constants = self._tensors.add_states(program.states, self._captured)
            tensors = self._tensors.of_program(program, constants)
            runtime = EAGER.load_training(self.parts[index], tensors, self._tensors.device)
            if index == len(self.parts) - 1:
                runtime.around = dict.fromkeys(self._own_loss.counting, self._own_loss.around)
            stages[index] = TrainingStage(
                index=index, part=self.parts[index], runtime=runtime, leaves={}, autocast=self._autocast, trains=False
            )
        links = training_links(self.parts, evaluates=True)
        channels = GrowingChannels(
            self._world.transport,
            links,
            self._replica,
            evaluates=True,
            device=self._tensors.device,
            direct=self._direct,
            first_generation=self._first_generation,
        )
        return channels, stages

    def _spread(self, outputs: list[list[Tensor]], microbatches: Sequence[MicrobatchRows]) -> list[list[Tensor]]:
        """Send the last stage's outputs to the other processes of the replica."""
        transport, last = self._world.transport, self._replica.stages[-1]
        others = sorted(set(self._replica.devices) - {last})
        values = self.parts[-1].program.outputs
        if transport.rank == last:
            for tensors in outputs:
                for tensor in tensors:
                    for rank in others:
                        send_tensor(transport, tensor, rank, OUTPUTS)
            return outputs
        results = []
        for microbatch in microbatches:
            tensors = [torch.empty(value.evaluate(microbatch.sizes), dtype=value.dtype) for value in values]
            for tensor in tensors:
                receive_tensor(transport, tensor, last, OUTPUTS)
            results.append(tensors)
        return results

    def _forward(self, given: StepInputs, head: Head, cut: RowCut, *, joins: bool = False) -> list[MicrobatchRows]:
        """Run the forward passes; on the last stage `head` receives each microbatch's output.

        With `joins` the caller concatenates the outputs, so each must have the batch as a dimension.
        """
        sizes = given.sizes
        tensors, labels = self._tensors.moved_here(given.tensors, given.labels)
        count = min(self._num_microbatches, sizes["batch"])
        if count > 1:
            check_rows(self.graph, sizes, WHOLE, trains=not joins)
        microbatches = cut_rows(self.graph, tensors, sizes, labels, count, cut) if count else []
        if not microbatches:
            return []
        channels, stages = self._made
        channels.fit(largest(microbatches))
        for stage in stages.values():
            stage.head = head if stage.index == len(self.parts) - 1 else None
            stage.begin(microbatches)
        actions = forward_only(sorted(stages), len(microbatches))
        run_schedule(actions, stages, channels.channels, Observer(stages))
        return microbatches
