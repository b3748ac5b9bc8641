"""Sharing data out: every row once, the same order everywhere, nothing loaded where it is not used."""

import sys
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from penstock.engine.placement import shares
from penstock.errors import UsageError
from penstock.group.world import World
from penstock.train.arrangement import ScheduleChoice, make_grid
from penstock.train.captured import Captured
from penstock.train.loader import Loader
from penstock.train.trainer import Trainer
from tests.learners import Numbers
from tests.models import seeded
from tests.processes import PROGRAMS, Running, free_port
from tests.trainers import in_threads, make_trainer


@pytest.fixture(scope="module")
def captured() -> Captured:
    model = seeded(torch.nn.Sequential, *[torch.nn.Linear(4, 4) for _ in range(4)]).train()
    return Captured(model, (torch.zeros(2, 4),))


def collect(captured: Captured, size: int, make: Any, **settings: Any) -> list[Any]:
    """What each process gets in two epochs, and how many rows it read."""

    def script(world: World) -> Any:
        trainer = make_trainer(captured, world, **settings)
        data = Numbers(11)
        loader = make(trainer, data)
        epochs = [[(y.tolist() if y.device.type == "cpu" else len(y)) for _, y in loader] for _ in range(2)]
        place = loader.state()
        trainer.close()
        return epochs, len(data.read), place, trainer.now.tensors.stages

    return in_threads(size, script)


def test_replicas_share_every_batch_without_overlap(captured: Captured) -> None:
    found = collect(captured, 3, lambda t, data: Loader(t, data, batch_size=4, shuffle=True), replicas=3)
    for epoch in range(2):
        parts = [result[0][epoch] for result in found]
        whole = [list(chain(*batch)) for batch in zip(*parts, strict=True)]
        assert [len(batch) for batch in whole] == [4, 4, 3]
        assert sorted(chain(*whole)) == list(range(11))
        assert [[len(batch) for batch in part] for part in parts] == [[2, 2, 1], [1, 1, 1], [1, 1, 1]]
    assert found[0][0][0] != found[0][0][1]  # another epoch, another order
    assert all(result[2] == {"epoch": 2, "position": 0} for result in found)


def test_rows_are_loaded_once_and_labels_are_on_every_rank(captured: Captured) -> None:
    found = collect(captured, 4, lambda t, data: Loader(t, data, batch_size=4), stages=4)
    assert all(result[0] == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]] * 2 for result in found)
    assert [result[1] for result in found] == [22, 0, 0, 0]


def test_a_users_own_sampler_is_the_first_processs(captured: Captured) -> None:
    def make(trainer: Trainer, data: Numbers) -> Loader:
        sampler = WeightedRandomSampler([1.0] * 11, 9)
        return Loader(trainer, DataLoader(data, batch_size=3, sampler=sampler))

    found = collect(captured, 2, make, stages=2)
    assert found[0][0] == found[1][0]
    assert [len(batch) for batch in found[0][0][0]] == [3, 3, 3]


def test_a_last_batch_smaller_than_the_microbatches_and_the_replicas(captured: Captured) -> None:
    def script(world: World) -> list[float]:
        trainer = make_trainer(captured, world, replicas=2, microbatches=2)
        losses = [
            float(trainer.train_step(x, x, torch.nn.functional.mse_loss))
            for x, _ in Loader(trainer, Numbers(5), batch_size=4)
        ]
        trainer.close()
        return losses

    first, second = in_threads(2, script)
    assert len(first) == 2
    assert first == second


def test_shares_are_contiguous_and_even() -> None:
    for num in range(9):
        for parts in range(1, 5):
            made = shares(num, parts)
            assert [row for part in made for row in part] == list(range(num))
            assert max(map(len, made)) - min(map(len, made)) <= 1


def test_grid_has_stages_of_each_replica() -> None:
    choice = ScheduleChoice("1f1b", 4)
    assert [r.stages for r in make_grid(range(4), 2, None, choice).replicas] == [(0, 1), (2, 3)]
    assert [r.stages for r in make_grid(range(3), 2, 2, choice).replicas] == [(0, 1), (2, 2)]
    assert [r.stages for r in make_grid(range(3), None, None, choice).replicas] == [(0, 1, 2)]
    dealt = make_grid(range(2), 4, None, ScheduleChoice("interleaved", 4))
    assert dealt.replicas[0].stages == (0, 1, 0, 1)
    assert dealt.stages_of(1) == [1, 3]
    with pytest.raises(Exception, match=r"3 processes .* 1 replica of 2 stages"):
        make_grid(range(3), 2, None, choice)
    with pytest.raises(UsageError, match=r"your schedule is for 1 stage.*give stages=1 \(--stages 1\), or write"):
        make_grid(range(2), 2, None, ScheduleChoice("F0 B0 ", 4))
    with pytest.raises(UsageError, match=r"stages=1 \(--stages 1\) and microbatches=1 \(--microbatches 1\), or write"):
        ScheduleChoice("F0 B0 ", 4).make(2, 4, 2)
    with pytest.raises(UsageError, match="has no backwards"):
        ScheduleChoice("F0 ", 4).make(2, 4, 2)
    with pytest.raises(UsageError, match=r"does B0\.0 before F0\.0"):
        ScheduleChoice("B0 F0 ", 4).make(1, 1, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes that load data are not forked")
def test_loading_processes_hold_no_sockets() -> None:
    """It is asleep in a row, and would hold the port at which the others met for as long as that takes."""
    port = free_port()
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
           "LOCAL_WORLD_SIZE": "1"}  # fmt: skip
    with Running([sys.executable, str(PROGRAMS / "slow_rows.py")], deadline_s=60.0, env=env) as running:
        assert running.line() == "trained"
        (loads,) = running.children()
        held = {c.laddr.port for c in loads.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert port in held, "a forked process has its parent's sockets"
        running.kill()
        deadline = time.monotonic() + 10.0
        while loads in running.children() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not running.children(), "it outlives the process that trained"


def test_batch_size_of_a_sampler_is_its_average(captured: Captured) -> None:
    class Parts:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])

        def __len__(self) -> int:
            return 3

    def script(world: World) -> list[int]:
        trainer = make_trainer(captured, world, stages=1)
        data = Numbers(10)
        sizes = [
            Loader(trainer, data, batch_size=3).batch_size,
            Loader(trainer, DataLoader(data, batch_size=5)).batch_size,
            Loader(trainer, DataLoader(data, batch_sampler=Parts())).batch_size,
        ]
        trainer.close()
        return sizes

    assert in_threads(1, script) == [[3, 5, 4]]
