"""Samplers and settings of a DataLoader, and iterations that are left early: as PyTorch has them, on every process."""

import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import penstock
from penstock.errors import UsageError
from penstock.group.world import World
from penstock.train.captured import Captured
from penstock.train.data_order import SampledOrder
from penstock.train.loader import Loader, WorkerStart
from tests.learners import Numbers
from tests.models import seeded
from tests.trainers import in_threads, make_trainer


@pytest.fixture(scope="module")
def captured() -> Captured:
    model = seeded(torch.nn.Sequential, *[torch.nn.Linear(4, 4) for _ in range(2)]).train()
    return Captured(model, (torch.zeros(2, 4),))


def epochs_of(captured: Captured, make: Callable[[], DataLoader[Any]], size: int = 2) -> list[list[list[int]]]:
    """The rows of each batch of two epochs, of all replicas together."""

    def script(world: World) -> Any:
        trainer = make_trainer(captured, world, replicas=size)
        torch.manual_seed(5)  # drawn from on the first process alone; threads share it
        loader = Loader(trainer, make())
        found = [[y.tolist() for _, y in loader] for _ in range(2)]
        assert len(loader) == len(found[0])
        trainer.close()
        return found

    parts = in_threads(size, script)
    return [
        [[row for part in batch for row in part] for batch in zip(*epoch, strict=True)]
        for epoch in zip(*parts, strict=True)
    ]


DATA = Numbers()


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(DATA, batch_size=4, sampler=SequentialSampler(range(6))),
        lambda: DataLoader(DATA, batch_size=4, sampler=SubsetRandomSampler([3, 1, 7], generator=generator())),
        lambda: DataLoader(DATA, batch_size=4, sampler=RandomSampler(range(6), generator=generator())),
        lambda: DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, num_samples=15, generator=generator())),
        lambda: DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, replacement=True, generator=generator())),
        lambda: DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler([1.0] * 11, 9, generator=generator())),
        lambda: DataLoader(DATA, batch_size=4, shuffle=True, generator=generator()),
        lambda: DataLoader(DATA, batch_size=4, shuffle=True, drop_last=True, generator=generator()),
        lambda: DataLoader(DATA, batch_size=4, sampler=[5, 4, 3, 2, 1]),
        lambda: DataLoader(DATA, batch_sampler=[[1, 2, 3], [4, 5]]),
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=generator()), 3, True)),
        lambda: DataLoader(DATA, batch_size=4),
    ],
)
def test_rows_are_those_of_the_dataloader(captured: Captured, make: Callable[[], DataLoader[Any]]) -> None:
    plain = make()
    expected = [[y.tolist() for _, y in plain] for _ in range(2)]
    assert epochs_of(captured, make) == expected


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("num_samples", [12, 25])
def test_a_number_of_samples_without_a_generator(captured: Captured, num_samples: int) -> None:
    found = epochs_of(captured, lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=num_samples)))
    assert all(sum(map(len, epoch)) == num_samples for epoch in found)
    assert found[0] != found[1]


@pytest.mark.parametrize(("shuffle", "drop_last"), [(True, False), (False, False), (False, True)])
def test_a_distributed_sampler_is_replaced_by_its_data_set(
    captured: Captured, shuffle: bool, drop_last: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    found = epochs_of(captured, lambda: DataLoader(DATA, 4, sampler=DistributedSampler(
        DATA, num_replicas=2, rank=1, shuffle=shuffle, drop_last=drop_last
    )))  # fmt: skip
    rows = [[row for batch in epoch for row in batch] for epoch in found]
    assert all(sorted(epoch) == list(range(10 if drop_last else 11)) for epoch in rows)
    assert (rows[0] != rows[1]) == shuffle
    assert capfd.readouterr().err.count("DistributedSampler") == 1


class Thirds(DistributedSampler[Any]):
    """A distributed sampler whose rows are of its own choice."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(0, 11, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(DATA, 4, sampler=Thirds(DATA, num_replicas=2, rank=0)),
        lambda: DataLoader(DATA, batch_size=None),
        lambda: DataLoader(DATA, batch_sampler=[["a"], ["b"]]),
    ],
)
def test_undistributable_loaders_are_refused(captured: Captured, make: Callable[[], DataLoader[Any]]) -> None:
    with pytest.raises(UsageError):
        epochs_of(captured, make, size=1)


def test_a_dataloader_and_settings_beside_it_are_refused() -> None:
    with penstock.Pipeline(model(), torch.zeros(2, 4)) as pipe, pytest.raises(UsageError):
        pipe.loader(DataLoader(DATA, batch_size=2), shuffle=True)


def test_an_order_of_many_rows_goes_in_parts(captured: Captured) -> None:
    expected = [[number] * 300_000 for number in (1, 2, 3)]  # more than one document may have

    def script(world: World) -> bool:
        trainer = make_trainer(captured, world, replicas=2)
        found = SampledOrder(DataLoader(DATA, batch_sampler=expected), trainer).batches(epoch=0)
        trainer.close()
        return found == expected

    assert in_threads(2, script) == [True, True]


def model() -> torch.nn.Module:
    return seeded(torch.nn.Sequential, torch.nn.Linear(4, 4)).train()


class Begins:
    """Notes that a worker began, and in which process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker: int) -> None:
        (self.folder / str(worker)).touch()


def test_settings_of_workers_are_passed_on(tmp_path: Path) -> None:
    given = DataLoader(
        DATA, batch_size=4, num_workers=2, worker_init_fn=Begins(tmp_path), prefetch_factor=3, timeout=30,
        multiprocessing_context="fork", generator=generator(),
    )  # fmt: skip
    with penstock.Pipeline(model(), torch.zeros(2, 4)) as pipe:
        loader = pipe.loader(given)
        assert sum(len(y) for _, y in loader) == 11
        assert not multiprocessing.active_children(), "they end with the epoch"
        kept = loader._workers
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert (kept["prefetch_factor"], kept["timeout"], kept["generator"]) == (3, 30, given.generator)
    assert kept["multiprocessing_context"] is given.multiprocessing_context
    start = pickle.loads(pickle.dumps(WorkerStart(Begins(tmp_path))))
    assert isinstance(start, WorkerStart)


def loss(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.pow(2).mean()


def first(batch: Any) -> int:
    return int(batch[1][0])


def test_first_batch_can_be_inspected() -> None:
    with penstock.Pipeline(model(), torch.zeros(2, 4)) as pipe:
        loader = pipe.loader(DATA, batch_size=4)
        assert [first(next(iter(loader))) for _ in range(3)] == [0, 0, 0]
        assert loader.state() == {"epoch": 0, "position": 0}
        seen = []
        for x, y in loader:
            seen += y.tolist()
            first(next(iter(loader)))  # in the midst of the loop
            pipe.train_step(x, y, loss)
            first(next(iter(loader)))
            assert loader.state()["epoch"] in {0, 1}
        assert seen == list(range(11))
        assert loader.state() == {"epoch": 1, "position": 0}


@pytest.mark.parametrize("changed", [False, True])
def test_a_loop_that_is_left_is_followed_by_the_next_epoch(changed: bool) -> None:
    with penstock.Pipeline(model(), torch.zeros(2, 4)) as pipe:
        loader = pipe.loader(DATA, batch_size=4, shuffle=True)
        whole = [loader._order.batches(epoch) for epoch in range(4)]
        for epoch in range(3):
            for place, (x, y) in enumerate(loader):
                assert y.tolist() == whole[epoch][place]
                pipe.train_step(x * 2 if changed else x, y, loss)
                if place == 1:
                    break
        first(next(iter(loader)))
        assert [y.tolist() for _, y in loader] == whole[3]


def test_an_iterator_that_is_kept_and_another_one() -> None:
    with penstock.Pipeline(model(), torch.zeros(2, 4)) as pipe:
        loader = pipe.loader(DATA, batch_size=4)
        outer = iter(loader)
        x, y = next(outer)
        pipe.train_step(x, y, loss)
        assert first(next(iter(loader))) == 0
        assert first(next(outer)) == 4
        inner = iter(loader)
        x, y = next(inner)
        pipe.train_step(x, y, loss)
        with pytest.raises(UsageError):
            next(outer)


def test_another_loader_s_steps_do_not_count() -> None:
    with penstock.Pipeline(model(), torch.zeros(2, 4)) as pipe:
        held, loader = pipe.loader(DATA, batch_size=3), pipe.loader(DATA, batch_size=4)
        for x, y in loader:
            assert first(next(iter(held))) == 0
            pipe.train_step(x, y, loss)
        assert held.state() == {"epoch": 0, "position": 0}
