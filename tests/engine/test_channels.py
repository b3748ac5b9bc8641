"""The two ends of a cut: order, backpressure, and nothing left posted."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.engine.channels import LocalChannel, Receiver, RemoteReceiver, RemoteSender, Sender
from penstock.errors import ConnectionBroken, TransportError
from penstock.tensors import HOST, copy_exactly, mark
from penstock.transport.base import Pending
from penstock.transport.memory_network import MemoryNetwork
from penstock.transport.messages import CLOSE, DATA, END, Format, Message
from penstock.values import Size, Value
from tests.pretend import module

FORMATS = [Format([Value("x", torch.float32, (Size("batch"), 4))], ["batch"], {"batch": 8})]
NUM_BYTES = FORMATS[0].largest({"batch": 3})
DEPTH = 2


def remote() -> tuple[MemoryNetwork, RemoteSender, Callable[[], RemoteReceiver]]:
    network = MemoryNetwork(2)
    sender = RemoteSender(network.transports[0], 1, 5, FORMATS, NUM_BYTES, DEPTH)
    return network, sender, lambda: RemoteReceiver(network.transports[1], 0, 5, FORMATS, NUM_BYTES, DEPTH)


class Handed:
    """A transport that notes what is handed to it, and how much of it."""

    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        self.rank, self.size = rank, 2
        self.sent: list[Tensor] = []
        self.num_received = 0
        self._inner = network.transports[rank]

    def send(self, buffer: Tensor, to: int, tag: int) -> Pending:
        self.sent.append(buffer.clone())
        return self._inner.send(buffer, to, tag)

    def receive(self, buffer: Tensor, source: int, tag: int) -> Pending:
        self.num_received += 1
        return self._inner.receive(buffer, source, tag)

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()


def data(index: int, batch: int = 2) -> Message:
    return Message(DATA, index, (batch,), [torch.full((batch, 4), float(index))])


class Feeding:
    """Puts messages from a thread of its own and counts them."""

    def __init__(self, sender: Sender, messages: list[Message]) -> None:
        self.num_put = 0
        self.error: BaseException | None = None
        self._outlet = sender
        self._messages = messages
        self.thread = threading.Thread(target=self._put)
        self.thread.start()

    def _put(self) -> None:
        try:
            for message in self._messages:
                self._outlet.put(message)
                self.num_put += 1
        except TransportError as error:
            self.error = error

    def settled(self) -> int:
        """How many went in before it had to wait."""
        self.thread.join(0.2)
        return self.num_put


def take_all(receiver: Receiver) -> list[Message]:
    """Everything until CLOSE, as copies."""
    taken = []
    while (message := receiver.take()).kind != CLOSE:
        taken.append(Message(message.kind, message.index, message.sizes, [t.clone() for t in message.tensors]))
        receiver.release()
    return taken


def test_ragged_microbatches_arrive_in_order() -> None:
    network, sender, make_receiver = remote()
    batches = [3, 3, 1, 2, 3]
    sent = [data(index, batch) for index, batch in enumerate(batches)]
    feeding = Feeding(sender, [*sent, Message(END, 5), *sent[:2], Message(END, 2), Message(CLOSE)])
    taken = take_all(make_receiver())
    feeding.thread.join()
    assert [message.kind for message in taken] == [DATA] * 5 + [END] + [DATA] * 2 + [END]
    for given, message in zip(sent, taken[:5], strict=True):
        assert message.index == given.index
        assert torch.equal(message.tensors[0], given.tensors[0])
    assert network.num_open() == 0


def test_put_blocks_until_the_receiver_takes() -> None:
    _, sender, make_receiver = remote()
    feeding = Feeding(sender, [*(data(index) for index in range(8)), Message(CLOSE)])
    assert feeding.settled() == DEPTH
    receiver = make_receiver()
    assert feeding.settled() == 2 * DEPTH
    receiver.take()
    assert feeding.settled() == 2 * DEPTH
    receiver.release()
    assert feeding.settled() == 2 * DEPTH + 1
    take_all(receiver)
    feeding.thread.join()


def test_a_local_channel_keeps_its_depth_and_copies() -> None:
    edge = LocalChannel(DEPTH)
    tensor = torch.zeros(2, 4).t()
    feeding = Feeding(edge, [Message(DATA, index, (2,), [tensor]) for index in range(4)])
    assert feeding.settled() == DEPTH
    first = edge.take()
    assert feeding.settled() == DEPTH + 1
    tensor.fill_(1.0)
    assert not first.tensors[0].any()
    assert first.tensors[0].stride() == tensor.stride()
    edge.abort()
    feeding.thread.join()
    assert isinstance(feeding.error, ConnectionBroken)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_abort_ends_a_wait(side: str) -> None:
    network, sender, make_receiver = remote()
    if side == "sender":
        feeding = Feeding(sender, [data(index) for index in range(4)])
        feeding.settled()
        network.transports[0].abort()
        feeding.thread.join()
        assert isinstance(feeding.error, ConnectionBroken)
    else:
        receiver = make_receiver()
        threading.Timer(0.05, network.transports[1].abort).start()
        with pytest.raises(ConnectionBroken):
            receiver.take()


def test_a_message_is_sent_when_a_device_has_copied_it(pretended: torch.device) -> None:
    transport = Handed(MemoryNetwork(2), 0)
    sender = RemoteSender(transport, 1, 5, FORMATS, NUM_BYTES, DEPTH)
    assert sender.begin(data(7)) is None  # nothing to wait for on the host
    sender.send()
    expected = transport.sent.pop()
    message = replace(data(7), tensors=[tensor.to(pretended) for tensor in data(7).tensors])
    copied = sender.begin(message)
    assert (copied.query(), transport.sent) == (False, [])
    copied.synchronize()
    sender.send()
    assert torch.equal(transport.sent[0], expected)


def test_as_many_receives_are_posted_while_a_device_copies(pretended: torch.device) -> None:
    network = MemoryNetwork(2)
    transport = Handed(network, 1)
    sender = RemoteSender(network.transports[0], 1, 5, FORMATS, NUM_BYTES, 4 * DEPTH)
    receiver = RemoteReceiver(transport, 0, 5, FORMATS, NUM_BYTES, DEPTH, device=pretended)
    taken, waits = [], []
    for index in range(4 * DEPTH):
        sender.put(data(index))
        before = module.num_waits
        assert receiver.has_arrived()
        taken.append(copy_exactly(receiver.take().tensors[0], pretended, wait=False))
        receiver.release(mark(pretended))
        assert transport.num_received == DEPTH + index + 1
        waits.append(module.num_waits - before)
    assert waits[:DEPTH] == [0] * DEPTH  # later ones wait until the device has copied the oldest
    assert [tensor.to(HOST).unique().item() for tensor in taken] == [*range(4 * DEPTH)]


def test_a_conjugate_is_sent_with_its_values() -> None:
    """Torch only notes a conjugate, and the sign of its imaginary part, until somebody reads them."""
    values = torch.tensor([[1 + 2j, 3 - 4j]])
    layout = [Format([Value("x", torch.complex64, (1, 2)), Value("y", torch.float32, (1, 2))], [], {})]
    network = MemoryNetwork(2)
    sender = RemoteSender(network.transports[0], 1, 5, layout, layout[0].largest({}), DEPTH)
    receiver = RemoteReceiver(network.transports[1], 0, 5, layout, layout[0].largest({}), DEPTH)
    noted = values.conj()
    sender.begin(Message(DATA, 0, (), [noted, noted.imag]))
    sender.send()
    found = receiver.take().tensors
    assert torch.equal(found[0], noted.resolve_conj())
    assert torch.equal(found[1], noted.imag.resolve_neg())
