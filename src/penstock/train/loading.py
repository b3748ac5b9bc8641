"""Loading of rows: DataLoader settings, start of loader processes, and shapes for ranks that load nothing."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock import trees
from penstock.train.row_cut import RowCut

Collate = Callable[[list[Any]], Any]

_PARENT_POLL_S = 0.5
_EXAMPLES = 5  # rows of an example batch: enough to not mistake a container with few entries for a list of rows
_SETTINGS = ["num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"]
_OF_WORKERS = ["prefetch_factor", "persistent_workers"]


def workers_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a DataLoader's settings as arguments for another DataLoader."""
    names = [*_SETTINGS, "in_order"] + (_OF_WORKERS if loader.num_workers else [])
    found = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    if loader.pin_memory_device:
        found["pin_memory_device"] = loader.pin_memory_device
    return found


class WorkerStart:
    """A `worker_init_fn` that makes the worker exit with its parent, then calls the user's `worker_init_fn`."""

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        """Initialize a worker."""
        leave_with_parent()
        if self._then is not None:
            self._then(worker)


def leave_with_parent() -> None:
    """Exit this loader process soon after the training process exits, for any reason.

    A forked process holds all sockets of its parent. Until it exits, which may take as long as loading a row, the other
    ranks see no broken connection, and the run's port stays in use.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="penstock-parent", daemon=True).start()


class Shapes:
    """Batches without values, with the structure of an example batch.

    Example:
        Shapes(default_collate, dataset).of(8)      # 8 rows on the meta device
    """

    def __init__(self, collate: Collate, dataset: Any) -> None:
        self._example = collate([dataset[0]] * _EXAMPLES)
        self._cut = RowCut(exact=False)

    def of(self, num_rows: int) -> Any:
        """Return a batch whose tensors are on the meta device."""
        meta = trees.map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), self._example)
        return self._cut.parts(meta, _EXAMPLES, [[0] * num_rows])[0]

    def empty(self) -> Any:
        """Return a batch without rows."""
        return self._cut.parts(self._example, _EXAMPLES, [[]])[0]
