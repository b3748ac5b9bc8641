"""Loading of rows: DataLoader settings, start of loader processes, and batches without rows."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from penstock.train.row_cut import RowCut

Collate = Callable[[list[Any]], Any]

_PARENT_POLL_S = 0.5
EXAMPLE_ROWS = 5  # enough to not mistake a container with few entries for a list of rows
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


def without_rows(example: Any) -> Any:
    """Return a batch without rows, from an example of `EXAMPLE_ROWS` rows."""
    return RowCut(exact=False).parts(example, EXAMPLE_ROWS, [[]])[0]
