"""The same gradients, weights and losses as one process that accumulates the same microbatches."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.train.captured import Captured
from tests.models import UNet, bert, deit, gpt2, seeded, t5
from tests.trainers import Batch, by_hand, error, train

ROWS = 7
CLOSE = 1e-5
# processes, and how they work together
SCHEDULES: list[tuple[int, dict[str, Any]]] = [
    (1, {"stages": 1}),
    (2, {"stages": 2, "schedule": "gpipe"}),
    (3, {"stages": 3, "schedule": "1f1b"}),
    (4, {"stages": 4, "schedule": "zero-bubble"}),
    (2, {"stages": 4, "schedule": "interleaved"}),
]
REPLICAS: list[tuple[int, dict[str, Any]]] = [
    (2, {"stages": 1, "replicas": 2}),
    (4, {"stages": 2, "replicas": 2, "schedule": "zero-bubble"}),
    (3, {"stages": 2, "replicas": 2}),
]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batches(name: str, num: int, rows: int = ROWS) -> list[Batch]:
    """So many different batches for a model."""
    generator = torch.Generator().manual_seed(5)

    def ids(length: int, vocabulary: int = 80) -> Tensor:
        return torch.randint(3, vocabulary, (rows, length), generator=generator)

    def one() -> Batch:
        if name == "deit":
            return torch.randn(rows, 3, 32, 32, generator=generator), torch.randint(0, 10, (rows,), generator=generator)
        if name == "unet":
            return torch.randn(rows, 3, 8, 8, generator=generator), torch.randn(rows, 2, 8, 8, generator=generator)
        if name == "gpt2":
            tokens = ids(9)
            return {"input_ids": tokens, "labels": tokens}, None
        if name == "bert":
            mask = (torch.arange(9)[None] < torch.randint(3, 10, (rows, 1), generator=generator)).long()
            return {"input_ids": ids(9), "attention_mask": mask}, torch.randint(0, 3, (rows,), generator=generator)
        labels = ids(5)
        labels[:, 3:] = torch.where(ids(2) > 30, labels[:, 3:], -100)  # rows of different lengths
        return {"input_ids": ids(9), "decoder_input_ids": ids(5)}, labels

    return [one() for _ in range(num)]


def sum_and_count(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output.logits.transpose(1, 2), labels, reduction="sum"), (labels != -100).sum()


LOSSES: dict[str, Any] = {
    "deit": F.cross_entropy,
    "unet": F.mse_loss,
    "gpt2": None,  # its own
    "bert": lambda output, labels: F.cross_entropy(output.logits, labels),
    "t5": sum_and_count,
}


@cache
def model(name: str, dtype: torch.dtype) -> nn.Module:
    made: dict[str, Any] = {
        "deit": lambda: deit(depth=2),
        "unet": lambda: seeded(UNet, 4, False),
        "gpt2": lambda: gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        "bert": lambda: bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        "t5": lambda: t5(dropout_rate=0.0),
    }
    return made[name]().to(dtype).train()  # type: ignore[no-any-return]


@cache
def captured(name: str, dtype: torch.dtype) -> Captured:
    inputs = cast(batches(name, 1, rows=2), dtype)[0][0]
    call = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    return Captured(model(name, dtype), *call)


def cast(given: list[Batch], dtype: torch.dtype) -> list[Batch]:
    def to(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return [(to(inputs), to(labels)) for inputs, labels in given]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def compare(name: str, cases: Any, num_steps: int, dtype: torch.dtype, make: Any) -> list[list[float]]:
    """Train in every way and by hand; gives the losses."""
    given = cast(batches(name, num_steps), dtype)
    losses = []
    for size, settings in cases:
        replicas = settings.get("replicas", 1)
        wanted = {1: 3, 2: 2}[replicas]
        got = train(captured(name, dtype), size, given, make, LOSSES[name], microbatches=wanted, **settings)
        expected = by_hand(model(name, dtype), given, make, LOSSES[name], [wanted] * replicas)
        assert got[0] == pytest.approx(expected[0], rel=1e-6)
        assert set(expected[1]) == set(got[1])
        for wants, gives in ((expected[1], got[1]), (expected[2], got[2])):
            whole = max(float(tensor.double().norm()) for tensor in wants.values())
            for key, tensor in wants.items():
                statistics = replicas > 1 and ("running" in key or "tracked" in key)  # the first replica's
                if key in gives and not statistics:
                    assert error(tensor, gives[key], 1e-3 * whole) < CLOSE, (settings, key)
        losses.append(got[0])
    return losses


@pytest.mark.parametrize("name", ["deit", "gpt2", "bert", "unet", "t5"])
def test_sgd_in_float32_with_every_schedule(name: str) -> None:
    losses = compare(name, SCHEDULES, 10, torch.float32, sgd)
    four = losses[3:]
    assert four[0] == four[1], "the same cuts, another schedule: another loss"
    assert losses[0][0] == losses[1][0] == losses[2][0] == losses[3][0]


@pytest.mark.parametrize("name", ["deit", "gpt2", "bert", "unet", "t5"])
def test_replicas(name: str) -> None:
    compare(name, REPLICAS, 3, torch.float32, sgd)


@pytest.mark.parametrize("name", ["deit", "gpt2", "bert", "unet", "t5"])
def test_adamw_in_float64(name: str) -> None:
    cases: list[tuple[int, dict[str, Any]]] = [
        (3, {"stages": 3}),
        (2, {"stages": 2, "schedule": "gpipe"}),
        (4, {"stages": 4, "schedule": "zero-bubble"}),
        (2, {"stages": 4, "schedule": "interleaved"}),
        (4, {"stages": 2, "replicas": 2}),
    ]
    compare(name, cases, 10, torch.float64, adamw)


@pytest.mark.parametrize("name", ["deit", "gpt2", "bert", "unet", "t5"])
def test_losses_are_bit_equal_between_schedules(name: str) -> None:
    given = batches(name, 2)
    losses = [
        train(captured(name, torch.float32), size, given, sgd, LOSSES[name], microbatches=4, stages=4, schedule=way)[0]
        for size, way in ((4, "gpipe"), (4, "1f1b"), (4, "zero-bubble"), (2, "interleaved"), (2, "1f1b"))
    ]
    assert all(loss == losses[0] for loss in losses)


@pytest.mark.parametrize("rows", [12, 7], ids=["even", "ragged"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_every_schedule_with_every_number_of_stages(schedule: str, replicas: int, rows: int) -> None:
    given = batches("gpt2", 2, rows)
    wanted = {1: 3, 2: 2}[replicas]
    expected = by_hand(model("gpt2", torch.float32), given, sgd, None, [wanted] * replicas)
    for stages in range(1, 5):
        devices = -(-stages // 2) if schedule == "interleaved" else stages
        settings: dict[str, Any] = {"stages": stages, "replicas": replicas, "schedule": schedule}
        got = train(
            captured("gpt2", torch.float32), devices * replicas, given, sgd, None, microbatches=wanted, **settings
        )
        assert got[0] == pytest.approx(expected[0], rel=1e-6)
        for wants, gives in ((expected[1], got[1]), (expected[2], got[2])):
            whole = max(float(tensor.double().norm()) for tensor in wants.values())
            assert all(error(tensor, gives[key], 1e-3 * whole) < CLOSE for key, tensor in wants.items() if key in gives)


def test_a_schedule_of_ones_own() -> None:
    own = "F0 F1 B1 B0 \n F0 F1 B1 B0"
    given = batches("deit", 2)
    got = train(captured("deit", torch.float32), 2, given, sgd, LOSSES["deit"], microbatches=2, schedule=own)
    expected = by_hand(model("deit", torch.float32), given, sgd, LOSSES["deit"], [2])
    assert all(error(tensor, got[2][key]) < CLOSE for key, tensor in expected[2].items())
