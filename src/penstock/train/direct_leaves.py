"""Leaves that a loss depends on directly: parameters that it penalizes, and trainable tensors of its own."""

from collections.abc import Sequence

from torch import Tensor

from penstock.engine.gradients import Synchronizer
from penstock.errors import UsageError
from penstock.train.held_tensors import HeldTensors


class DirectLeaves:
    """The gradients that a step's loss gives to leaves by itself, not by the model's outputs.

    Autograd adds them to `.grad`, one microbatch after the other; they belong to the sum over all microbatches:

        direct.saw(leaves)             # before the first backward: what was in `.grad` is put aside
        ...                            # backwards
        direct.collect(stage)          # those of the model's parameters join the stage's, others wait
        direct.add(divisor)            # for the divisor of the batch's loss

    """

    def __init__(self, tensors: HeldTensors, synchronizer: Synchronizer, *, alone: bool) -> None:
        self._tensors, self._synchronizer, self._alone = tensors, synchronizer, alone
        self._before: list[tuple[str | None, Tensor, Tensor | None]] = []  # the name of a parameter of the model's
        self._own: list[tuple[Tensor, Tensor]] = []  # of the loss, and their gradients

    def saw(self, leaves: Sequence[Tensor]) -> None:
        """Take note of the leaves of a step's loss.

        Raises `UsageError` for trainable tensors that are no parameters of the model where there are several processes,
        and for a parameter with a hook, which would see a part of its gradient.
        """
        if not leaves:  # as of most losses
            return
        named = {id(parameter): name for name, parameter in self._tensors.parameters.items()}
        strange = [leaf for leaf in leaves if id(leaf) not in named]
        if strange and not self._alone:
            raise UsageError(
                f"loss_fn has a trainable tensor of its own, of shape {list(strange[0].shape)}, which one process "
                "alone would train; make it a part of the model"
            )
        for leaf in leaves:
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                raise UsageError(
                    f"{named.get(id(leaf), 'a tensor of loss_fn')} has a hook, and loss_fn uses it by itself, so the "
                    "hook would see parts of its gradient; take one of them out"
                )
        self._synchronizer.hold_back(named[id(leaf)] for leaf in leaves if id(leaf) in named)
        self._before = [(named.get(id(leaf)), leaf, leaf.grad) for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None

    def collect(self, stage: int) -> None:
        """Add the gradients to those of the stage that computes the loss, and put back what was there before."""
        self._own = []
        for name, leaf, before in self._before:
            gradient, leaf.grad = leaf.grad, before
            if gradient is None:
                continue
            if name is None:
                self._own.append((leaf, gradient))
                continue
            # a parameter of another stage here counts there
            held = [leaves[name] for leaves in self._tensors.leaves.values() if name in leaves]
            into = self._tensors.leaves[stage].get(name, held[0])
            into.grad = gradient if into.grad is None else into.grad + gradient
        self._before = []

    def add(self, divisor: float) -> None:
        """Add the gradients of the loss's own tensors to what they have."""
        for leaf, gradient in self._own:
            gradient = gradient / divisor
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        self._own = []
