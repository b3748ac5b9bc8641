"""Ranks whose random states, files and data sets differ train an identity: the loss is 0 if inputs fit their labels."""

import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, random_split

import penstock

RANK = int(os.environ.get("RANK", "0"))
WIDE = 1200  # floats of a row: too many to be sent to every rank
ROWS = 24

Step = Iterator[tuple[Any, Any, Any]]


def identity() -> nn.Module:
    layers = [nn.Linear(WIDE, WIDE, bias=False) for _ in range(3)]
    for layer in layers:
        nn.init.eye_(layer.weight)
    return nn.Sequential(*layers).train()


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Row `number` is full of its number, and so is its label."""

    def __init__(self, numbers: list[int], change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.numbers, self.change, self.read = numbers, change, 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        row = self.change(torch.full((WIDE,), float(self.numbers[index])))
        return row, row[:1].clone()


def numbers() -> list[int]:
    return list(range(ROWS))


def first(output: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(output[:, :1], labels)


def split(pipe: Any) -> Step:
    part, _ = random_split(Rows(numbers()), [16, 8])
    return ((x, y, first) for x, y in pipe.loader(part, batch_size=8, shuffle=True))


def shuffled(pipe: Any) -> Step:
    files = numbers()
    random.shuffle(files)
    return ((x, y, first) for x, y in pipe.loader(Rows(files), batch_size=8))


def listed_otherwise(pipe: Any) -> Step:
    files = numbers()
    return ((x, y, first) for x, y in pipe.loader(Rows(files[::-1] if RANK else files), batch_size=8))


def augmented(pipe: Any) -> Step:
    def change(row: Tensor) -> Tensor:
        return row + random.random() + float(np.random.rand()) + torch.rand(1)

    for workers in (0, 2):
        loader = DataLoader(Rows(numbers(), change), batch_size=8, num_workers=workers)
        yield from ((x, y, first) for x, y in pipe.loader(loader))


def mixed_when_collated(pipe: Any) -> Step:
    def collate(rows: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(rows)
        share, order = random.random(), torch.randperm(len(x))
        return share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]

    return ((x, y, first) for x, y in pipe.loader(Rows(numbers()), batch_size=8, collate_fn=collate))


def mixed_in_the_loop(pipe: Any) -> Step:
    for x, y in pipe.loader(Rows(numbers()), batch_size=8):
        share, order = float(np.random.beta(1.0, 1.0)), torch.randperm(len(x))

        def loss(output: Tensor, labels: tuple[Tensor, Tensor], share: float = share) -> Tensor:
            return first(output, share * labels[0] + (1 - share) * labels[1])

        yield share * x + (1 - share) * x[order], (y, y[order]), loss


def large_labels(pipe: Any) -> Step:
    return ((x + 1, x + 1, F.mse_loss) for x, _ in pipe.loader(Rows(numbers()), batch_size=8))


def noisy(pipe: Any) -> Step:
    for x, _ in pipe.loader(Rows(numbers()), batch_size=8):
        noise = torch.randn_like(x)
        yield 0 * x + noise, noise, F.mse_loss


def own_loader(_pipe: Any) -> Step:
    files = numbers()
    torch.manual_seed(0)  # the same on every rank
    loader = DataLoader(Rows(files[::-1] if RANK else files), batch_size=8, shuffle=True)
    return ((x, y, first) for x, y in loader)


def dictionaries(pipe: Any) -> Step:
    def collate(rows: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(rows)
        return {"x": x, "y": {"label": y, "names": [f"row {number}" for number in y[:, 0].int().tolist()]}}

    def loss(output: Tensor, labels: dict[str, Any]) -> Tensor:
        wanted = torch.tensor([[float(name.split()[1])] for name in labels["names"]])
        return first(output, labels["label"]) + first(output, wanted)

    return ((batch["x"], batch["y"], loss) for batch in pipe.loader(Rows(numbers()), batch_size=8, collate_fn=collate))


# refused


def drawn_elsewhere(pipe: Any) -> Step:
    generator = np.random.default_rng()
    for x, y in pipe.loader(Rows(numbers()), batch_size=8):
        share = float(generator.uniform())
        yield share * x, y, lambda output, labels, share=share: first(output, share * labels)


def drawn_in_an_own_loop(_pipe: Any) -> Step:
    for x, y in DataLoader(Rows(numbers()), batch_size=8):
        share = random.random()
        factor = torch.tensor(share, dtype=torch.float64).mul(1000).to(torch.int64)
        yield x * factor, y, lambda output, labels, factor=int(factor): first(output, factor * labels)


def one_row_more(pipe: Any) -> Step:
    return ((x, y, first) for x, y in pipe.loader(Subset(Rows(numbers()), range(16 + RANK)), batch_size=8))


def values_used(pipe: Any) -> Step:
    for x, y in pipe.loader(Rows(numbers()), batch_size=8):
        if float(x.mean()) >= 0:
            yield x, y, first


CASES = [
    split, shuffled, listed_otherwise, augmented, mixed_when_collated, mixed_in_the_loop, large_labels, noisy,
    own_loader, dictionaries,
]  # fmt: skip
REFUSED = {each.__name__: each for each in (drawn_elsewhere, drawn_in_an_own_loop, one_row_more, values_used)}


def train(case: Callable[[Any], Step]) -> list[float]:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + RANK)
    with penstock.Pipeline(identity(), torch.zeros(2, WIDE), microbatches=2) as pipe:
        optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        losses = []
        for x, y, loss_fn in case(pipe):
            losses.append(float(pipe.train_step(x, y, loss_fn)))
            optimizer.step()
            optimizer.zero_grad()
        return losses


def refuse(case: str, named: str) -> None:
    try:
        train(REFUSED[case])
    except penstock.PenstockError as error:
        message = str(error)
        if not re.search(named, message) or "\n" in message:
            raise
    else:
        raise SystemExit(f"{case} was not refused")


if __name__ == "__main__":
    if sys.argv[1] in REFUSED:
        refuse(*sys.argv[1:])
    else:
        Path(sys.argv[1], f"rank{RANK}.json").write_text(json.dumps({case.__name__: train(case) for case in CASES}))
