"""The executor: runs a schedule's actions in order on stages, and takes and sends their messages."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch

from penstock.engine.channels import Receiver, RemoteReceiver, RemoteSender, Sender
from penstock.engine.counters import ACTIVATIONS, GRADIENTS, write_counters
from penstock.engine.job import StagesJob
from penstock.engine.observer import Observer, StreamObserver
from penstock.engine.stages import ForwardStage
from penstock.engine.wiring import Channels, Opening, StageLink, open_channels, stream_links
from penstock.errors import ConnectionBroken, OutOfMemory, RunError, TransportError
from penstock.group.world import World
from penstock.plan.schedule.schedules import STAGE_KINDS, Action
from penstock.resources import is_out_of_memory
from penstock.runtime.registry import StageRuntime
from penstock.tensors import HOST, copy_exactly, mark
from penstock.text import first_line
from penstock.tracing.record import FEEDER_STAGE
from penstock.transport.messages import CLOSE, DATA, END, Message
from penstock.wire import FEEDER

# kind of message that an action takes from one neighbour and sends to the other; other actions have no messages
CARRIES = {"F": ACTIVATIONS, "B": GRADIENTS, "I": GRADIENTS}


class Stage(Protocol):
    """A stage as run by the executor: it only computes; the executor takes and sends its messages."""

    # True if the stage needs an action's inputs after the action, so that they must be copied from the buffer
    keeps_inputs: ClassVar[bool]

    @property
    def device(self) -> torch.device:
        """Device on which the stage computes."""

    def run(self, action: Action, message: Message | None) -> Message | None:
        """Run an action on its incoming message, if any; return the message to send, if any.

        Raises `RunError` if an operation fails.
        """


def run_schedule(
    actions: Iterable[Action], stages: Mapping[int, Stage], channels: Channels, observer: Observer
) -> int | None:
    """Run actions in order; return the kind of message that ended all stages, END or CLOSE, or None.

    Each action takes its message, its stage runs it, and the result is sent:

        receiver ──▶ take ──▶ check ──▶ stage.run ──▶ send ──▶ sender

    What a GPU computes is sent once it is copied to the host, if possible while the GPU runs the next action:

        host     run 0 ──▶ begin 0 ──▶ take 1 ──▶ run 1 ──▶ send 0 ──▶ begin 1 ──▶ …
        GPU          [ run 0 ][ copy 0 ]     [ run 1 ][ copy 1 ]

    The end of a stream follows the last microbatch from stage to stage. Raises `RunError` naming stage and
    microbatch if an operation fails, `TransportError` for a message that was lost, repeated or damaged.
    """
    ended: dict[int, int] = {}
    outbox = _Outbox(observer)
    for action in actions:
        if action.stage in ended:
            continue
        kind = CARRIES.get(action.kind, "")
        receiver = channels.receivers.get((action.stage, kind))
        message = None
        if action.kind not in STAGE_KINDS:
            observer.starts(action, kind if receiver is not None else None)
        if receiver is not None:
            if not receiver.has_arrived():
                outbox.send()
            message = _take(receiver, action, kind, stages[action.stage], observer)
        if message is not None and message.kind != DATA:
            outbox.send()
            _pass_on(action, message, channels, observer)
            ended[action.stage] = message.kind
            if len(ended) == len(stages):
                return message.kind
            continue
        _run(action, kind, message, stages[action.stage], channels, outbox)
        if receiver is not None and not _copies(stages[action.stage], receiver):
            receiver.release()
    outbox.send()
    return None


class _Outbox:
    """The message that a device may still be copying for a sender; the next one is added when it is sent."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self._begun: tuple[Action, str, RemoteSender, Any] | None = None  # with the event at which it is copied

    def put(self, action: Action, kind: str, sender: Sender, message: Message) -> None:
        """Send a message now, or when it is copied."""
        if not isinstance(sender, RemoteSender):
            self.observer.sent(action, kind, num_bytes=sender.put(message))
            return
        copied = sender.begin(message)
        self.observer.sends(action)
        self._begun = action, kind, sender, copied
        if copied is None:
            self.send()

    def send(self, *, wait: bool = True) -> None:
        """Send the message, if there is one; without `wait` only if it is copied."""
        if self._begun is None:
            return
        action, kind, sender, copied = self._begun
        with _naming(action):
            if copied is not None:
                if not wait and not copied.query():
                    return
                copied.synchronize()  # the device's time, not the sender's
            self._begun = None
            begin_s = self.observer.clock()
            self.observer.sent(action, kind, num_bytes=sender.send(), begin_s=begin_s)


def _copies(stage: Stage, receiver: Receiver) -> bool:
    """Return whether an action's inputs are copied from the receiver's buffer before the action."""
    return stage.keeps_inputs or (stage.device != HOST and _is_buffered(receiver))


def _is_buffered(receiver: Receiver) -> bool:
    """Return whether tensors arrive in a buffer of the host, which is only posted again at an event."""
    return isinstance(receiver, RemoteReceiver) and not receiver.direct


@contextlib.contextmanager
def _naming(action: Action) -> Iterator[None]:
    """Name the action's stage and microbatch in a `RunError`, and in an operation's error, which becomes one."""
    try:
        yield
    except ConnectionBroken:
        raise
    except RunError as error:
        raise type(error)(f"{_place(action)}: {error}") from error
    except RuntimeError as error:
        kind = OutOfMemory if is_out_of_memory(error) else RunError
        what = "forward" if action.kind in {"F", "R"} else "backward"
        raise kind(f"{_place(action)}: the {what} failed: {first_line(error)}") from error


def _place(action: Action) -> str:
    return f"stage {action.stage}, microbatch {action.microbatch}"


def _take(receiver: Receiver, action: Action, kind: str, stage: Stage, observer: Observer) -> Message:
    """Take an action's message, END or CLOSE; raise `TransportError` if the message is not the expected one."""
    with _naming(action):
        message = receiver.take()
    if message.kind != CLOSE and message.index != action.microbatch:
        raise TransportError(
            f"stage {action.stage} expected microbatch {action.microbatch}, got {message}: a message was lost or "
            "repeated; start again"
        )
    if message.kind == DATA and _copies(stage, receiver):  # kept inputs must not occupy the buffer of the next message
        buffered = _is_buffered(receiver)
        with _naming(action):
            message.tensors = [copy_exactly(tensor, stage.device, wait=not buffered) for tensor in message.tensors]
            receiver.release(mark(stage.device) if buffered else None)
    observer.took(action, kind, message)
    return message


def _run(action: Action, kind: str, message: Message | None, stage: Stage, channels: Channels, outbox: _Outbox) -> None:
    """Run an action on a stage, and send the result as a message of a kind."""
    # the next computation may take long to queue, and a synchronization waits for other processes
    outbox.send(wait=action.kind in STAGE_KINDS)
    if action.kind in STAGE_KINDS:
        with _naming(action):
            stage.run(action, None)
        return
    sender, receiver = channels.senders.get((action.stage, kind)), channels.receivers.get((action.stage, kind))
    shared = any(end is not None and end.direct for end in (sender, receiver))
    with _naming(action), outbox.observer.computing(action, stage.device, shared=shared):
        result = stage.run(action, message)
    outbox.send()
    if result is not None and sender is not None:
        with _naming(action):
            outbox.put(action, kind, sender, result)


def _pass_on(action: Action, message: Message, channels: Channels, observer: Observer) -> None:
    """Forward END or CLOSE to the next stage, with the observer's report on this stage."""
    receiver, sender = channels.receivers[action.stage, ACTIVATIONS], channels.senders[action.stage, ACTIVATIONS]
    ended = replace(message, body=observer.ended(action, message))
    observer.sent(action, ACTIVATIONS, num_bytes=sender.put(ended))
    if message.kind == END:
        receiver.release()


class OwnStages:
    """The stages of one process in a job, with their channels and counters.

    With `direct` tensors between stages are sent from device to device. `feeds` are the driver's links, on the driver
    only. From now on heartbeats report the stages' progress.
    """

    def __init__(
        self,
        world: World,
        job: StagesJob,
        runtimes: Mapping[int, Sequence[StageRuntime]],
        direct: bool = False,
        feeds: Iterable[StageLink] = (),
    ) -> None:
        self.world, self.job = world, job
        self.stages = {index: ForwardStage(each) for index, each in sorted(runtimes.items())}
        feeds = list(feeds)
        links = {link.number: link for link in feeds}
        programs = {index: [runtime.program for runtime in each] for index, each in runtimes.items()}
        links.update({link.number: link for link in stream_links(programs, len(job.ranks))})
        devices = [stage.device for stage in self.stages.values()]
        opening = Opening(
            ranks={FEEDER_STAGE: FEEDER} | dict(enumerate(job.ranks)),
            own=[*self.stages, *([FEEDER_STAGE] if feeds else [])],
            sizes=job.sizes,
            number=job.number,
            depth=job.options.depth,
            device=devices[0] if devices else HOST,
            direct=direct,
        )
        self.channels = open_channels(world.transport, list(links.values()), opening)
        name = job.device_names[world.rank]
        self.observer = StreamObserver(self.stages, name, len(job.ranks) - 1)
        if self.stages:
            world.health.status = lambda: write_counters(job.number, world.rank, self.observer.counters)

    def serve_stream(self) -> int:
        """Run one stream; returns the kind of the message that ended it, END or CLOSE."""
        self.observer.begin()
        with torch.inference_mode():
            kind = run_schedule(self.job.schedule(self.world.rank), self.stages, self.channels, self.observer)
        if kind is None:
            raise RunError("the schedule ended before the stream; it must have as many microbatches as the stream")
        return kind

    def serve(self, ended: Callable[[], None] = lambda: None) -> None:
        """Run stream after stream until a CLOSE message, in a thread with the job's number of torch threads.

        `ended` is called after each stream.
        """
        while self.serve_stream() != CLOSE:
            ended()
