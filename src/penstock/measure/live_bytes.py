"""How many bytes tensors hold at most while something runs."""

import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, until they are gone; backward as well as forward.

    Called like a clock at the beginning and at the end of something, it gives what rises by the most bytes that
    were held in between, beside those that were there when it began.

    Example:
        with LiveBytes() as meter:
            begin = meter()
            result = function()
        print(meter() - begin, meter.held)      # at most, and what is left

    What an operator's kernel holds within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = 0
        self._most = 0
        self._running = False
        self._known: set[int] = set()

    def __call__(self) -> float:
        """Begin, and return 0; or end, and return the most bytes since then."""
        self._running = not self._running
        if self._running:
            self._began = self._most = self.held
            return 0.0
        return float(self._most - self._began)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do the operation and look at what it made."""
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given | self._known:
                self._hold(storage)
        return result

    def _hold(self, storage: UntypedStorage) -> None:
        place, num_bytes = storage.data_ptr(), storage.nbytes()
        self._known.add(place)
        self.held += num_bytes
        self._most = max(self._most, self.held)
        weakref.finalize(storage, self._let_go, place, num_bytes)

    def _let_go(self, place: int, num_bytes: int) -> None:
        self._known.discard(place)
        self.held -= num_bytes


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
