"""Layers whose outputs are given, not computed: the same losses and weights; and which batches they are given for."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.data import Dataset

from penstock.deploy.state import load_state
from penstock.engine.placement import Grid, Replica
from penstock.errors import UsageError
from penstock.graph.cuts import Cuts
from penstock.group.world import World
from penstock.runtime.registry import EAGER
from penstock.tensors import HOST
from penstock.train.captured import Captured
from penstock.train.loaded_batch import LoadedBatch, tensors_of
from penstock.train.loader import Loader
from penstock.train.migration import fix_microbatches, migrate
from penstock.train.trainer import Trainer
from tests.fewer import long
from tests.learners import captured
from tests.trainers import Still, errors, gathered, in_threads, make_trainer

DOUBLE, ROWS, BATCH = torch.float64, 10, 4
BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
ONE = (Replica((0,), (0, 0, 0), 4),)
# the frozen stage and the first that trains are on one rank, which is not the first; the others are idle, or replicas
PLACES = [
    (1, ONE),
    (3, (Replica((0, 1, 2), (1, 1, 2), 4),)),
    (3, (Replica((1, 0), (1, 1, 0), 3), Replica((2,), (2, 2, 2), 1))),
]
Change = Callable[[Tensor], Tensor]


def loaded_batch(loaded: Any) -> LoadedBatch:
    """A batch of which only the tensors count."""
    unused: Any = None
    return LoadedBatch(
        loaded=tensors_of(loaded), loader=unused, iteration=None, samples=[0, 1], following=None, placed=None,
        place=(0, 0), short=False,
    )  # fmt: skip


def test_a_loaded_batch_is_known_again() -> None:
    x, y = torch.ones(2, 3), torch.zeros(2)
    batch = loaded_batch((x, y))
    assert batch.places(x) is not None
    assert batch.places((x,)) is not None
    assert batch.places({"inputs": x, "labels": y}) is not None
    assert batch.places(()) is None  # nothing that could be known again
    assert batch.places((x, torch.zeros(2))) is None
    assert batch.places(x.clone()) is None
    assert batch.places(x[:]) is None
    y.add_(1)
    assert batch.places(x) is not None
    assert batch.places((x, y)) is None
    x[0, 0] = 5.0
    assert batch.places(x) is None


def test_a_loaded_dict_is_known_in_another_order() -> None:
    loaded = {"ids": torch.ones(2, 3), "mask": torch.ones(2, 3), "rate": 0.5, "labels": torch.zeros(2)}
    batch = loaded_batch(loaded)
    assert batch.places({name: loaded[name] for name in ("mask", "ids")}) is not None
    assert batch.places({"ids": loaded["ids"], "mask": torch.ones(2, 3)}) is None
    meta = torch.empty(2, 3, device="meta")
    assert loaded_batch([meta]).places(meta) is not None


def test_inference_mode_batches_are_not_cached() -> None:
    """Such tensors have no count of how often they were written to; to load them for evaluation is no error."""
    with torch.inference_mode():
        x = torch.ones(2, 3)
        batch = loaded_batch((x, torch.zeros(2)))
        assert batch.places(x) is None
    assert batch.places(x) is None
    y = torch.ones(2)
    assert loaded_batch((x, y)).places((x, y)) is None


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Some images with labels; counts what is read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.images = torch.randn(ROWS, 3, 32, 32, generator=generator, dtype=DOUBLE)
        self.labels = torch.randint(0, 10, (ROWS,), generator=generator)
        self.read = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        return self.images[index], self.labels[index]


class Computed:
    """Outputs of the frozen layers, computed here when they are asked for."""

    def __init__(self, model: Captured, data: Images, rank: int, grid: Grid) -> None:
        self.asked: list[tuple[list[int], list[int] | None]] = []
        self.closed = 0
        self._data, self._grid, self._replica = data, grid, grid.replica_of(rank)
        part = model.parts([Cuts(model.graph).at(model.frozen_end)], None)[0]
        tensors = {s.value.name: load_state(model.graph, s, model.weights) for s in part.program.states}
        self._runtime = EAGER.load(part.program, tensors, HOST)

    def outputs(self, batch: Sequence[int], following: Sequence[int] | None) -> list[Tensor]:
        self.asked.append((list(batch), None if following is None else list(following)))
        rows = self._grid.rows(len(batch))[self._replica]
        chosen = self._data.images[list(batch)[rows.start : rows.stop]]
        return [tensor.clone() for tensor in self._runtime({"batch": len(chosen)}, [chosen])] if len(rows) else []

    def close(self) -> None:
        self.closed += 1


def learn(
    size: int, replicas: tuple[Replica, ...], *, skipped: int, caches: bool = True, change: Change | None = None,
    own_rows: bool = False, epochs: int = 2,
) -> tuple[list[float], dict[str, Tensor], list[Any]]:  # fmt: skip
    """Train the layers after the first in some arrangement; gives losses, what was learned, and each rank's cache."""
    whole = captured("deit", DOUBLE)
    model = whole.frozen(1)
    cuts = Cuts(model.graph)
    frozen, after = cuts.at(model.frozen_end), cuts[-2]

    def script(world: World) -> Any:
        trainer = make_trainer(whole, world, replicas=1, stages=size, microbatches=4, seed=5)
        fix_microbatches(trainer)
        optimizer = trainer.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        data, grid = Images(), Grid(replicas)
        features = Computed(model, data, world.rank, grid) if skipped and caches else None
        migrate(trainer, trainer.now.placed.moved(grid, [frozen, after], skipped=skipped), model, features)
        loader, losses = Loader(trainer, data, batch_size=BATCH), []
        loader.follower = Still()

        def step(x: Any, y: Any) -> None:
            try:
                losses.append(float(trainer.train_step(x if change is None else change(x), y, F.cross_entropy)))
            except UsageError as error:
                world.health.report(error)  # as a pipeline does whose block ends
                raise
            optimizer.step()
            optimizer.zero_grad()

        read = []
        for _ in range(epochs):
            if own_rows:
                for batch in BATCHES:
                    rows = grid.rows(len(batch))[trainer.now.placed.replica_index]
                    mine = batch[rows.start : rows.stop]
                    trainer.data.short = len(mine)
                    step(data.images[mine], data.labels[mine])
                continue
            for x, y in loader:
                step(x, y)
            read.append(data.read)
        trainer.close()
        return losses, gathered(trainer, lambda p: p), (features, read)

    results = in_threads(size, script)
    assert all(result[0] == results[0][0] for result in results)
    learned = {name: tensor for result in results for name, tensor in result[1].items()}
    return results[0][0], learned, [result[2] for result in results]


@pytest.fixture(scope="module")
def computed() -> tuple[list[float], dict[str, Tensor]]:
    losses, learned, _ = learn(1, ONE, skipped=0)
    return losses, learned


@pytest.mark.parametrize(("size", "replicas"), PLACES)
def test_a_stage_that_is_skipped_changes_nothing_that_is_learned(
    computed: tuple[list[float], dict[str, Tensor]], size: int, replicas: tuple[Replica, ...]
) -> None:
    losses, learned, ranks = learn(size, replicas, skipped=1)
    assert losses == pytest.approx(computed[0], rel=1e-9)
    assert max(errors(computed[1], learned).values()) < 1e-9
    for features, _ in ranks:
        assert features.asked == [*zip(BATCHES, [*BATCHES[1:], None], strict=True)] * 2
        assert features.closed == 1


def test_inputs_are_loaded_where_a_changed_batch_would_need_them() -> None:
    _, _, ranks = learn(3, (Replica((0, 1, 2), (1, 1, 2), 4),), skipped=1)
    assert [read for _, read in ranks] == [[0, 0], [10, 20], [0, 0]]


@pytest.mark.parametrize(("size", "replicas"), [long(*PLACES[0]), long(*PLACES[1]), PLACES[2]])
@pytest.mark.parametrize("how", [{"own_rows": True}, {"caches": False}, {"change": lambda x: x * 1.0, "epochs": 1}])
def test_rows_that_are_in_no_cache_are_computed(
    computed: tuple[list[float], dict[str, Tensor]], size: int, replicas: tuple[Replica, ...], how: dict[str, Any]
) -> None:
    losses, learned, ranks = learn(size, replicas, skipped=1, **how)
    assert losses == pytest.approx(computed[0][: len(losses)], rel=1e-9)
    if len(losses) == len(computed[0]):
        assert max(errors(computed[1], learned).values()) < 1e-9
    assert all(features is None or not features.asked for features, _ in ranks)


def test_rows_are_computed_once_a_loop_changes_its_batches(computed: tuple[list[float], dict[str, Tensor]]) -> None:
    losses, learned, ranks = learn(
        3, (Replica((0, 1, 2), (1, 1, 2), 4),), skipped=1, change=_changed_from_the_fourth_on()
    )
    assert losses == pytest.approx(computed[0], rel=1e-9)
    assert max(errors(computed[1], learned).values()) < 1e-9
    assert all(len(features.asked) == 3 for features, _ in ranks)


def _changed_from_the_fourth_on() -> Change:
    seen: dict[int, int] = {}

    def change(x: Tensor) -> Tensor:
        number = seen[threading.get_ident()] = seen.get(threading.get_ident(), 0) + 1
        return x if number < 4 else x * 1.0

    return change


def test_the_schedule_leaves_out_what_is_skipped() -> None:
    whole = captured("deit", DOUBLE)
    cuts = Cuts(whole.graph)

    def script(world: World) -> None:
        trainer: Trainer = make_trainer(whole, world, stages=2, microbatches=3)
        trainer.close()
        placed = trainer.now.placed.moved(Grid((Replica((0, 1), (0, 0, 1), 3),)), [cuts[4], cuts[9]], skipped=1)
        plain = placed.moved(Grid((Replica((0, 1), (0, 1), 3),)), [cuts[9]])
        for count in (1, 3):
            found = placed.schedule(count)
            assert {action.stage for actions in found for action in actions} == {1, 2}
            assert found == tuple(
                tuple(replace(action, stage=action.stage + 1) for action in actions)
                for actions in plain.schedule(count)
            )

    in_threads(2, script)
