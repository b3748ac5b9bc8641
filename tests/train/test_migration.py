"""A training changes its arrangement while it runs: time changes, numbers do not."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from penstock.engine.placement import Grid, Replica
from penstock.graph.cuts import Cuts
from penstock.group.world import World
from penstock.train.captured import Captured
from penstock.train.migration import fix_microbatches, migrate
from penstock.train.trainer import Trainer
from tests.fewer import examples
from tests.learners import batches, cast
from tests.models import seeded
from tests.trainers import Batch, errors, gathered, in_threads, make_trainer, take_rows

SIZE, MICROBATCHES = 4, 4


@dataclass(frozen=True)
class Way:
    """How the training goes on: frozen layers, and for each replica its devices' numbers of stages and microbatches."""

    frozen: int
    replicas: tuple[tuple[tuple[int, ...], int], ...]


ALONE = (((1,), MICROBATCHES),)


def rearrange(trainer: Trainer, whole: Captured, way: Way, order: Sequence[int] = range(SIZE)) -> None:
    """Go on in this way; cuts lie evenly over the model."""
    model = whole.frozen(way.frozen)
    stages = max(sum(counts) for counts, _ in way.replicas)
    cuts = Cuts(model.graph)
    places = [cuts[len(cuts) * stage // stages] for stage in range(1, stages)]
    free = list(order)
    replicas = []
    for counts, microbatches in way.replicas:
        devices = [free.pop(0) for _ in counts]
        spare = stages - sum(counts)
        held = [rank for rank, count in zip(devices, counts, strict=True) for _ in range(count)]
        replicas.append(Replica(tuple(devices), tuple(held + [devices[-1]] * spare), microbatches))
    first = replicas[0]
    replicas[0] = Replica((*first.devices, *free), first.stages, first.num_microbatches)
    migrate(trainer, trainer.now.placed.moved(Grid(tuple(replicas)), places), model)


def train_so(
    whole: Captured, size: int, given: Sequence[Batch], ways: Sequence[Way | None], make: Any, loss_fn: Any,
    orders: Sequence[Sequence[int]] = (),
) -> tuple[list[float], dict[str, Tensor]]:  # fmt: skip
    """Train in threads, before each batch changing the arrangement or not; returns losses and what was learned."""

    def script(world: World) -> Any:
        trainer = make_trainer(whole, world, replicas=1, stages=size, microbatches=MICROBATCHES, seed=3)
        fix_microbatches(trainer)
        optimizer = trainer.optimizer(make)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        losses = []
        for step, ((inputs, labels), way) in enumerate(zip(given, ways, strict=True)):
            if way is not None:
                alone = Way(way.frozen, ALONE) if size == 1 else way
                rearrange(trainer, whole, alone, orders[step] if orders and size > 1 else range(size))
            rows = trainer.now.placed.grid.rows(len(labels))[trainer.now.placed.replica_index]
            trainer.data.short = len(rows)
            losses.append(float(trainer.train_step(take_rows(inputs, rows), take_rows(labels, rows), loss_fn)))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        trainer.close()
        return losses, gathered(trainer, lambda p: p) | trainer.now.tensors.others

    results = in_threads(size, script)
    last: dict[str, Tensor] = {}
    for losses, tensors in results:
        assert losses == results[0][0], "the loss is not the same everywhere"
        for name, tensor in tensors.items():
            assert name not in last or torch.equal(last[name], tensor), f"{name} differs between its copies"
            last[name] = tensor
    return results[0][0], last


@cache
def with_dropout(dtype: torch.dtype) -> Captured:
    made = seeded(
        VisionTransformer, img_size=32, patch_size=16, embed_dim=32, depth=4, num_heads=2, num_classes=10,
        proj_drop_rate=0.2, attn_drop_rate=0.1, drop_path_rate=0.2,
    )  # fmt: skip
    return Captured(made.to(dtype).train(), (torch.zeros(2, 3, 32, 32, dtype=dtype),))


@st.composite
def ways(draw: st.DrawFn) -> list[Way | None]:
    """Draw a sequence of arrangements, in which never fewer layers are frozen than before."""
    frozen = 0
    found: list[Way | None] = []
    for _ in range(4):
        if draw(st.booleans()):
            found.append(None)
            continue
        frozen = draw(st.integers(frozen, 4))
        count = draw(st.integers(1, SIZE))
        devices = draw(st.lists(st.integers(1, SIZE), min_size=count, max_size=count).filter(lambda n: sum(n) <= SIZE))
        numbers = draw(
            st.lists(st.integers(1, MICROBATCHES), min_size=count, max_size=count).filter(
                lambda n: sum(n) == MICROBATCHES
            )
        )
        replicas = tuple(
            (tuple(draw(st.integers(1, 2)) for _ in range(number)), microbatches)
            for number, microbatches in zip(devices, numbers, strict=True)
        )
        found.append(Way(frozen, replicas))
    return found


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(sequence=ways(), order=st.permutations(range(SIZE)), exact=st.booleans())
def test_no_sequence_of_arrangements_changes_what_is_learned(
    sequence: list[Way | None], order: list[int], exact: bool
) -> None:
    dtype, make = (torch.float64, adamw) if exact else (torch.float32, sgd)
    whole = with_dropout(dtype)
    data = cast(batches("deit", len(sequence), rows=10), dtype)
    losses, expected = train_so(whole, 1, data, sequence, make, F.cross_entropy)
    found, learned = train_so(whole, SIZE, data, sequence, make, F.cross_entropy, [order] * len(sequence))
    assert losses == pytest.approx(found, rel=1e-5)
    assert max(errors(expected, learned).values()) < 1e-5
