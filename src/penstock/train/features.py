"""What frozen layers put out for a batch's rows, when it need not be computed: the seam to a cache of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree


class Features(Protocol):
    """The outputs of the layers that do not run, by sample; every process asks for every batch, in the same order."""

    def outputs(self, batch: Sequence[int], following: Sequence[int] | None) -> list[Tensor]:
        """Return what crosses into the first stage that runs, for this process's rows of a batch.

        Begins to fetch those of the `following` batch, if there is one. Samples are numbers of the data set's rows,
        those of all replicas together.
        """

    def close(self) -> None:
        """Let go of what has been fetched and is not needed any more."""


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """A batch as a loader gave it: the samples of all replicas together, and those of the batch after it."""

    samples: Sequence[int]
    following: Sequence[int] | None
    leaves: Sequence[tuple[Tensor, int]]  # the tensors, with how often each had been written to
    trained: Callable[[], None]  # what to call when a step is taken with it

    @classmethod
    def of(
        cls, loaded: Any, samples: Sequence[int], following: Sequence[int] | None, trained: Callable[[], None]
    ) -> "LoadedBatch":
        """Remember what is given to the user's loop."""
        leaves = [(leaf, leaf._version) for leaf in _tensors(loaded) if not leaf.is_inference()]
        return cls(samples, following, leaves, trained)

    def is_given(self, inputs: Any) -> bool:
        """Return whether inputs are as they were loaded; what a loop has changed is not what has been cached.

        Tensors of inference mode, which do not count what is written to them, are taken for changed.
        """
        known = {id(leaf): version for leaf, version in self.leaves}
        given = _tensors(inputs)
        return bool(given) and all(id(leaf) in known and known[id(leaf)] == leaf._version for leaf in given)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
