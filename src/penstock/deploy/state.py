"""Tensors by name on any rank: read from a model, moved between ranks, kept so that training can continue."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from penstock.errors import ProgramError, TransportError, UsageError
from penstock.graph.graph import Graph
from penstock.graph.ops import State
from penstock.packing import PACKINGS, is_packable, packed_shape
from penstock.runtime.registry import parse_runtime
from penstock.tensors import HOST, digest, moved, sum_words
from penstock.transport.base import (
    CONTROL,
    DOCUMENT_BYTES,
    WORD_BYTES,
    Pending,
    Transport,
    post_receive,
    post_send,
    receive_bytes,
    send_bytes,
)
from penstock.wire import FEEDER
from penstock.zoo.weights.weights import PackedWeights, Weights, origin_of


@dataclass(frozen=True, slots=True)
class Held:
    """The ranks that hold each tensor, by tensor name; `load` reads a tensor on a rank that holds it."""

    ranks: Mapping[str, Sequence[int]]
    load: Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The ranks that want each tensor, by tensor name; `room` allocates a contiguous tensor to receive into."""

    ranks: Mapping[str, Sequence[int]]
    room: Callable[[str], Tensor]


def redistribute(
    have: Held, want: Wanted, transport: Transport, tag: int = CONTROL, *, in_flight: int = 1
) -> Iterator[tuple[str, Tensor]]:
    """Move tensors from the ranks that hold them to the ranks that want them, and yield this rank's.

    Every participating rank calls this with the same `ranks` and exhausts the iterator. Up to `in_flight` tensors are
    in memory in addition to those that the caller keeps; they are yielded in the order of `want`. With several, links
    between different ranks are busy simultaneously. A tensor that a rank already holds is not moved; a tensor that
    several ranks hold is sent by the first of them.

        have  a: 0     b: 0 1              a: rank 0 ──▶ rank 1
        want  a: 1     b: 1 2     gives    b: rank 0 ──▶ rank 2, and rank 1 has it

    Raises `TransportError` after the last tensor if any tensor was damaged in transit.
    """
    checksums: dict[tuple[int, int], int] = {}
    moving: deque[_Moving] = deque()
    for name in want.ranks:
        moving.append(_begin(name, have, want, transport, tag))
        if len(moving) >= in_flight:
            yield from _finish(moving.popleft(), checksums)
    while moving:
        yield from _finish(moving.popleft(), checksums)
    for (source, target), checksum in sorted(checksums.items()):
        word = checksum.to_bytes(8, "little")
        if transport.rank == source:
            send_bytes(transport, word, target, tag)
        elif receive_bytes(transport, source, tag, limit=WORD_BYTES) != word:
            raise TransportError("weights arrived damaged: the checksums differ; check the network and try again")


@dataclass(slots=True)
class _Moving:
    """A tensor in flight, as seen by this rank: the pairs of ranks that exchange it, and the pending operations."""

    name: str
    tensor: Tensor | None
    wanted: bool
    pairs: list[tuple[int, int]] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    arriving: Tensor | None = None  # the host copy, if the tensor itself is on another device


def _begin(name: str, have: Held, want: Wanted, transport: Transport, tag: int) -> _Moving:
    """Post this rank's sends or its receive of a tensor."""
    holders, targets = have.ranks[name], want.ranks[name]
    source, missing = holders[0], [rank for rank in targets if rank not in holders]
    move = _Moving(name, None, transport.rank in targets)
    if transport.rank in holders and (move.wanted or (transport.rank == source and missing)):
        move.tensor = have.load(name)
        for rank in missing if transport.rank == source else ():
            move.pending.append(post_send(transport, move.tensor, rank, tag))
            move.pairs.append((source, rank))
    elif move.wanted:
        move.tensor = want.room(name)
        move.arriving, pending = post_receive(transport, move.tensor, source, tag)
        move.pending.append(pending)
        move.pairs.append((source, transport.rank))
    return move


def _finish(move: _Moving, checksums: dict[tuple[int, int], int]) -> Iterator[tuple[str, Tensor]]:
    """Wait until a tensor was sent or received, add it to its pairs' checksums, and yield it if it is wanted."""
    for pending in move.pending:
        pending.wait()
    tensor = move.tensor
    if tensor is None:
        return
    if move.arriving is not None and move.arriving is not tensor:
        tensor.copy_(move.arriving)
    if move.pairs:
        words = sum_words(tensor.detach().cpu())
        checksums |= {pair: (checksums.get(pair, 0) * 31 + words) % 2**64 for pair in move.pairs}
    if move.wanted:
        yield move.name, tensor


@dataclass(slots=True, kw_only=True)
class TrainState:
    """One process's part of the state from which training continues, by the model's own names."""

    tensors: dict[str, Tensor]  # parameters and buffers
    slots: dict[str, dict[str, Any]] = field(default_factory=dict)  # optimizer state by parameter, mostly tensors
    step: int = 0
    random: Tensor = field(default_factory=torch.get_rng_state)

    def named(self) -> dict[str, Tensor]:
        """Return the tensors under the names used for moving and saving, which distinguish weights from slots.

        >>> list(TrainState(tensors={"w": torch.ones(1)}, slots={"w": {"exp_avg": torch.ones(1)}}).named())
        ['model/w', 'optimizer/exp_avg/w']
        """
        slots = {
            f"optimizer/{slot}/{name}": value
            for name, held in self.slots.items()
            for slot, value in held.items()
            if isinstance(value, Tensor)
        }
        return {f"model/{name}": tensor for name, tensor in self.tensors.items()} | slots

    def scalars(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's non-tensor values, by parameter."""
        return {
            name: {slot: value for slot, value in held.items() if not isinstance(value, Tensor)}
            for name, held in self.slots.items()
        }


def source_of(name: str) -> str:
    """Return the model's name for an entry of `TrainState.named`; for a slot, its parameter's name.

    >>> source_of("model/w"), source_of("optimizer/exp_avg/w")
    ('w', 'w')
    """
    kind, rest = name.split("/", 1)
    return rest if kind == "model" else rest.split("/", 1)[1]


def load_state(graph: Graph, state: State, weights: Weights) -> Tensor:
    """Read a tensor of a model's state to the host: constants from the graph, other tensors by name from the weights.

    A cache is zero; a tensor with a packing has the bytes of its file.
    """
    if state.kind == "cache":
        return torch.zeros(state.value.evaluate({}), dtype=state.value.dtype)
    if state.kind == "constant":
        return graph.constants[state.source].cpu()
    if state.kind == "buffer" and state.source not in weights.names():
        # a buffer that checkpoints leave out: computed when the model was built
        return graph.constants[state.source].cpu()
    if state.packing:
        source, name = origin_of(weights, state.source)
        if isinstance(source, PackedWeights):
            return source.load_packed(name)
    tensor = weights.load(state.source)
    wanted = state.value.evaluate({})
    if tuple(tensor.shape) != wanted:
        raise UsageError(
            f"{state.source} is {tuple(tensor.shape)} in the weights but {wanted} in the model; "
            "give weights of this model"
        )
    return tensor.detach().to("cpu", state.value.dtype)


def with_packings(graph: Graph, weights: Weights, runtimes: Collection[str]) -> Graph:
    """Return a graph whose stages receive weights in the bits of their file, if they are stored in blocks.

    Raises `UsageError` if one of the runtimes is to hold such weights as `stored` and has no products in them, or if
    there are none.
    """
    stored = next((name for name in sorted(runtimes) if parse_runtime(name).is_stored), "")
    states = []
    for state in graph.states:
        is_number = state.kind == "parameter" and state.value.dtype == torch.float32
        source, name = origin_of(weights, state.source) if is_number else (None, "")
        packing = source.packing(name) if isinstance(source, PackedWeights) else ""
        fits = is_packable(state.value.shape, packing)
        if packing and stored and not (fits and PACKINGS[packing].bits):
            raise UsageError(
                f"{stored} has no products in {packing}, which the file has for {state.source}; use a file in "
                f"{', '.join(name for name, form in PACKINGS.items() if form.bits)}, or the runtime eager, which "
                "unpacks it"
            )
        packing = packing if fits else ""
        states.append(replace(state, packing=packing))
    if stored and not any(state.packing for state in states):
        raise UsageError(
            f"{stored} is for weights in a file's blocks, and this model has none; use onnxruntime:int8 or "
            "onnxruntime:int4, which round floats"
        )
    return replace(graph, states=tuple(states))


def room_for(state: State) -> Tensor:
    """Allocate an empty host tensor for a tensor of a model, or for its bytes."""
    if state.packing:
        return torch.empty(packed_shape(state.packing, state.value.evaluate({})), dtype=torch.uint8)
    return torch.empty(state.value.evaluate({}), dtype=state.value.dtype)


def send_state(transport: Transport, states: Iterable[State], load: Callable[[State], Tensor], rank: int) -> None:
    """Send a program's state from the driver to a rank that calls `receive_state`."""
    for _ in _first_weights(transport, states, rank, load):
        pass  # this rank wants no tensor: nothing is yielded


def receive_state(transport: Transport, states: Iterable[State], device: torch.device = HOST) -> dict[str, Tensor]:
    """Receive a program's state from the driver; on the host each tensor is received in place, without a copy.

    Raises `TransportError` as `redistribute` does.
    """
    return {name: moved(tensor, device) for name, tensor in _first_weights(transport, states, transport.rank, room_for)}


def _first_weights(
    transport: Transport, states: Iterable[State], rank: int, make: Callable[[State], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    by_name = {state.value.name: state for state in states}

    def made(name: str) -> Tensor:
        return make(by_name[name])

    have, want = Held(dict.fromkeys(by_name, (FEEDER,)), made), Wanted(dict.fromkeys(by_name, (rank,)), made)
    return redistribute(have, want, transport)


T = TypeVar("T")


class Holdings:
    """Tensors of the stages that a process held last, by name in the model and by content.

    Example:
        holdings = Holdings()
        holdings.keep(states, tensors)                # the tensors of the current stages
        have = holdings.claim(transport, states)      # those that the next stages reuse; the others are sent
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def keep(self, states: Iterable[State], tensors: Mapping[str, Tensor]) -> None:
        """Retain the tensors of stages, in addition to those already held."""
        for state in states:
            if tensors[state.value.name].is_cpu:
                self._tensors[_name(state)] = tensors[state.value.name]

    def claim(self, transport: Transport, states: Sequence[State]) -> dict[str, Tensor]:
        """Report the held tensors of these states to the driver, and return by value name those that it need not send.

        All other tensors are released first, before new ones are allocated.
        """
        held = {name: self._tensors[name] for state in states if (name := _name(state)) in self._tensors}
        self._tensors = {}
        digests = {name: digest(tensor) for name, tensor in held.items()}
        send_bytes(transport, msgspec.json.encode(digests), FEEDER)
        right = _read(receive_bytes(transport, FEEDER, limit=DOCUMENT_BYTES), list[str])
        self._tensors = {name: held[name] for name in right if name in held}
        return {state.value.name: self._tensors[_name(state)] for state in states if _name(state) in self._tensors}


def compare_holdings(
    transport: Transport, rank: int, states: Sequence[State], load: Callable[[State], Tensor]
) -> Collection[str]:
    """Receive a rank's digests of these states, reply with those that match, and return these by value name."""
    held = _read(receive_bytes(transport, rank, limit=DOCUMENT_BYTES), dict[str, str])
    right = {
        _name(state): state.value.name
        for state in states
        if _name(state) in held and held[_name(state)] == digest(load(state))
    }
    send_bytes(transport, msgspec.json.encode(list(right)), rank)
    return {state.value.name for state in states if _name(state) in right}


def _name(state: State) -> str:
    return f"{state.kind}/{state.source}"


def _read(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError):
        raise ProgramError(
            "a process must report its held tensors by name; start every process with the same command"
        ) from None
