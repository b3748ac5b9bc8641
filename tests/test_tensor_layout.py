"""Tensors to bytes and back, with their strides."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.tensors import copy_exactly, is_dense, num_payload_bytes, pack, unpack
from tests.fewer import examples

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint8]


def through_bytes(tensor: Tensor) -> Tensor:
    """Pack a tensor between guards and unpack it."""
    num_bytes = num_payload_bytes(tensor.shape, tensor.stride(), tensor.dtype.itemsize)
    memory = torch.full((num_bytes + 128,), 0xAB, dtype=torch.uint8)
    pack(tensor, memory[64 : 64 + num_bytes])
    assert (memory[:64] == 0xAB).all()
    assert (memory[64 + num_bytes :] == 0xAB).all()
    return unpack(memory[64 : 64 + num_bytes], tensor.dtype, tensor.shape, tensor.stride())


def check(tensor: Tensor) -> None:
    for copy in (through_bytes(tensor), copy_exactly(tensor)):
        assert torch.equal(copy, tensor)
        assert copy.dtype == tensor.dtype
        assert copy.stride() == tensor.stride()


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Different values everywhere, as far as the dtype has them."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % (2 if dtype == torch.bool else 127)).to(dtype).reshape(shape)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Any chain of the views that models make."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    tensor = numbers(shape, draw(st.sampled_from(DTYPES)))
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["permute", "slice", "expand", "select", "unsqueeze", "unfold", "flip"]))
        if kind == "unsqueeze":
            tensor = tensor.unsqueeze(draw(st.integers(0, tensor.dim())))
        if tensor.dim() == 0 or tensor.dim() > 6:
            continue
        dim = draw(st.integers(0, tensor.dim() - 1))
        length = tensor.shape[dim]
        if kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif kind == "slice":
            start = draw(st.integers(0, length))
            tensor = tensor.narrow(dim, start, draw(st.integers(0, length - start)))
            tensor = tensor[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
        elif kind == "expand" and length == 1:
            tensor = tensor.expand(*(draw(st.integers(0, 4)) if d == dim else -1 for d in range(tensor.dim())))
        elif kind == "select" and length:
            tensor = tensor.select(dim, draw(st.integers(0, length - 1)))
        elif kind == "unfold" and length:
            tensor = tensor.unfold(dim, draw(st.integers(1, length)), draw(st.integers(1, 2)))
        elif kind == "flip":
            tensor = tensor.flip(dim)
    return tensor


@settings(max_examples=examples(250))
@given(views())
def test_values_and_strides_survive(tensor: Tensor) -> None:
    check(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.zeros(0),
        torch.zeros(1).expand(0),
        torch.zeros(3, 0, 2).transpose(0, 2),
        torch.arange(3.0).expand(4, 3),
        torch.arange(6).reshape(2, 3).t(),
        torch.arange(24.0).reshape(2, 3, 4)[:, 1:, ::2],
        torch.arange(10.0).unfold(0, 4, 1),
        torch.arange(20.0)[::2].unfold(0, 4, 1),
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(4.0).reshape(2, 2).to(torch.complex64).conj(),
        torch.tensor([1.5, float("nan")])[:1],
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} by {tensor.stride()}",
)
def test_layouts_by_name(tensor: Tensor) -> None:
    check(tensor)


def test_an_expanded_tensor_travels_once() -> None:
    assert num_payload_bytes((100, 8), (0, 1), 4) == 32


def test_a_dense_tensor_is_unpacked_as_a_view() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    memory = torch.zeros(24, dtype=torch.uint8)
    pack(tensor, memory)
    assert unpack(memory, tensor.dtype, tensor.shape, tensor.stride()).data_ptr() == memory.data_ptr()


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [((2, 3), (3, 1), True), ((2, 3), (1, 2), True), ((2, 3), (4, 1), False), ((2, 3), (1, 1), False), ((), (), True)],
)
def test_dense_layouts_are_recognized(shape: tuple[int, ...], strides: tuple[int, ...], dense: bool) -> None:
    assert is_dense(shape, strides) is dense
