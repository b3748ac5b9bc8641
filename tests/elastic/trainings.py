"""Elastic trainings of small models in threads, with a profile by hand: measuring one takes seconds."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from penstock.elastic.elastic_training import ElasticTraining, PlanChange
from penstock.elastic.epochs import EpochRecord, FreezePolicy
from penstock.elastic.options import ElasticOptions
from penstock.graph.cuts import Cuts, graph_fingerprint
from penstock.group.world import World
from penstock.spec.cluster import Cluster, Device
from penstock.spec.profile import Boundary, Profile, Unit
from penstock.train.arrangement import common_cuts
from penstock.train.captured import Captured
from penstock.train.checkpoint import load_checkpoint
from penstock.train.loader import Loader
from penstock.train.trainer import Trainer
from tests.models import seeded
from tests.trainers import errors, gathered, in_threads, make_trainer

SAMPLES, BATCH = 44, 16  # so that the last batch is ragged
LAYERS = 6
NAMES = ["d0", "d1", "d2", "d3"]
Freeze = FreezePolicy | str | Sequence[int]


@cache
def vit(dtype: torch.dtype = torch.float64, seed: int = 0) -> Captured:
    """A ViT of six blocks with every kind of dropout."""
    made = seeded(
        VisionTransformer, img_size=16, patch_size=8, embed_dim=16, depth=LAYERS, num_heads=2, num_classes=4,
        proj_drop_rate=0.2, attn_drop_rate=0.1, drop_path_rate=0.1,
    )  # fmt: skip
    with torch.no_grad():
        made.get_parameter("cls_token").add_(seed)
    return Captured(made.to(dtype).train(), (torch.zeros(2, 3, 16, 16, dtype=dtype),))


def images(dtype: torch.dtype = torch.float64, *, count: int = SAMPLES, seed: int = 3) -> TensorDataset:
    """Images to learn from."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(count, 3, 16, 16, generator=generator, dtype=torch.float64)
    return TensorDataset(made.to(dtype), torch.randint(0, 4, (count,), generator=generator))


class Seen(Dataset[Any]):
    """Another data set that also gives the number of each sample, so that a loop sees which ones it gets."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return (*self.data[index], index)


def profile_of(captured: Captured, *, row_s: float = 1e-3) -> Profile:
    """A profile in which all between two cuts takes as long, and messages take nearly nothing."""
    known = common_cuts(captured)
    names = [cut.name for cut in Cuts(captured.graph) if cut.name in known]
    units = tuple(
        Unit(forward_s=(row_s,), backward_s=(2 * row_s,), parameters=((f"weight{index}", 1000),))
        for index in range(len(names) + 1)
    )
    return Profile(
        model=captured.graph.model, graph=graph_fingerprint(captured.graph), device="core", threads=1, rows=(1,),
        boundaries=tuple(Boundary(name=name, bytes_per_row=1e3) for name in ("input", *names, "output")), units=units,
    )  # fmt: skip


def cluster_of(size: int, hosts: Sequence[str] = ()) -> Cluster:
    """A cluster with a device for each rank, all alike, named as plans name the processes of these hosts."""
    names = [f"{host}:{n}" if (n := hosts[:rank].count(host)) else host for rank, host in enumerate(hosts)]
    return Cluster(devices=tuple(Device(name=name, speed=1.0, memory_bytes=2**40) for name in names or NAMES[:size]))


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass
class Step:
    """What one process's loop has at hand in a step."""

    trainer: Trainer
    elastic: ElasticTraining
    epoch: int
    number: int  # of the batch in its epoch
    inputs: Tensor
    labels: Tensor

    def train(self, inputs: Tensor | None = None) -> Tensor:
        given = self.inputs if inputs is None else inputs
        return self.trainer.train_step(given, self.labels, F.cross_entropy)


@dataclass
class Outcome:
    """What an elastic training came to; `samples` are by epoch."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    samples: list[list[int]] = field(default_factory=list)
    changes: list[PlanChange] = field(default_factory=list)
    history: list[EpochRecord] = field(default_factory=list)


def train_elastically(
    captured: Captured, size: int, data: Dataset[Any], freeze: Freeze, *, epochs: int, folder: Path | None = None,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw, loop: Callable[[Step], Tensor] = Step.train,
    between: Callable[[Trainer, ElasticTraining, int], None] = lambda *_: None, hosts: Sequence[str] = (),
    arranged: dict[str, Any] | None = None, resume: Path | None = None, **options: Any,
) -> Outcome:  # fmt: skip
    """Train in threads; `loop` takes a step, `between` is called after each epoch, `arranged` is how it begins.

    With `resume` it goes on from that checkpoint.
    """
    given: dict[str, Any] = {"profile": profile_of(captured), "cluster": cluster_of(size, hosts)} | options
    asked = ElasticOptions(freeze=freeze, epochs=epochs, cache_dir=folder, **given)

    def script(world: World) -> Any:
        world = dataclasses.replace(world, hosts=list(hosts))
        trainer = make_trainer(captured, world, **({"microbatches": 4, "seed": 3} | (arranged or {})))
        try:
            return train(trainer)
        except BaseException as error:
            world.health.report(error)  # as a pipeline does: the others wait for this process
            trainer.close(wait=False)
            raise

    def train(trainer: Trainer) -> Any:
        optimizer, world = trainer.optimizer(make), trainer.world
        loader = Loader(trainer, Seen(data), batch_size=BATCH, shuffle=True)
        elastic = ElasticTraining(trainer, loader, asked)
        if resume is not None:
            load_checkpoint(trainer, resume, optimizer, None, loader)
        losses: list[float] = []
        samples: list[list[int]] = [[] for _ in range(epochs)]
        while loader.epoch < epochs:
            epoch = loader.epoch
            for number, (inputs, labels, rows) in enumerate(loader, loader.position):
                if world.rank in trainer.now.placed.grid.holders(trainer.now.placed.num_stages - 1):
                    samples[epoch] += rows.tolist()
                losses.append(float(loop(Step(trainer, elastic, epoch, number, inputs, labels))))
                optimizer.step()
                optimizer.zero_grad()
            between(trainer, elastic, epoch)
        weights = gathered(trainer, lambda p: p) | trainer.now.tensors.others
        trainer.close()
        return losses, weights, samples, elastic.changes, elastic.history

    results = in_threads(size, script)
    outcome = Outcome(losses=results[0][0], changes=results[0][3], history=results[0][4])
    outcome.samples = [sorted(n for result in results for n in result[2][epoch]) for epoch in range(epochs)]
    for losses, weights, _, _, history in results:
        assert losses == outcome.losses, "the loss is not the same everywhere"
        assert history == outcome.history, "the history is not the same everywhere"
        for name, tensor in weights.items():
            assert torch.equal(outcome.weights.setdefault(name, tensor), tensor), f"{name} differs between its copies"
    return outcome


def alone(captured: Captured, data: Dataset[Any], freeze: Freeze, *, epochs: int, **more: Any) -> Outcome:
    """Train in one process that freezes alike, but computes all and moves nothing."""
    return train_elastically(captured, 1, data, freeze, epochs=epochs, cache=False, pack=False, replicate=False, **more)


def assert_same(expected: Outcome, found: Outcome, tolerance: float = 1e-5) -> None:
    """Check that two trainings have learned the same, each from every sample once an epoch."""
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    names = [name for name in expected.weights if not name.startswith("frozen_")]
    assert set(names) <= set(found.weights)
    differing = errors({name: expected.weights[name] for name in names}, found.weights)
    assert max(differing.values()) < tolerance, max(differing, key=differing.__getitem__)
    assert found.samples == expected.samples
    assert_same_history(expected, found, tolerance)


def assert_same_history(expected: Outcome, found: Outcome, tolerance: float = 1e-5) -> None:
    """Check that policies have been told the same."""
    assert [(r.epoch, r.frozen_layers) for r in found.history] == [(r.epoch, r.frozen_layers) for r in expected.history]
    for mine, theirs in zip(found.history, expected.history, strict=True):
        assert mine.gradient_norms == pytest.approx(theirs.gradient_norms, rel=10 * tolerance)


def files_in(folder: Path | None) -> list[Path]:
    """All files in a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder is not None else []
