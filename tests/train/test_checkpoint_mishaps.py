"""What a checkpoint survives: death between any two writes, a torn file, a forged index, an unshared folder."""

import contextlib
import errno
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from penstock.errors import ModelError, UsageError
from penstock.group.world import World
from penstock.train.captured import Captured
from penstock.train.checkpoint import load_checkpoint, save_checkpoint
from penstock.train.trainer import Trainer
from tests.disks import Disk
from tests.trainers import in_threads, make_trainer

INPUTS, LABELS = torch.arange(12.0).reshape(4, 3) / 12, torch.tensor([0, 1, 2, 0])


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    return Captured(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).train(), (INPUTS[:2],))


class _Died(BaseException):
    """The process is gone."""


class _Machine:
    """Counts what is done to files below a folder, and loses power before one of these steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._flushed: set[int] = set()
        self.num_steps, self.last_step = 0, sys.maxsize

    def step(self, *paths: object) -> None:
        """One step on files; nothing is done any more after the last one."""
        if any(isinstance(path, (str, os.PathLike)) and self._folder in str(path) for path in paths):
            self.num_steps += 1
            if self.num_steps > self.last_step:
                raise _Died

    def flush(self, descriptor: int) -> None:
        self.step(self._folder)
        self._flushed.add(os.fstat(descriptor).st_ino)

    def lose_power(self) -> None:
        """Lose what was not flushed: the names of files outlive their bytes."""
        self.last_step = sys.maxsize
        for file in Path(self._folder).rglob("*"):
            if file.is_file() and file.stat().st_ino not in self._flushed:
                os.truncate(file, 0)


_watching: list[_Machine] = []
_STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _watching and event in _STEPS:
        _watching[0].step(*arguments[:2])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Machine]:
    made = _Machine(tmp_path / "run")
    monkeypatch.setattr(os, "fsync", made.flush)
    sys.addaudithook(_audit)  # for good, so it does nothing while nobody watches
    _watching.append(made)
    yield made
    _watching.clear()


def _learn(trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
    trainer.train_step(INPUTS, LABELS, F.cross_entropy)
    optimizer.step()
    optimizer.zero_grad()


def _values(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for _, parameter in trainer.named_parameters()]


def test_a_whole_checkpoint_is_there_whenever_the_machine_dies(
    captured: Captured, tmp_path: Path, machine: _Machine
) -> None:
    place, earlier = tmp_path / "run" / "last", tmp_path / "earlier"

    def script(world: World) -> list[int]:
        trainer = make_trainer(captured, world, stages=1)
        optimizer = trainer.optimizer(lambda ps: torch.optim.AdamW(ps, lr=0.1))
        _learn(trainer, optimizer)
        save_checkpoint(trainer, place, optimizer)
        first = _values(trainer)
        shutil.copytree(place, earlier)
        _learn(trainer, optimizer)
        second = _values(trainer)
        survivors, dying = [], 0
        while True:
            dying += 1
            machine.last_step = machine.num_steps + dying
            with contextlib.suppress(_Died, ModelError):
                save_checkpoint(trainer, place, optimizer)
            died = machine.num_steps > machine.last_step
            machine.lose_power()
            load_checkpoint(trainer, place, optimizer)
            assert trainer.step in {1, 2}
            expected = first if trainer.step == 1 else second
            assert all(torch.equal(a, b) for a, b in zip(_values(trainer), expected, strict=True))
            survivors.append(trainer.step)
            if not died:
                break
            # once more from the start: the earlier one in the folder, the later one in memory
            load_checkpoint(trainer, earlier, optimizer)
            save_checkpoint(trainer, place, optimizer)
            _learn(trainer, optimizer)
        trainer.close()
        return survivors

    survivors = in_threads(1, script)[0]
    assert len(survivors) > 8, "nothing was watched"
    assert survivors == sorted(survivors), "the later one was lost again"
    assert (survivors[0], survivors[-1]) == (1, 2)
    assert sorted(path.name for path in place.iterdir())[0] == "checkpoint.json"
    assert len(list(place.iterdir())) == 2, "something was left behind"


def _alone(captured: Captured, do: Callable[[Trainer, torch.optim.Optimizer], Any]) -> Any:
    def script(world: World) -> Any:
        trainer = make_trainer(captured, world, stages=1)
        optimizer = trainer.optimizer(lambda ps: torch.optim.AdamW(ps, lr=0.1))
        _learn(trainer, optimizer)
        found = do(trainer, optimizer)
        trainer.close()
        return found

    return in_threads(1, script)[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"places": "../elsewhere"}, "matching regex"),
        ({"places": "/etc"}, "matching regex"),
        ({"places": "stage-0\n"}, "matching regex"),
        ({"places": ".."}, "matching regex"),
        ({"step": -1}, ">= 0"),
        ({"step": "1"}, "Expected `int`"),
        ({"random": "AAAA"}, r"a random state must have \d+ bytes; got 3"),
        ({"random": "?"}, r"checkpoint\.json is not a checkpoint"),
        (
            {"groups": [{"settings": {"params": []}, "names": [], "place": 0, "schedules": {}}]},
            "must not contain 'params'",
        ),
        ({"files": {"stage-0/../../x": 3}}, "matching regex"),
        ({"trained": 1}, "one of 0 loaders; got 1"),
        ({"version": 7}, r"checkpoint\.json is not a checkpoint"),
        ({"more": 1}, "unknown field `more`"),
        ({"shapes": {}}, "must have a folder and a shape"),
    ],
)
def test_a_forged_index_is_refused(captured: Captured, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    def forge(trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
        save_checkpoint(trainer, tmp_path / "one", optimizer)
        (tmp_path / "elsewhere").mkdir()
        file = tmp_path / "one" / "checkpoint.json"
        index = json.loads(file.read_text())
        if isinstance(change.get("places"), str):
            index["places"] = dict.fromkeys(index["places"], change["places"])
        else:
            index |= change
        file.write_text(json.dumps(index))
        load_checkpoint(trainer, tmp_path / "one", optimizer)

    with pytest.raises(ModelError, match=said) as caught:
        _alone(captured, forge)
    assert "\n" not in str(caught.value)


def test_wrong_checkpoint_shape_is_refused_before_allocation(captured: Captured, tmp_path: Path) -> None:
    def forge(trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
        save_checkpoint(trainer, tmp_path / "one", optimizer)
        file = tmp_path / "one" / "checkpoint.json"
        index = json.loads(file.read_text())
        index["shapes"]["optimizer/exp_avg/0.weight"][1] = [2**30, 2**20]
        file.write_text(json.dumps(index))
        load_checkpoint(trainer, tmp_path / "one", optimizer)

    with pytest.raises(ModelError, match=r"stage-0: optimizer/exp_avg/0\.weight not found"):
        _alone(captured, forge)


def test_a_folder_that_hosts_do_not_share_is_named(captured: Captured, tmp_path: Path) -> None:
    errors: list[str] = []
    lock = threading.Lock()

    def script(world: World) -> None:
        world.hosts = ["host-a", "host-b"]
        trainer = make_trainer(captured, world, stages=2)
        try:
            save_checkpoint(trainer, tmp_path / f"disk-of-{world.rank}" / "one", shows_s=0.2)
        except ModelError as error:
            with lock:
                errors.append(str(error))
        trainer.close()

    in_threads(2, script)
    assert len(errors) == 2, "both know it"
    assert errors[0] == errors[1]
    assert "rank 0 on host-a" in errors[0]
    assert "which rank 1 on host-b has written" in errors[0]
    assert str(tmp_path / "disk-of-0" / "one" / "stage-1") in errors[0]


def test_a_host_that_does_not_see_the_checkpoint_is_named(captured: Captured, tmp_path: Path) -> None:
    def script(world: World) -> str:
        trainer = make_trainer(captured, world, stages=2)
        save_checkpoint(trainer, tmp_path / "one")
        said = ""
        try:
            load_checkpoint(trainer, tmp_path / ("one" if world.rank == 0 else "nowhere"))
        except UsageError as error:
            said = str(error)
        trainer.close()
        return said

    said = in_threads(2, script)
    assert said[0] == said[1]
    assert "rank 1 cannot read it although rank 0 can" in said[0]


def test_a_full_disk_is_one_line_and_leaves_the_earlier_checkpoint(
    captured: Captured, tmp_path: Path, disk: Disk
) -> None:
    def fill(trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
        save_checkpoint(trainer, tmp_path / "one", optimizer)
        _learn(trainer, optimizer)

        full = pytest.raises(ModelError, match=r"No space left on device")
        with disk.failing("fsync", errno.ENOSPC), full as caught:
            save_checkpoint(trainer, tmp_path / "one", optimizer)
        assert "\n" not in str(caught.value)
        load_checkpoint(trainer, tmp_path / "one", optimizer)
        assert trainer.step == 1

    _alone(captured, fill)
