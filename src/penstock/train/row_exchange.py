"""Rows of a batch within a replica: the rank of the first stage loads them and sends the other ranks what they need.

loader    rank 0 loads ──labels, token ids, random states──▶ ranks 1, 2     stand-ins for large tensors
step      rank 0 ──the inputs of its stages, sizes──▶ rank 1
          rank 0 ──labels, as its loop has them──▶ rank 2, which has the last stage
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock import trees
from penstock.engine.placement import Replica
from penstock.errors import TransportError, UsageError
from penstock.graph.cuts import TrainingPart
from penstock.graph.graph import Graph
from penstock.group.world import World
from penstock.random_states import RandomStates
from penstock.train.agreement import captured_values, first_difference
from penstock.train.arrangement import Arrangement
from penstock.train.batch_document import (
    BatchReader,
    BatchWriter,
    TensorPlace,
    buffer_for,
    can_send,
    pack_all,
    unpack_all,
)
from penstock.transport.base import DOCUMENT_BYTES, LOADED, ROWS, Pending, Transport, post_bytes, receive_bytes

_PLAIN = (bool, int, float, str, type(None))
_SMALL = 2**16  # bytes up to which tensors are sent in the message of their document
Header = TypeVar("Header", bound=msgspec.Struct)


class BatchHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A batch that a rank has loaded: its document, and the digest of the rank's random states; they too if new."""

    batch: dict[str, Any]
    states: dict[str, str]
    random: dict[str, Any] | None = None


class RowsHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of a step: sizes, layouts of the tensors that follow, leaves of the labels and their form.

    `states` are digests of the random states, `moved` the generators that the loop has used, `values` what `loss_fn`
    uses.
    """

    sizes: dict[str, int]
    layouts: list[list[Any]]
    labels: list[list[Any]]
    form: str
    states: dict[str, str]
    moved: list[str]
    values: dict[str, str]


@dataclass(slots=True)
class StepInputs:
    """What a step computes with on one rank: inputs by name, sizes of the symbols, labels.

    Inputs that no stage of this rank uses may have no values. `problem` is the reason why ranks would compute with
    different random numbers, if they would.
    """

    tensors: Mapping[str, Tensor]
    sizes: Mapping[str, int]
    labels: Any
    problem: str = ""


class RowExchange:
    """One process's part in the exchange of rows.

    Images and labels of a step come from one process, so they belong to the same rows whatever each rank has drawn,
    shuffled or listed. Each batch sets the random states of all ranks of a replica to those of the rank that loaded
    it, as after loading in one process.

    Example:
        batch = exchange.batch(placed, lambda: next(loader), example)
        inputs = exchange.rows(placed, parts, graph, StepInputs(tensors, sizes, labels), [loss_fn])
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._links: dict[int, _Link] = {}
        self._known: tuple[Arrangement | None, dict[str, str]] = (None, {})  # random states that the other ranks have
        self._mark: dict[str, str] = {}  # random states since which the loop may have drawn
        self._theirs: Any = None  # random states of the rank that loads

    @property
    def _states(self) -> RandomStates:
        return self._world.random_states

    @property
    def _transport(self) -> Transport:
        return self._world.transport

    def loads(self, placed: Arrangement) -> bool:
        """Return whether this rank loads the rows of its replica."""
        return _source(placed.replica) == self._transport.rank

    def mark(self, placed: Arrangement) -> None:
        """Record that what was drawn until now does not have to be the same on all ranks."""
        if _others(placed.replica):
            self._mark = self._states.digests()

    def batch(self, placed: Arrangement, num_rows: int, load: Callable[[], Any], example: Callable[[], Any]) -> Any:
        """Return a batch of this replica: what `load` returns on the rank that loads, elsewhere what that rank sends.

        Raises `TransportError` for a batch whose containers are not those of `example`.
        """
        source, others = _source(placed.replica), _others(placed.replica)
        if source != self._transport.rank:
            return self._receive_batch(source, example)
        loaded = load()
        if others:
            self._send_batch(placed, num_rows, loaded, others)
        return loaded

    def _send_batch(self, placed: Arrangement, num_rows: int, loaded: Any, others: Sequence[int]) -> None:
        writer = BatchWriter(num_rows)
        states = self._mark = self._states.digests()
        new = self._known != (placed, states)
        self._known = placed, states
        header = BatchHeader(batch=writer.describe(loaded), states=states, random=self._states.read() if new else None)
        data, buffer = _encode(header), pack_all(writer.tensors)
        link = self._link(LOADED, placed)
        for rank in others:
            link.send(self._transport, data, buffer, rank)

    def _receive_batch(self, source: int, example: Callable[[], Any]) -> Any:
        header, small = _receive_header(self._transport, source, LOADED, BatchHeader)
        tensors = _receive_all(self._transport, BatchReader.layouts(header.batch), source, LOADED, small)
        self._theirs = header.random if header.random is not None else self._theirs
        self._mark = self._states.digests()
        if header.states != self._mark:
            try:
                self._states.write(self._theirs)
                self._mark = self._states.digests()
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                raise TransportError(f"rank {source} has sent invalid random states ({error}); start again") from None
        return BatchReader(self._name(source), example).rebuild(header.batch, tensors)

    def rows(
        self,
        placed: Arrangement,
        parts: Sequence[TrainingPart],
        graph: Graph,
        own: StepInputs,
        functions: Sequence[Any],
    ) -> StepInputs:
        """Return the rows of the rank that loads: its sizes, the inputs of this rank's stages, and labels at the end.

        `own` are the rows that this rank's loop has passed; containers of labels must be the same on all ranks. Raises
        `UsageError` for labels that cannot be sent, or that differ in form between ranks.
        """
        source, others = _source(placed.replica), _others(placed.replica)
        if not others:
            return own
        if source != self._transport.rank:
            return self._receive_rows(placed, parts, graph, own, functions)
        states, values, form = self._states.digests(), captured_values(*functions), _form(own.labels)
        link = self._link(ROWS, placed)
        for rank in others:
            stages = placed.grid.stages_of(rank)
            tensors = [own.tensors[value.name] for value in _own_inputs(graph, parts, stages)]
            leaves = list(trees.leaves(own.labels)) if len(parts) - 1 in stages else []
            described = [self._describe(leaf, tensors) for leaf in leaves]
            header = RowsHeader(
                sizes=dict(own.sizes),
                layouts=[TensorPlace.of(tensor).write() for tensor in tensors],
                labels=described,
                form=form,
                states=states,
                moved=self._moved(states),
                values=values,
            )
            link.send(self._transport, _encode(header), pack_all(tensors), rank)
        return own

    @staticmethod
    def _describe(leaf: Any, tensors: list[Tensor]) -> list[Any]:
        """Describe a leaf of the labels; appends its tensor to `tensors`."""
        if can_send(leaf):
            tensors.append(leaf if isinstance(leaf, Tensor) else torch.from_numpy(np.ascontiguousarray(leaf)))
            return ["tensor" if isinstance(leaf, Tensor) else "array"]
        if isinstance(leaf, Tensor):
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise UsageError(
                f"a {kind} tensor in the labels cannot be sent to the rank of the last stage; use dense tensors"
            )
        return ["value", leaf] if isinstance(leaf, _PLAIN) else ["own"]

    def _receive_rows(
        self,
        placed: Arrangement,
        parts: Sequence[TrainingPart],
        graph: Graph,
        own: StepInputs,
        functions: Sequence[Any],
    ) -> StepInputs:
        source, rank = _source(placed.replica), self._transport.rank
        header, small = _receive_header(self._transport, source, ROWS, RowsHeader)
        layouts, sizes = [TensorPlace.read(each) for each in header.layouts], header.sizes
        tensors = iter(_receive_all(self._transport, layouts, source, ROWS, small))
        stages = placed.grid.stages_of(rank)
        values = _own_inputs(graph, parts, stages)
        given = dict(own.tensors)
        for value, layout in zip(values, layouts, strict=False):
            if sizes.keys() != set(graph.symbols) or (value.evaluate(sizes), value.dtype) != (
                layout.shape,
                layout.dtype,
            ):
                raise TransportError(f"rank {source} has sent an input {value.name!r} of another shape; start again")
            given[value.name] = next(tensors).requires_grad_(own.tensors[value.name].requires_grad)
        if len(parts) - 1 not in stages:
            return StepInputs(given, sizes, None)
        labels = self._labels(header, own.labels, tensors)
        return StepInputs(given, sizes, labels, self._compare(header, functions, source))

    def _labels(self, header: RowsHeader, own: Any, tensors: Iterator[Tensor]) -> Any:
        if header.form != _form(own):
            raise UsageError(
                f"labels have another form on {self._name(self._transport.rank)} than on the rank that loads them: "
                "pass the same containers to train_step on every rank"
            )
        found = []
        for leaf, (kind, *value) in zip(trees.leaves(own), header.labels, strict=True):
            made = next(tensors) if kind in ("tensor", "array") else value[0] if kind == "value" else leaf
            found.append(made.numpy() if kind == "array" else made)
        leaves = iter(found)
        return trees.mapped(lambda _: next(leaves), own)

    def _compare(self, header: RowsHeader, functions: Sequence[Any], source: int) -> str:
        """Return why these ranks would compute with different random numbers; empty if they would not."""
        here, there = self._name(self._transport.rank), self._name(source)
        name = first_difference(header.values, captured_values(*functions))
        if name is not None:
            return (
                f"{name!r}, which loss_fn uses, has another value on {here} than on {there}; seed the generator that "
                "draws it alike on all ranks, or pass the value as a label"
            )
        states = self._states.digests()
        drawn = {*self._moved(states), *header.moved}
        unlike = [name for name in sorted(drawn) if states.get(name) != header.states.get(name)]
        if unlike:
            return (
                f"the loop drew random numbers of {' and '.join(unlike)} before this step, whose states differ between "
                f"{there} and {here}; seed them alike on all ranks, without the rank, or draw in the data set or in "
                "collate_fn of pipe.loader"
            )
        return ""

    def _moved(self, states: Mapping[str, str]) -> list[str]:
        """Return the generators that have moved since the mark."""
        return [name for name, state in states.items() if self._mark.get(name) != state]

    def _link(self, tag: int, placed: Arrangement) -> "_Link":
        if tag not in self._links or self._links[tag].placed is not placed:
            self._links[tag] = _Link(tag, placed)  # sends in an earlier placement may never end
        self._links[tag].flush()
        return self._links[tag]

    def _name(self, rank: int) -> str:
        return self._world.names[rank]


@dataclass(slots=True)
class _Link:
    """Sends of one kind that may still be in flight, and the placement in which they began."""

    tag: int
    placed: Arrangement
    pending: list[Pending] = field(default_factory=list)

    def send(self, transport: Transport, document: bytes, buffer: Tensor, to: int) -> None:
        small = buffer.numel() <= _SMALL
        data = document + b"\0" + buffer.numpy().tobytes() if small else document
        self.pending.append(post_bytes(transport, data, to, self.tag))
        if not small:
            self.pending.append(transport.send(buffer, to, self.tag))

    def flush(self) -> None:
        """Wait for the sends of the last batch."""
        for each in self.pending:
            each.wait()
        self.pending.clear()


def _receive_all(
    transport: Transport, layouts: Sequence[TensorPlace], source: int, tag: int, small: bytes
) -> list[Tensor]:
    """Return the tensors with these layouts; `small` are their bytes if they have come with the document."""
    buffer = buffer_for(layouts)
    if buffer.numel() > _SMALL:
        transport.receive(buffer, source, tag).wait()
    elif len(small) != buffer.numel():
        raise TransportError(f"rank {source} has sent {len(small)} bytes, expected {buffer.numel()}; start again")
    elif small:
        buffer.copy_(torch.frombuffer(bytearray(small), dtype=torch.uint8))
    return unpack_all(buffer, layouts)


def _encode(header: msgspec.Struct) -> bytes:
    return json.dumps(msgspec.to_builtins(header)).encode()  # unlike msgspec's own JSON, this keeps NaN


def _receive_header(transport: Transport, source: int, tag: int, kind: type[Header]) -> tuple[Header, bytes]:
    """Receive a document and the bytes of the small tensors that came with it."""
    data, _, small = receive_bytes(transport, source, tag, limit=DOCUMENT_BYTES).partition(b"\0")
    try:
        return msgspec.convert(json.loads(data), kind), small
    except ValueError as error:
        raise TransportError(f"rank {source} has sent rows of an unknown form ({error}); start again") from None


def _source(replica: Replica) -> int:
    return replica.stages[0]


def _others(replica: Replica) -> list[int]:
    return sorted({*replica.devices} - {_source(replica)})


def _own_inputs(graph: Graph, parts: Sequence[TrainingPart], stages: Sequence[int]) -> list[Any]:
    """Return the inputs of the model that these stages use, in the order of the graph."""
    names = {value.name for stage in stages for value in parts[stage].own}
    return [value for value in graph.tensor_inputs() if value.name in names]


def _form(tree: Any) -> str:
    return repr(trees.structure(tree))
