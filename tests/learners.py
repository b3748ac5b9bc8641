"""Small models with data to learn from, and the ways of working together in which each is compared with one process."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import Dataset

from penstock.train.captured import Captured
from tests.models import UNet, bert, deit, gpt2, seeded, t5
from tests.trainers import Batch

MODELS = ("unet", "gpt2", "bert", "deit", "t5")
ROWS = 7
# processes, and how they work together
SCHEDULES: list[tuple[int, dict[str, Any]]] = [
    (1, {"stages": 1}), (2, {"stages": 2, "schedule": "gpipe"}), (3, {"stages": 3, "schedule": "1f1b"}),
    (4, {"stages": 4, "schedule": "zero-bubble"}), (2, {"stages": 4, "schedule": "interleaved"}),
]  # fmt: skip
REPLICAS: list[tuple[int, dict[str, Any]]] = [
    (2, {"stages": 1, "replicas": 2}),
    (4, {"stages": 2, "replicas": 2, "schedule": "zero-bubble"}),
    (3, {"stages": 2, "replicas": 2}),
]


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


class Numbers(Dataset[tuple[Tensor, int]]):
    """Rows that say their number, and count how often they are read."""

    def __init__(self, num: int = 11) -> None:
        self.num = num
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        return torch.full((4,), float(index)), index


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
