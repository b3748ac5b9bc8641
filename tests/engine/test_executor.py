"""The executor over a network in memory: what it counts, and the messages that it misses."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from penstock.deploy.jobs import load_programs
from penstock.deploy.state import load_state
from penstock.engine.channels import RemoteReceiver, RemoteSender
from penstock.engine.counters import ACTIVATIONS, GRADIENTS, Counters
from penstock.engine.executor import OwnStages, run_schedule
from penstock.engine.job import StagesJob
from penstock.engine.observer import Observer, StageReport
from penstock.engine.wiring import Channels, Opening, feeder_links, open_channels
from penstock.errors import ConnectionBroken, PenstockError, TransportError
from penstock.plan.schedule.schedules import Action, forward_only
from penstock.tracing.record import FEEDER_STAGE
from penstock.transport.memory_network import MemoryNetwork
from penstock.transport.messages import CLOSE, DATA, END, Format, Message
from penstock.values import Size, Value
from penstock.zoo.weights.weights import ModuleWeights
from tests.worlds import Divided, divided_tower, made_world, tower_inputs


@pytest.fixture(scope="module")
def halves() -> Divided:
    return divided_tower(2)


class Stages:
    """Both stages on one rank, served by a thread, with the feeder's ends for the test."""

    def __init__(self, divided: Divided) -> None:
        self.network = MemoryNetwork(2)
        job = StagesJob(number=0, ranks=(1, 1), sizes={"batch": 2}, device_names=("feeder", "host1"))
        weights = ModuleWeights(divided.model)
        runtimes = {
            index: load_programs(turns, lambda state: load_state(divided.graph, state, weights))
            for index, turns in enumerate(divided.programs)
        }
        self.own = OwnStages(made_world(self.network, 1), job, runtimes)
        ranks = {FEEDER_STAGE: 0, 0: 1, 1: 1}
        opening = Opening(ranks=ranks, own=[FEEDER_STAGE], sizes=job.sizes, number=0)
        channels = open_channels(self.network.transports[0], feeder_links(divided.programs), opening)
        self.outlet = channels.senders[FEEDER_STAGE, ACTIVATIONS]
        self.inlet = channels.receivers[FEEDER_STAGE, ACTIVATIONS]
        self.error: PenstockError | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.own.serve()
        except PenstockError as error:
            self.error = error

    def put(self, *messages: Message) -> None:
        for message in messages:
            self.outlet.put(message)

    def join(self) -> None:
        """Wait until the stages have ended."""
        self._thread.join(5.0)

    def failure(self) -> str:
        """What the stages ended with."""
        self.join()
        assert self.error is not None
        return str(self.error)

    def close(self) -> None:
        for transport in self.network.transports:
            transport.abort()
        self._thread.join(5.0)
        self.own.world.close()
        assert not self._thread.is_alive()


@pytest.fixture
def stages(halves: Divided) -> Iterator[Stages]:
    made = Stages(halves)
    yield made
    made.close()


def data(index: int) -> Message:
    return Message(DATA, index, (2,), list(tower_inputs(4)[index]))


def test_results_and_reports(stages: Stages, halves: Divided) -> None:
    for num in (3, 1):
        reports: list[StageReport] = []
        thread = threading.Thread(target=stages.put, args=[*(data(i) for i in range(num)), Message(END, num)])
        thread.start()
        for index in range(num):
            message = stages.inlet.take()
            with torch.no_grad():
                assert torch.equal(message.tensors[0], halves.model(*tower_inputs(4)[index]))
            stages.inlet.release()
        message = stages.inlet.take()
        reports = [StageReport(**report) for report in json.loads(message.body)]
        stages.inlet.release()
        thread.join()
        assert [(r.stage, r.device, r.num_microbatches) for r in reports] == [(0, "host1", num), (1, "host1", num)]
        assert all(report.compute_s > 0 for report in reports)
    thread = threading.Thread(target=stages.put, args=[Message(CLOSE)])
    thread.start()
    assert stages.inlet.take().kind == CLOSE
    thread.join()
    stages.join()
    assert stages.error is None
    done = stages.own.observer.counters[1]
    assert done == Counters(
        taken={ACTIVATIONS: 7, GRADIENTS: 0}, sent={ACTIVATIONS: 7, GRADIENTS: 0}, num_run=7, busy_s=done.busy_s,
        sent_bytes=done.sent_bytes, needed_s=done.needed_s,
    )  # fmt: skip
    assert done.needed_s >= done.busy_s > 0 < done.sent_bytes


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([data(0), data(2)], "stage 0 expected microbatch 1, got microbatch 2"),
        ([data(0), data(0)], "stage 0 expected microbatch 1, got microbatch 0"),
        ([data(0), Message(END, 2)], "stage 0 expected microbatch 1, got the end of a stream of 2"),
        ([Message(END, 0), Message(END, 1)], "stage 0 expected microbatch 0, got the end of a stream of 1"),
    ],
)
def test_lost_and_repeated_messages_are_noticed(stages: Stages, sent: list[Message], expected: str) -> None:
    stages.put(*sent)
    assert expected in stages.failure()
    assert isinstance(stages.error, TransportError)


def test_broken_connection_is_raised_unchanged(stages: Stages) -> None:
    stages.network.transports[0].abort()
    stages.failure()
    assert isinstance(stages.error, ConnectionBroken)


def test_a_schedule_that_ends_too_early_says_so(halves: Divided, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagesJob, "schedule", lambda job, rank: forward_only(job.stages_of(rank), num_microbatches=1))
    stages = Stages(halves)
    stages.put(data(0))
    assert "schedule ended before the stream" in stages.failure()
    stages.close()


def test_what_a_device_computes_is_sent_while_it_computes_the_next(pretended: torch.device) -> None:
    """Six microbatches are there at once, of which four fit; the seventh is not, and no result waits for it."""
    network, events = MemoryNetwork(2), []
    layout = [Format([Value("x", torch.float32, (Size("batch"),))], ["batch"], {"batch": 2})]
    size = layout[0].largest({"batch": 2})

    class Doubling:
        keeps_inputs = False
        device = pretended

        def run(self, action: Action, message: Message | None) -> Message | None:
            assert message is not None
            events.append(f"run {action.microbatch}")
            return replace(message, tensors=[2 * tensor for tensor in message.tensors])

    class Noting(RemoteSender):
        def send(self) -> int:
            events.append("send")
            return super().send()

    def link(tag: int, source: int, to: int) -> tuple[RemoteSender, RemoteReceiver]:
        ends = network.transports
        sender = (Noting if source else RemoteSender)(ends[source], to, tag, layout, size, 6)
        return sender, RemoteReceiver(ends[to], source, tag, layout, size, 4, device=pretended)

    (feed, taken), (made, results) = link(2, 0, 1), link(4, 1, 0)
    channels = Channels(receivers={(0, ACTIVATIONS): taken}, senders={(0, ACTIVATIONS): made})
    for index in range(6):
        feed.put(Message(DATA, index, (2,), [torch.full((2,), float(index))]))
    actions = [Action("F", index, 0) for index in range(7)]
    thread = threading.Thread(target=run_schedule, args=[actions, {0: Doubling()}, channels, Observer([0])])
    thread.start()
    for index in range(7):
        if index == 6:
            assert events == [
                "run 0",
                *(event for number in range(1, 6) for event in (f"run {number}", "send")),
                "send",
            ]
            feed.put(Message(DATA, 6, (2,), [torch.full((2,), 6.0)]))
        assert results.take().tensors[0].tolist() == [2.0 * index] * 2
        results.release()
    thread.join(5.0)
    assert not thread.is_alive()
