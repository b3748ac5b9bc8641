"""Leaves that a loss depends on directly: penalized parameters, and trainable tensors of the loss itself."""

from collections.abc import Sequence

from torch import Tensor

from penstock.engine.gradients import Synchronizer
from penstock.errors import UsageError
from penstock.train.held_tensors import HeldTensors


class DirectLeaves:
    """Gradients that reach leaves directly from a step's loss, not through the model's outputs.

    Autograd adds these gradients to `.grad`, microbatch by microbatch. They are part of the sum over the batch, so they
    are taken out of `.grad` and added to that sum:

        direct.saw(leaves)             # before the first backward: saves and clears `.grad`
        ...                            # backwards
        direct.collect(stage)          # adds gradients of the model's parameters to the stage's, keeps the others
        direct.add(divisor)            # divides the others by the batch's divisor and adds them to `.grad`

    """

    def __init__(self, tensors: HeldTensors, synchronizer: Synchronizer, *, alone: bool) -> None:
        self._tensors, self._synchronizer, self._alone = tensors, synchronizer, alone
        self._before: list[tuple[str | None, Tensor, Tensor | None]] = []  # name if in the model, leaf, `.grad`
        self._own: list[tuple[Tensor, Tensor]] = []  # tensors of the loss, and their gradients

    def saw(self, leaves: Sequence[Tensor]) -> None:
        """Record the leaves of a step's loss.

        Raises `UsageError` if several processes train and a trainable tensor is not a parameter of the model, or if a
        parameter has a hook, which would see only a part of its gradient.
        """
        if not leaves:  # the usual case
            return
        named = {id(parameter): name for name, parameter in self._tensors.parameters.items()}
        strange = [leaf for leaf in leaves if id(leaf) not in named]
        if strange and not self._alone:
            raise UsageError(
                f"loss_fn has a trainable tensor of shape {list(strange[0].shape)} that is not in the model, so one "
                "process alone would train it; make it a part of the model"
            )
        for leaf in leaves:
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                raise UsageError(
                    f"{named.get(id(leaf), 'a tensor of loss_fn')} has a hook, and loss_fn uses it directly, so the "
                    "hook would see parts of its gradient; remove the hook or the use"
                )
        self._synchronizer.hold_back(named[id(leaf)] for leaf in leaves if id(leaf) in named)
        self._before = [(named.get(id(leaf)), leaf, leaf.grad) for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None

    def collect(self, stage: int) -> None:
        """Add the gradients to those of the stage that computes the loss, and restore the earlier `.grad`."""
        self._own = []
        for name, leaf, before in self._before:
            gradient, leaf.grad = leaf.grad, before
            if gradient is None:
                continue
            if name is None:
                self._own.append((leaf, gradient))
                continue
            # the gradient of a parameter of another stage of this process is added there
            held = [leaves[name] for leaves in self._tensors.leaves.values() if name in leaves]
            into = self._tensors.leaves[stage].get(name, held[0])
            into.grad = gradient if into.grad is None else into.grad + gradient
        self._before = []

    def add(self, divisor: float) -> None:
        """Accumulate the gradients of the loss's trainable tensors in their `.grad`."""
        for leaf, gradient in self._own:
            gradient = gradient / divisor
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        self._own = []
