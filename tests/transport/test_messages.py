"""Messages: there and back, and every kind of damage noticed."""

import random

import pytest
import torch
from torch import Tensor

from penstock.errors import TransportError
from penstock.transport.messages import BODY_BYTES, CLOSE, DATA, END, Format, Message
from penstock.values import Size, Value

pytestmark = pytest.mark.board

FORMAT = Format(
    [
        Value("a", torch.float32, (Size("batch"), 3, 5)),
        Value("b", torch.bool, (Size("batch"),)),
        Value("c", torch.int64, ()),
    ],
    ["batch"],
    {"batch": 4},
)
LARGEST = FORMAT.largest({"batch": 4})


def example(batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(batch)
    a = torch.randn(batch, 5, 3, generator=generator).transpose(1, 2)
    return [a, torch.rand(batch, generator=generator) > 0.5, torch.tensor(7)]


def written(message: Message) -> Tensor:
    """A message as the receiver has it: in a larger buffer with old bytes behind it."""
    buffer = torch.zeros(LARGEST, dtype=torch.uint8)
    num_bytes = FORMAT.write(message, buffer)
    received = torch.full((LARGEST,), 0x5A, dtype=torch.uint8)
    received[:num_bytes] = buffer[:num_bytes]
    return received


@pytest.mark.parametrize("batch", [0, 1, 2, 4])
def test_data_messages_round_trip(batch: int) -> None:
    tensors = example(batch)
    message = FORMAT.read(written(Message(DATA, 41, (batch,), tensors)))
    assert (message.kind, message.index, message.sizes) == (DATA, 41, (batch,))
    for sent, received in zip(tensors, message.tensors, strict=True):
        assert torch.equal(sent, received)
        assert sent.stride() == received.stride()


@pytest.mark.parametrize("kind", [END, CLOSE])
def test_control_messages_round_trip(kind: int) -> None:
    message = FORMAT.read(written(Message(kind, 3, body=b'{"stage": 1}')))
    assert (message.kind, message.index, message.body, message.tensors) == (kind, 3, b'{"stage": 1}', [])


def test_every_damaged_byte_is_noticed() -> None:
    whole = written(Message(DATA, 1, (1,), example(1)))
    length = FORMAT.write(Message(DATA, 1, (1,), example(1)), torch.zeros(LARGEST, dtype=torch.uint8))
    generator = random.Random(0)
    for position in range(length):
        damaged = whole.clone()
        damaged[position] ^= generator.randint(1, 255)
        with pytest.raises(TransportError):
            FORMAT.read(damaged)


@pytest.mark.parametrize("word", [0, -1, 1, 2**63 - 1, -(2**63)])
def test_every_damaged_word_is_noticed(word: int) -> None:
    whole = written(Message(DATA, 1, (1,), example(1)))
    length = FORMAT.write(Message(DATA, 1, (1,), example(1)), torch.zeros(LARGEST, dtype=torch.uint8))
    for position in range(length // 8):
        damaged = whole.clone()
        if damaged.view(torch.int64)[position] == word:
            continue
        damaged.view(torch.int64)[position] = word
        with pytest.raises(TransportError):
            FORMAT.read(damaged)


def test_noise_is_not_a_message() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        with pytest.raises(TransportError):
            FORMAT.read(torch.randint(0, 256, (LARGEST,), generator=generator).to(torch.uint8))


def test_a_truncated_message_is_noticed() -> None:
    whole = written(Message(DATA, 1, (4,), example(4)))
    for kept in (0, 8, 64, 128, 192, 256):
        cut = torch.zeros(LARGEST, dtype=torch.uint8)
        cut[:kept] = whole[:kept]
        with pytest.raises(TransportError):
            FORMAT.read(cut)


def test_buffer_read_twice_is_refused() -> None:
    received = written(Message(DATA, 1, (2,), example(2)))
    FORMAT.read(received)
    with pytest.raises(TransportError, match="checksum"):
        FORMAT.read(received)


def test_message_larger_than_its_buffer_is_refused() -> None:
    small = torch.zeros(256, dtype=torch.uint8)
    with pytest.raises(TransportError, match="largest microbatch"):
        FORMAT.write(Message(DATA, 0, (4,), example(4)), small)
    with pytest.raises(TransportError, match="buffers hold"):
        FORMAT.write(Message(END, 0, body=b"x" * (2 * BODY_BYTES)), torch.zeros(LARGEST, dtype=torch.uint8))


@pytest.mark.parametrize("sizes", [(5,), (-1,), (2**40,), (0,)])
def test_sizes_or_strides_of_another_program_are_refused(sizes: tuple[int]) -> None:
    """Right checksum, wrong contents: what another version or a forger would send."""
    buffer = torch.zeros(LARGEST, dtype=torch.uint8)
    FORMAT.write(Message(DATA, 0, sizes, [t.expand(t.shape) for t in example(1)]), buffer)
    if sizes != (0,):
        with pytest.raises(TransportError):
            FORMAT.read(buffer)


def forged(sizes: int, strides: list[int]) -> Tensor:
    """A message whose header claims other sizes and strides, with the checksum of what it claims."""
    buffer = written(Message(DATA, 0, (1,), example(1)))
    words = buffer.view(torch.int64)
    words[8 : 9 + len(strides)] = torch.tensor([sizes, *strides])
    words[7] = 0
    words[7] = words[: words[3] // 8].sum()
    return buffer


@pytest.mark.parametrize(
    ("batch", "strides", "words"),
    [
        (2**30, [0, 1, 3, 0], "claims the size 1073741824 for 'batch', the job has at most 4"),
        (5, [0, 1, 3, 0], "claims the size 5 for 'batch', the job has at most 4"),
        (-1, [0, 1, 3, 0], "claims the size -1 for 'batch'"),
        (1, [2**33, 2**33, 2**33, 1], r"claims strides that take 618 GB, .* may take 1\.07 GB"),
        (1, [15, 2**40, 3, 1], "claims strides that take 8.8 TB"),
        (1, [15, 2**28, 2**28, 1], "claims strides that take"),
        (1, [15, -1, 3, 1], "claims a negative stride for a"),
        (0, [15, -1, 3, 1], "claims a negative stride for a"),
    ],
)
def test_headers_that_claim_more_than_the_job_has(
    batch: int, strides: list[int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.transport.messages.allowed_bytes", lambda: 2**30)
    with pytest.raises(TransportError, match=words):
        FORMAT.read(forged(batch, strides))


@pytest.mark.parametrize("num_apart", [7, 64, 2**31])
def test_separate_tensors_stay_within_the_job(num_apart: int) -> None:
    """`fetch` would receive so many bytes into a buffer that holds fewer."""
    layout = Format([Value("x", torch.uint8, (1,))], [], {})
    buffer = torch.zeros(layout.largest({}), dtype=torch.uint8)
    layout.write(Message(DATA, 0, (), [torch.ones(1, dtype=torch.uint8)]), buffer, torch.zeros(64, dtype=torch.uint8))
    words = buffer.view(torch.int64)
    words[5] = num_apart + (num_apart == 64) * 64
    words[7] = 0
    words[7] = words[: words[3] // 8].sum()
    with pytest.raises(TransportError, match="bytes of tensors, the job has at most 64"):
        layout.read(buffer, lambda num_bytes: torch.zeros(64, dtype=torch.uint8)[:num_bytes])


def test_gaps_that_a_model_makes_still_travel() -> None:
    """The first token of 1370 is a view with gaps of 1370 times its bytes."""
    sent = torch.randn(4, 1370, 64)[:, 0]
    layout = Format([Value("x", torch.float32, (Size("batch"), 64))], ["batch"], {"batch": 4})
    buffer = torch.zeros(layout.largest({"batch": 4}), dtype=torch.uint8)
    layout.write(Message(DATA, 0, (4,), [sent]), buffer)
    (received,) = layout.read(buffer).tensors
    assert torch.equal(received, sent)
    assert received.stride() == sent.stride()


def test_another_number_of_tensors_is_refused() -> None:
    buffer = torch.zeros(LARGEST, dtype=torch.uint8)
    FORMAT.write(Message(DATA, 0, (1,), example(1)[:2]), buffer)
    with pytest.raises(TransportError, match="2 tensors; expected 3"):
        FORMAT.read(buffer)
