"""Global settings of torch reach the processes of a stream, and must be alike in training."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ProgramError, RunError, UsageError
from penstock.pipeline import Pipeline
from penstock.runtime.torch_settings import applied, change_settings, check_settings, differences, read_settings
from penstock.transport.messages import DATA, Format, Message
from penstock.values import Value

CHANGES: dict[str, bool | str] = {
    "default_dtype": "float64", "deterministic_algorithms": True, "deterministic_algorithms_warn_only": True,
    "flush_denormal": True, "float32_matmul_precision": "high", "mkldnn.enabled": False, "mkldnn.deterministic": True,
    "cudnn.benchmark": True, "cudnn.deterministic": True, "flash_sdp": False, "math_sdp": False,
    "cuda.matmul.allow_bf16_reduced_precision_reduction": False, "nnpack.enabled": False,
    "fill_uninitialized_memory": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = read_settings()
    yield
    change_settings(before)


@pytest.mark.parametrize("name", CHANGES)
def test_each_setting_is_applied_and_restored(name: str) -> None:
    before = read_settings()
    assert before[name] != CHANGES[name]
    with applied({**before, name: CHANGES[name]}):
        assert read_settings()[name] == CHANGES[name]
    assert differences(before, read_settings()) == []


@pytest.mark.parametrize("settings", [{"other": True}, {"default_dtype": "int8"}, {"mkldnn.enabled": "yes"}])
def test_invalid_torch_settings_are_refused(settings: dict[str, bool | str]) -> None:
    with pytest.raises(ProgramError):
        check_settings(settings)


class Thirds(nn.Module):
    """Integers divided, whose dtype is torch's default; two possible stages."""

    def forward(self, t: Tensor) -> Tensor:
        thirds = t / 3
        return thirds.exp() + torch.arange(3) / 7


class Tiny(nn.Module):
    """Products too small for a normal number."""

    def forward(self, x: Tensor) -> Tensor:
        small = x * 1e-30
        return small * 1e-10 + x.sum() * 0


def small(count: int = 3) -> Tensor:
    return torch.arange(1, count + 1).repeat(2, 1)


@pytest.mark.parametrize(
    ("change", "model", "inputs"),
    [
        (lambda: torch.set_default_dtype(torch.float64), Thirds, small()),
        (lambda: torch.set_flush_denormal(True), Tiny, torch.ones(1, 5)),
    ],
)
def test_a_stream_computes_as_its_caller_is_set(
    change: Callable[[], object], model: Callable[[], nn.Module], inputs: Tensor
) -> None:
    change()
    module = model().eval()
    expected = module(inputs)
    with Pipeline(module, inputs, stages=3 if model is Thirds else 2) as pipe:
        (given,) = pipe.stream([inputs])
    assert given.dtype == expected.dtype
    assert torch.equal(given, expected)


def test_a_setting_that_changes_later_is_refused() -> None:
    with Pipeline(Thirds().eval(), small(), stages=1) as pipe:
        list(pipe.stream([small()]))
        torch.set_default_dtype(torch.float64)
        with pytest.raises(UsageError, match="default_dtype"):
            list(pipe.stream([small()]))


def test_autocast_around_a_call_is_refused() -> None:
    model = nn.Linear(3, 3).eval()
    with Pipeline(model, torch.ones(1, 3), stages=1) as pipe:
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(UsageError, match="autocast"):
            list(pipe.stream([torch.ones(1, 3)]))
        assert torch.equal(next(pipe.stream([torch.ones(1, 3)])), model(torch.ones(1, 3)))


def test_a_message_of_another_dtype_is_refused() -> None:
    layout = Format([Value("thirds", torch.float32, (2,))], (), {})
    buffer = torch.zeros(layout.largest({}), dtype=torch.uint8)
    layout.write(Message(DATA, 0, (), [torch.ones(2)]), buffer)
    with pytest.raises(RunError, match="thirds"):
        layout.write(Message(DATA, 1, (), [torch.ones(2, dtype=torch.float64)]), buffer)


def test_a_thread_sees_the_settings_of_its_own() -> None:
    found: list[object] = []
    with applied({"flush_denormal": True}):
        thread = threading.Thread(target=lambda: found.append(read_settings()["flush_denormal"]))
        thread.start()
        thread.join()
    assert found == [True]
