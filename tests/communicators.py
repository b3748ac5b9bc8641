"""Communicators that keep NCCL's rules and need no GPU: gloo groups of two, of threads, for the pretended device.

As on NCCL's, tags say nothing, one end sends and the other receives, and both mean the same number of bytes.
"""

import contextlib
import datetime
import itertools
import threading
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from penstock.transport.nccl import RECEIVER, SENDER
from tests.pretend import Pretended

_NOBODY_SENDS = 7


class GlooCommunicator:
    """One end of a communicator; `lose` is the number of a message that the sender only pretends to send."""

    def __init__(self, store: Store, place: int, lose: int | None = None) -> None:
        self.place, self.num_begun, self.aborted = place, 0, False
        self._store, self._lose, self._count = store, lose, itertools.count()
        self._works: list[_Checked] = []
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = datetime.timedelta(seconds=20)
        self._group: Any = ProcessGroupGloo(store, place, 2, options)

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Any:
        (tensor,) = tensors
        assert (self.place, to, tag) == (SENDER, RECEIVER, 0)
        assert isinstance(tensor, Pretended)
        self.num_begun += 1
        number = next(self._count)
        self._store.set(f"bytes/{number}", str(tensor.nbytes))
        if number == self._lose:
            return self._begun(self._group.recv([torch.zeros(1)], RECEIVER, _NOBODY_SENDS), number, tensor.nbytes)
        return self._begun(self._group.send([tensor.held], to, 0), number, tensor.nbytes)

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Any:
        (tensor,) = tensors
        assert (self.place, source, tag) == (RECEIVER, SENDER, 0)
        assert isinstance(tensor, Pretended)
        self.num_begun += 1
        return self._begun(self._group.recv([tensor.held], source, 0), next(self._count), tensor.nbytes)

    def _begun(self, work: Any, number: int, num_bytes: int) -> "_Checked":
        self._works.append(_Checked(work, self._store, number, num_bytes))
        return self._works[-1]

    def abort(self) -> None:
        """End every wait of both ends: a wait that times out closes gloo's connections."""
        self.aborted = True
        with contextlib.suppress(RuntimeError):
            nothing = self._group.recv([torch.zeros(1)], 1 - self.place, _NOBODY_SENDS + 1)
            nothing.wait(datetime.timedelta(milliseconds=1))
        for work in self._works:
            work.forget()
        self._group = None


class _Checked:
    def __init__(self, work: Any, store: Store, number: int, num_bytes: int) -> None:
        self._work, self._store, self._number, self._num_bytes = work, store, number, num_bytes

    def wait(self) -> None:
        work = self._work
        if work is None:
            raise RuntimeError("the communicator was aborted")
        work.wait(datetime.timedelta(days=365))
        sent = int(self._store.get(f"bytes/{self._number}"))
        assert sent == self._num_bytes, f"{sent} bytes were sent, {self._num_bytes} received"

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def forget(self) -> None:
        """Let go of gloo's own, which keeps its sockets."""
        self._work = None


class Communicators:
    """All that were made, in place of `nccl.connect_nccl`; threads of one process have GPUs by `gpus`."""

    def __init__(self, lose: int | None = None) -> None:
        self.made: list[GlooCommunicator] = []
        self.lose = lose
        self.shared = False
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def connect(self, store: Store, place: int) -> GlooCommunicator:
        made = GlooCommunicator(store, place, self.lose if place == SENDER else None)
        with self._lock:
            self.made.append(made)
        return made

    def describe(self, _device: torch.device) -> dict[str, str]:
        """A GPU of its own for whoever asks, or the same for all."""
        return {"gpu": "GPU-0" if self.shared else f"GPU-{next(self._numbers)}", "nccl": "yes"}
