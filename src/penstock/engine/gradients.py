"""Gradient sums over the replicas of a stage, and over stages that share a weight, overlapped with backwards."""

import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.tracing.record import FEEDER_STAGE, Recorder
from penstock.transport.base import Transport, bucket_tag
from penstock.transport.collectives import all_reduce
from penstock.wire import NUM_ALL_REDUCES, adds_up_at_once, bucket_limit

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter trained on this process: its name, the stages here that use it, and their leaves.

    `ranks` and `holders` are all ranks and all stages of the model that use it, on any process.
    """

    name: str
    stages: tuple[int, ...]
    leaves: tuple[Tensor, ...]
    ranks: tuple[int, ...]
    holders: tuple[int, ...]

    def take_gradient(self) -> Tensor | None:
        """Sum the gradients of this process's stages, in their order, and clear them; None if there are none."""
        found = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        for leaf in self.leaves:
            leaf.grad = None
        if not found:
            return None
        total = found[0]
        for gradient in found[1:]:
            total = total + gradient
        return total


@dataclass(slots=True)
class Bucket:
    """Weights whose gradients are reduced together; `number` is the same on all ranks that hold the weights."""

    number: int
    weights: list[Weight]
    waiting: set[tuple[int, str]] = field(default_factory=set)

    @property
    def leaves(self) -> set[tuple[int, str]]:
        """Leaves of the bucket, by stage and name."""
        return {(stage, weight.name) for weight in self.weights for stage in weight.stages}


def make_buckets(weights: Sequence[Weight], order: Sequence[str], limit_bytes: int | None = None) -> list[Bucket]:
    """Group weights that several ranks hold into buckets.

    `order` names all weights of the model, in the same order on every rank: a bucket is numbered by
    its first weight, and every rank processes its buckets by their numbers, which avoids deadlocks.
    Late weights are first, since their gradients are ready first.
    """
    place = {name: len(order) - 1 - index for index, name in enumerate(order)}
    alike: dict[object, list[Weight]] = {}
    for weight in sorted(weights, key=lambda w: place[w.name]):
        if len(weight.ranks) > 1:
            alike.setdefault((weight.ranks, weight.holders, weight.leaves[0].dtype), []).append(weight)
    buckets: list[Bucket] = []
    for group in alike.values():
        limit = limit_bytes or bucket_limit(sum(weight.leaves[0].nbytes for weight in group))
        room = 0.0
        for weight in group:
            if room < weight.leaves[0].nbytes:
                buckets.append(Bucket(place[weight.name], []))
                room = limit
            buckets[-1].weights.append(weight)
            room -= weight.leaves[0].nbytes
    return sorted(buckets, key=lambda bucket: bucket.number)


class Synchronizer:
    """All-reduces of gradients on separate threads, two buckets at a time, as soon as a bucket is final.

    The thread that reports a bucket's last final gradient also flattens the bucket, so that it reuses the memory of
    the gradients. Allocators separate the memory of threads, so that gradients freed by one thread are
    not available to another.

    Example:
        synchronizer.begin()
        ...                                  # backwards; `leaf_done` and `stage_done` report final gradients
        synchronizer.flush()                 # all gradients are final
        gradients = synchronizer.finish()    # by name, sums over all ranks
    """

    def __init__(self, transport: Transport, weights: Sequence[Weight], order: Sequence[str]) -> None:
        self._transport = transport
        self._weights = list(weights)
        self._buckets = make_buckets(weights, order)
        self.recorder: Recorder | None = None
        self.unused: list[str] = []
        self._late: set[str] = set()  # weights whose gradients become final only at the end of the step
        self._next = 0
        self._alone: dict[str, Tensor] = {}  # gradients that no other rank contributes to
        self._tasks: queue.SimpleQueue[tuple[Bucket, Tensor] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Mapping[str, Tensor] | BaseException] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def num_buckets(self) -> int:
        """Number of all-reduces in one step."""
        return len(self._buckets)

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients that are reduced with other ranks in one step."""
        return sum(weight.leaves[0].nbytes for bucket in self._buckets for weight in bucket.weights)

    def begin(self) -> None:
        """Start another step, without gradients."""
        self._next = 0
        self._late.clear()
        self.unused = []
        for bucket in self._buckets:
            bucket.waiting = bucket.leaves
        for weight in self._weights:
            for leaf in weight.leaves:
                leaf.grad = None

    def hold_back(self, names: Iterable[str]) -> None:
        """Delay the gradients of these weights until `flush`, as the step still adds to them."""
        self._late.update(names)

    def leaf_done(self, stage: int, name: str) -> None:
        """Record that a leaf's gradient is final."""
        if name in self._late:
            return
        for bucket in self._buckets:
            bucket.waiting.discard((stage, name))
        self._start()

    def stage_done(self, stage: int) -> None:
        """Record that all gradients of a stage are final."""
        for bucket in self._buckets:
            bucket.waiting = {leaf for leaf in bucket.waiting if leaf[0] != stage or leaf[1] in self._late}
        self._start()

    def flush(self) -> None:
        """Record that all gradients are final, and start the remaining reduces without waiting."""
        for bucket in self._buckets:
            bucket.waiting = set()
        self._start()
        shared = {weight.name for bucket in self._buckets for weight in bucket.weights}
        self._alone = {weight.name: self._take(weight) for weight in self._weights if weight.name not in shared}

    def finish(self, divisor: float = 1.0) -> dict[str, Tensor]:
        """Wait for the sums, and divide each while other sums are in flight.

        Raises `ConnectionBroken` if another process is lost, and any other error that ended a thread.
        """
        gradients = {name: gradient.div_(divisor) for name, gradient in self._alone.items()}
        self._alone = {}
        for _ in self._buckets:
            result = self._await_sum()
            if isinstance(result, BaseException):
                raise result
            # in place: the memory is not shared
            gradients.update({name: total.div_(divisor) for name, total in result.items()})
        return gradients

    def _await_sum(self) -> Mapping[str, Tensor] | BaseException:
        """Wait for the next sum of a thread, or the thread's error, including a connection broken by a verdict.

        Raises `RunError` if no thread is left.
        """
        while True:
            try:
                return self._done.get(timeout=_POLL_S)
            except queue.Empty:
                if not any(thread.is_alive() for thread in self._threads) and self._done.empty():
                    raise RunError("no thread is left to sum gradients; restart training from a checkpoint") from None

    def _take(self, weight: Weight) -> Tensor:
        gradient = weight.take_gradient()
        if gradient is None:
            self.unused.append(weight.name)
            return torch.zeros_like(weight.leaves[0])
        return gradient

    def close(self) -> None:
        """Stop the threads."""
        for _ in self._threads:
            self._tasks.put(None)
        while self._threads:
            self._threads.pop().join(5.0)

    def _start(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            bucket = self._buckets[self._next]
            self._next += 1
            flat = torch.cat([self._take(weight).reshape(-1) for weight in bucket.weights])
            self._tasks.put((bucket, flat))
            if len(self._threads) < min(NUM_ALL_REDUCES, len(self._buckets)):
                self._threads.append(threading.Thread(target=self._work, name="penstock-gradients", daemon=True))
                self._threads[-1].start()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            bucket, flat = task
            try:
                begin_s = self.recorder.clock() if self.recorder else 0.0
                sums = self._reduce(bucket, flat)
                if self.recorder:
                    num_bytes = sum(total.nbytes for total in sums.values())
                    self.recorder.span(
                        "synchronize", FEEDER_STAGE, bucket.number, begin_s, self.recorder.clock(), "sum", num_bytes
                    )
                self._done.put(sums)
            # catch any error, since `finish` waits for a result
            except BaseException as error:
                self._done.put(error)
                return

    def _reduce(self, bucket: Bucket, flat: Tensor) -> dict[str, Tensor]:
        flat = flat.cpu()  # messages are sent from the host
        ranks = bucket.weights[0].ranks
        at_once = adds_up_at_once(len(ranks), flat.nbytes)
        all_reduce(self._transport, flat, ranks, bucket_tag(bucket.number), at_once=at_once)
        shapes = [weight.leaves[0].shape for weight in bucket.weights]
        parts = flat.to(bucket.weights[0].leaves[0].device).split([shape.numel() for shape in shapes])
        return {w.name: part.view(shape) for w, shape, part in zip(bucket.weights, shapes, parts, strict=True)}
