"""Gradients of a step's inputs, for a caller whose inputs require them: an encoder before the pipeline, a soft prompt.

Each microbatch has leaves of its own, so that the caller's graph is run backward once, with the gradient of the batch's
loss, however many microbatches there are:

    encoder ─▶ features ┄ detach, cut ┄▶ leaf of each microbatch ─▶ stages ─▶ loss
            ◀─ backward ◀┄ sum over ranks, divide ┄ .grad of the leaves
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock import trees
from penstock.engine.stages import MicrobatchRows
from penstock.errors import UsageError, everywhere
from penstock.graph.cuts import differentiable_values
from penstock.graph.rows import batch_dim
from penstock.tensors import HOST
from penstock.train.placed_stages import PlacedStages
from penstock.transport.base import INPUT_GRADIENTS, Transport
from penstock.transport.collectives import all_reduce
from penstock.wire import adds_up_at_once


def check_wanted(now: PlacedStages, inputs: Mapping[str, Tensor], labels: Any, *, may_repeat: bool) -> None:
    """Raise `UsageError` if a gradient that the caller's inputs or labels require cannot be computed."""
    if now.placed.num_microbatches > 1 and any(label.grad_fn is not None for label in trees.tensors(labels)):
        raise UsageError(
            "labels that require a gradient cannot be used by several microbatches; detach() them, or pass what they "
            "are computed from as an input of the model"
        )
    wanted = [name for name, tensor in inputs.items() if tensor.requires_grad]
    if not wanted:
        return
    reason = ""
    if len(now.placed.grid.replicas) > 1:
        reason = "each replica would have the gradient of its own rows only; use replicas=1"
    elif may_repeat:
        reason = "on_loss may repeat the step; use on_loss='stop'"
    elif now.placed.skipped or _stops(now, wanted):
        reason = "stages before the first trained parameter send no gradients; use stages=1"
    elif elsewhere := [name for name in wanted if inputs[name].is_meta]:
        reason = f"{elsewhere[0]!r} has no values in this process; load it on every rank"
    if reason:
        raise UsageError(f"the input {wanted[0]!r} requires a gradient, but {reason}, or detach() it if it needs none")


def _stops(now: PlacedStages, wanted: Sequence[str]) -> bool:
    """Return whether a gradient cannot cross from a later stage to an input."""
    graph, parts = now.captured.graph, now.parts
    if len(parts) == 1:
        return False
    reached = differentiable_values(graph, now.captured.trainable, wanted)
    return any(
        value.name in reached and place not in part.backward_inputs
        for part in parts
        for place, value in enumerate(part.crossing)
    )


def with_leaves(microbatches: Sequence[MicrobatchRows], wanted: Sequence[str]) -> list[MicrobatchRows]:
    """Return the microbatches with leaves as these inputs."""
    return [
        replace(microbatch, inputs={
            name: x.detach().requires_grad_() if name in wanted else x for name, x in microbatch.inputs.items()
        })
        for microbatch in microbatches
    ]  # fmt: skip


@everywhere()
def check_same(gathered: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Raise `UsageError` on all ranks unless the same inputs require gradients everywhere."""
    wanted = [document["wanted"] for document in gathered]
    if other := next((rank for rank, each in enumerate(wanted) if each != wanted[0]), None):
        raise UsageError(
            f"inputs that require a gradient must be the same on all ranks; got {wanted[0]} on {names[0]} and "
            f"{wanted[other]} on {names[other]}"
        )


def give_back(
    now: PlacedStages, inputs: Mapping[str, Tensor], wanted: Sequence[str], microbatches: Sequence[MicrobatchRows],
    divisor: float, transport: Transport,
) -> None:  # fmt: skip
    """Run the caller's graph backward from the inputs, on every rank, with the gradients of the batch's loss."""
    dims = {value.name: batch_dim(value) for value in now.captured.graph.tensor_inputs()}
    gradients = []
    for name in wanted:
        given = inputs[name]
        parts = [m.inputs[name] for m in microbatches]
        found = [torch.zeros_like(x) if x.grad is None else x.grad for x in parts]
        dim = dims[name]
        gradient = sum(found[1:], found[0]) if dim is None else torch.cat(found, dim)
        flat = gradient.to(HOST).reshape(-1).clone()
        if transport.size > 1:
            ranks = range(transport.size)
            all_reduce(transport, flat, ranks, INPUT_GRADIENTS, at_once=adds_up_at_once(len(ranks), flat.nbytes))
        gradients.append((flat / divisor).reshape(given.shape).to(given.device))
    torch.autograd.backward([inputs[name] for name in wanted], gradients)
