"""Links between stages as data, and the one function that opens channels for them.

stream     driver ──0──▶ stage 0 ──2──▶ stage 1 ──4──▶ driver
training                 stage 0 ──2──▶ stage 1
                                 ◀──3──
"""

import contextlib
import json
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed

from penstock.engine.channels import Apart, LocalChannel, Receiver, RemoteReceiver, RemoteSender, Sender
from penstock.engine.counters import ACTIVATIONS, GRADIENTS
from penstock.engine.placement import Replica
from penstock.errors import TransportError, UsageError, exclude
from penstock.graph.cuts import TrainingPart
from penstock.graph.program import StageProgram
from penstock.group.world import World
from penstock.tensors import HOST
from penstock.tracing.record import FEEDER_STAGE, Recorder, Track
from penstock.transport.base import WORD_BYTES, Transport, link_tag, receive_bytes, send_bytes, training_set
from penstock.transport.messages import Format
from penstock.transport.nccl import NcclTransport, connect_nccl, describe_gpu
from penstock.values import Value
from penstock.wire import DEPTH, FEEDER

_Remote = TypeVar("_Remote", RemoteReceiver, RemoteSender)
WAYS = ["auto", "host", "nccl"]


@dataclass(frozen=True, slots=True)
class StageLink:
    """Messages of one kind from one stage to another: their values for every program, and their symbols.

    The driver is `FEEDER_STAGE`. A link may lead from the last stage back to the first.
    """

    source: int
    target: int
    kind: str
    values: Sequence[Sequence[Value]]
    symbols: Sequence[str]

    @property
    def number(self) -> int:
        """Index among the links of a pipeline, by cut, activations first; all ranks open channels in this order."""
        return 2 * (self.target + 1) + 1 if self.kind == GRADIENTS else 2 * (self.source + 1)


def stream_links(programs: Mapping[int, Sequence[StageProgram]], num_stages: int) -> list[StageLink]:
    """Return the links of these stages in a stream."""
    links: dict[int, StageLink] = {}
    for index, own in programs.items():
        after = index + 1 if index + 1 < num_stages else FEEDER_STAGE
        for link in (
            _forward(index - 1, index, [program.inputs for program in own], own),
            _forward(index, after, [program.outputs for program in own], own),
        ):
            links.setdefault(link.number, link)
    return list(links.values())


def feeder_links(programs: Sequence[Sequence[StageProgram]]) -> list[StageLink]:
    """Return the driver's two links: to the first stage and from the last stage."""
    first, last = programs[0], programs[-1]
    return [
        _forward(FEEDER_STAGE, 0, [program.inputs for program in first], first),
        _forward(len(programs) - 1, FEEDER_STAGE, [program.outputs for program in last], last),
    ]


def _forward(
    source: int, target: int, values: Sequence[Sequence[Value]], programs: Sequence[StageProgram]
) -> StageLink:
    return StageLink(source, target, ACTIVATIONS, values, programs[0].symbols)


def training_links(parts: Sequence[TrainingPart], *, evaluates: bool = False) -> list[StageLink]:
    """Return the links of training stages: activations forwards and, unless `evaluates`, gradients back."""
    links = []
    for stage, part in enumerate(parts[1:], 1):
        symbols = part.program.symbols
        links.append(StageLink(stage - 1, stage, ACTIVATIONS, [part.crossing], symbols))
        if part.backward_inputs and not evaluates:
            values = [part.crossing[position] for position in part.backward_inputs]
            links.append(StageLink(stage, stage - 1, GRADIENTS, [values], symbols))
    return links


@dataclass(slots=True)
class Channels:
    """Receivers and senders of one process's stages, by stage and kind."""

    receivers: dict[tuple[int, str], Receiver] = field(default_factory=dict)
    senders: dict[tuple[int, str], Sender] = field(default_factory=dict)
    local: dict[int, LocalChannel] = field(default_factory=dict)

    def abort(self) -> None:
        """Abort every wait within this process."""
        for channel in self.local.values():
            channel.abort()

    def trace(self, recorder: Recorder | None, stages: Sequence[int], *, feeder: int = FEEDER_STAGE) -> None:
        """Record these stages' messages, and the driver's under the number `feeder`; stop if `recorder` is None."""
        for (stage, kind), receiver in self.receivers.items():
            if stage in stages:
                receiver.trace_taking(_track(recorder, feeder if stage == FEEDER_STAGE else stage, kind))
        for (stage, kind), sender in self.senders.items():
            if stage in stages:
                sender.trace_sending(_track(recorder, feeder if stage == FEEDER_STAGE else stage, kind))


def _track(recorder: Recorder | None, stage: int, kind: str) -> Track | None:
    return Track(recorder, stage, "F" if kind == ACTIVATIONS else "B") if recorder is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Options for opening channels: `ranks` has the rank of each stage and of the driver, `own` this process's stages.

    Both ends have buffers for `depth` messages of microbatches up to `sizes`. With `direct`, tensors between stages are
    sent from `device` to device. `number` is unique to this set of channels.
    """

    ranks: Mapping[int, int]
    own: Sequence[int]
    sizes: Mapping[str, int]
    number: int
    depth: int = DEPTH
    device: torch.device = HOST
    direct: bool = False


def open_channels(transport: Transport, links: Sequence[StageLink], opening: Opening) -> Channels:
    """Open this process's ends of links, in one order on all ranks, which avoids deadlocks."""
    channels = Channels()
    for link in sorted(links, key=lambda link: link.number):
        if link.source in opening.own:
            to = opening.ranks[link.target]
            channels.senders[link.source, link.kind] = _open(RemoteSender, transport, link, to, opening, channels)
        if link.target in opening.own:
            source = opening.ranks[link.source]
            channels.receivers[link.target, link.kind] = _open(
                RemoteReceiver, transport, link, source, opening, channels
            )
    return channels


def _open(
    remote: Callable[..., _Remote],
    transport: Transport,
    link: StageLink,
    rank: int,
    opening: Opening,
    channels: Channels,
) -> _Remote | LocalChannel:
    """Open this process's end of a link to a rank, possibly its own."""
    with_feeder = FEEDER_STAGE in (link.source, link.target)
    if rank == transport.rank:
        # one thread runs both ends of a link within a process, so it must never wait for room
        return channels.local.setdefault(link.number, LocalChannel(opening.depth if with_feeder else None))
    sizes = opening.sizes
    formats = [Format(values, link.symbols, sizes) for values in link.values]
    tag = link_tag(opening.number, link.number)
    if opening.direct and not with_feeder:  # the driver's ends are on its host
        rooms = [each.largest_apart(sizes) for each in formats]
        apart = Apart(opening.device, max(num_apart for _, num_apart in rooms))
        return remote(transport, rank, tag, formats, max(rooms)[0], opening.depth, apart=apart)
    num_bytes = max(each.largest(sizes) for each in formats)
    return remote(transport, rank, tag, formats, num_bytes, opening.depth, device=opening.device)


class GrowingChannels:
    """Channels of one replica in training, reopened when microbatches outgrow their buffers.

    All processes know the sizes of a step, so all open new channels at the same step. `device` is this process's own;
    with `direct`, tensors are sent from device to device. Successive placements have separate channel numbers, by
    `first_generation`: receives posted for an earlier placement never match a send.
    """

    def __init__(
        self,
        transport: Transport,
        links: Sequence[StageLink],
        replica: Replica,
        *,
        evaluates: bool = False,
        device: torch.device = HOST,
        direct: bool = False,
        first_generation: int = 0,
    ) -> None:
        self._transport, self._links, self._replica = transport, links, replica
        self._evaluates, self._device, self._direct = evaluates, device, direct
        self._sizes: dict[str, int] = {}
        self.generation = first_generation
        self.channels = Channels()

    def fit(self, sizes: Mapping[str, int]) -> bool:
        """Open larger channels if a size exceeds all earlier sizes; return whether channels were opened."""
        if all(size <= self._sizes.get(symbol, 0) for symbol, size in sizes.items()):
            return False
        self._sizes = {symbol: max(size, self._sizes.get(symbol, 0)) for symbol, size in sizes.items()}
        self.generation += 1
        stages = self._replica.stages
        opening = Opening(
            ranks=dict(enumerate(stages)),
            own=[stage for stage, rank in enumerate(stages) if rank == self._transport.rank],
            sizes=self._sizes,
            number=training_set(self.generation, evaluates=self._evaluates),
            device=self._device,
            direct=self._direct,
        )
        self.channels = open_channels(self._transport, self._links, opening)
        return True


def go_direct(world: World, ranks: Collection[int], device: torch.device) -> bool:
    """Negotiate NCCL between these ranks and switch the world's transport to it if all agree; return whether they do.

    The ranks and the driver call this. The driver's `world.between_gpus` decides: `auto` uses NCCL if there are several
    ranks, each with NCCL and a GPU of its own, and the run has no key; `host` never uses it; `nccl` requires it. Raises
    `UsageError` on all these ranks if NCCL is required but not usable.
    """
    mine = describe_gpu(device) if world.rank in ranks else {}
    others, host = sorted(set(ranks) - {FEEDER}), world.transport.inner
    if world.rank == FEEDER:
        told = {rank: json.loads(receive_bytes(world.transport, rank, limit=WORD_BYTES)) for rank in others}
        told |= {FEEDER: mine} if mine else {}
        problem = why_not({world.names[rank]: one for rank, one in sorted(told.items())})
        if world.secured:
            problem = "NCCL does not encrypt, and this run has a key"
        wanted = world.between_gpus != "host" and len(told) > 1
        known = host.name if isinstance(host, NcclTransport) else uuid.uuid4().hex
        decision = {
            "name": known if wanted and not problem else "",
            "problem": problem if world.between_gpus == "nccl" else "",
        }
        # a rank that reads a decision with a problem may end the group before the next rank has been sent the decision
        expected = (TransportError,) if decision["problem"] else ()
        for rank in others:
            with contextlib.suppress(*expected):
                send_bytes(world.transport, json.dumps(decision).encode(), rank)
    else:
        send_bytes(world.transport, json.dumps(mine).encode(), FEEDER)
        decision = json.loads(receive_bytes(world.transport, FEEDER, limit=WORD_BYTES))
    exclude("between_gpus", decision["problem"], decision["problem"])
    if decision["name"] and not isinstance(host, NcclTransport):
        direct = NcclTransport(host, world.store, decision["name"], connect_nccl)
        world.transport.become(direct)
        world.health.when_failed(direct.abort)
    return bool(decision["name"])


def check_way(way: str, device: str) -> None:
    """Raise `UsageError` for an unknown backend between GPUs, and for NCCL without GPUs."""
    if way not in WAYS:
        raise UsageError(f"between_gpus must be one of {', '.join(WAYS)}; got {way!r}")
    if way == "nccl" and not device.startswith("cuda"):
        raise UsageError(f"NCCL needs CUDA, but stages compute on {device}; set device='cuda' or omit between_gpus")


def why_not(devices: Mapping[str, Mapping[str, str]]) -> str:
    """Return the reason why NCCL cannot connect these devices; empty if it can.

    >>> why_not({"rank 0": {"gpu": "GPU-1", "nccl": "yes"}, "rank 1": {"gpu": "GPU-1", "nccl": "yes"}})
    'NCCL needs a GPU for each process, but rank 0 and rank 1 share one'
    """
    seen: dict[str, str] = {}
    for name, device in devices.items():
        if not device["gpu"]:
            return f"NCCL needs CUDA, but {name} does not compute on a CUDA device"
        if not device["nccl"]:
            return f"the torch of {name} was built without NCCL"
        if device["gpu"] in seen:
            return f"NCCL needs a GPU for each process, but {seen[device['gpu']]} and {name} share one"
        seen[device["gpu"]] = name
    return ""
