"""Tensors that a process retains from earlier stages, so that only missing tensors are sent."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
from torch import Tensor

from penstock.errors import ProgramError
from penstock.graph.ops import State
from penstock.tensors import digest
from penstock.transport.base import DOCUMENT_BYTES, Transport, receive_bytes, send_bytes
from penstock.wire import FEEDER

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
        for state in states if _name(state) in held and held[_name(state)] == digest(load(state))
    }  # fmt: skip
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
