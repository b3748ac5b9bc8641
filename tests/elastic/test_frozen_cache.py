"""What happens to a training's cache: where it cannot be, goes wrong, is another's, or is of data that changes."""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from penstock.elastic.cache import frozen_cache
from penstock.elastic.cache.frozen_cache import Filling, cache_key
from penstock.elastic.cache.shard import Layout, Shard
from penstock.elastic.elastic_training import ElasticTraining
from penstock.errors import CacheError, RunError
from penstock.train.trainer import Trainer
from tests.elastic.trainings import (
    SAMPLES,
    Outcome,
    Step,
    alone,
    assert_same,
    files_in,
    images,
    sgd,
    train_elastically,
    vit,
)

FREEZE, EPOCHS = [0, 4], 3

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def expected() -> Outcome:
    return alone(vit(), images(), FREEZE, epochs=EPOCHS)


def run(folder: Path, size: int = 2, **more: Any) -> Outcome:
    return train_elastically(vit(), size, images(), FREEZE, epochs=EPOCHS, folder=folder, **more)


def notes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.replace("\n", " ").split("note: ")[1:]


def no_room(monkeypatch: pytest.MonkeyPatch, only: str, *, after: int) -> None:
    """Let the disk be full for one process's shard, after so many files."""
    real, calls = os.posix_fallocate, []

    def refuse(descriptor: int, offset: int, length: int) -> None:
        if only in os.readlink(f"/proc/self/fd/{descriptor}"):
            calls.append(length)
            if len(calls) > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", refuse)


def test_a_disk_that_is_full_on_one_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    no_room(monkeypatch, "shard-1", after=0)
    found = run(tmp_path, 3, hosts=["a", "b", "a"])
    assert_same(expected(), found)
    assert not any(change.cached for change in found.changes)
    (said,) = notes(capfd)
    assert "rank 1: the cache needs" in said
    assert "No space left on device" in said
    assert "no further layers are cached" in said
    assert not list(tmp_path.iterdir())


def test_a_disk_that_becomes_full_leaves_the_cache_that_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    freeze = [0, 2, 4]
    no_room(monkeypatch, "shard-0", after=1)
    found = train_elastically(vit(), 2, images(), freeze, epochs=6, folder=tmp_path)
    assert_same(alone(vit(), images(), freeze, epochs=6), found)
    assert [change.cached for change in found.changes] == [False, *[True] * 5]
    assert "reads 2 layers" in found.changes[-1].why
    assert len(notes(capfd)) == 1
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_in_the_midst(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", refuse)
    assert_same(expected(), run(tmp_path))
    assert "Input/output error" in notes(capfd)[0]
    assert not list(tmp_path.iterdir())


def _file_in_its_place(folder: Path) -> dict[str, Any]:
    folder.rmdir()
    folder.write_text("mine")
    return {}


def _too_small(_folder: Path) -> dict[str, Any]:
    return {"cache_limit": "4 kB"}


@pytest.mark.parametrize(
    ("prepare", "said"),
    [(_file_in_its_place, "cannot be written"), (_too_small, "of the limit is 4 kB")],
)
def test_a_folder_that_cannot_be_used(
    prepare: Callable[[Path], dict[str, Any]], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    more = prepare(folder)
    assert_same(expected(), run(folder, **more))
    (found,) = notes(capfd)
    assert said in found
    assert folder.is_dir() or folder.read_text() == "mine"
    assert files_in(folder) == []


def test_a_folder_that_may_not_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As root every folder may be; so the system is made to refuse."""
    real = Path.mkdir

    def refuse(self: Path, *arguments: Any, **named: Any) -> None:
        if self.is_relative_to(tmp_path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        real(self, *arguments, **named)

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert_same(expected(), run(tmp_path))
    assert "Permission denied" in notes(capfd)[0]


def test_a_limit_is_for_a_machine_and_both_caches_of_a_change(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    row = 5 * 16 * 4 + 16  # bytes of a sample's output: tokens of float32, and the digest of its input
    freeze = [0, 2, 4]
    for hosts, limit, cached in (
        (["a", "b"], SAMPLES // 2 * row, "reads 2 layers"),  # too little for the second beside the first
        (["a", "a"], 2 * (SAMPLES // 2 * row), "reads 2 layers"),
        (["a", "a"], 4 * (SAMPLES // 2 * row), "reads 4 layers"),
    ):
        found = train_elastically(
            vit(), 2, images(), freeze, epochs=5, folder=tmp_path, hosts=hosts, cache_limit=limit
        )  # fmt: skip
        assert cached in found.changes[-1].why
    assert all("of the limit is" in said for said in notes(capfd) if "no further layers" in said)


def test_a_neighbour_whose_folder_is_not_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Containers may have one name and folders of their own."""
    real = Filling._open_neighbours

    def elsewhere(filling: Filling, folder: Path, layouts: Sequence[Layout]) -> dict[int, Shard]:
        if filling._trainer.world.rank == 1:
            raise CacheError(f"{folder}/shard-0 holds no cache")
        return real(filling, folder, layouts)

    monkeypatch.setattr(Filling, "_open_neighbours", elsewhere)
    assert_same(expected(), run(tmp_path, hosts=["a", "a"]))
    assert any("shard-0 holds no cache" in said and "no further layers are cached" in said for said in notes(capfd))
    assert not list(tmp_path.iterdir())


def test_the_cache_of_another_model_or_data_is_left_alone(tmp_path: Path) -> None:
    others = [
        train_elastically(model, 2, data, FREEZE, epochs=EPOCHS, folder=tmp_path, keep_cache=True)
        for model, data in ((vit(seed=1), images()), (vit(), images(seed=8)))
    ]
    assert all(other.changes[-1].cached for other in others)
    kept = {path: path.read_bytes() for path in files_in(tmp_path)}
    assert len(list(tmp_path.iterdir())) == 2
    assert_same(expected(), run(tmp_path))
    assert {path: path.read_bytes() for path in files_in(tmp_path)} == kept


def test_a_cache_that_is_kept_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, keep_cache=True)
    before = {path: path.read_bytes() for path in files_in(tmp_path)}
    assert len(before) == 4

    def refuse(*_: Any) -> None:
        raise AssertionError("it has all rows")

    monkeypatch.setattr(frozen_cache, "writing", refuse)
    found = run(tmp_path, keep_cache=True)
    assert_same(expected(), found)
    assert {path: path.read_bytes() for path in files_in(tmp_path)} == before


@pytest.mark.parametrize("damage", ["rows", "done"])
def test_a_cache_that_is_damaged_is_filled_again(damage: str, tmp_path: Path) -> None:
    run(tmp_path, keep_cache=True)
    before = {path: path.read_bytes() for path in files_in(tmp_path)}
    for path in tmp_path.glob(f"*/*.{damage}"):
        path.write_bytes(path.read_bytes()[:-3] + b"\x01\x02\x03")
    assert_same(expected(), run(tmp_path, keep_cache=True))
    assert {path: path.read_bytes() for path in files_in(tmp_path)} == before


def test_a_cache_is_not_used_for_samples_that_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two samples of which the key sees nothing: the key looks at some alone, and nothing is learned."""
    monkeypatch.setattr(frozen_cache, "_LOOKED_AT", 1)
    freeze, epochs = [0, 2, 4], 5  # a second cache is filled from the first

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    def train(data: Dataset[Any]) -> Outcome:
        return train_elastically(
            vit(), 2, data, freeze, epochs=epochs, make=make, folder=tmp_path, keep_cache=True
        )  # fmt: skip

    train(images())
    capfd.readouterr()
    changed = images()
    changed.tensors[0][[7, 20]] = 0.5
    assert train(changed).losses == pytest.approx(alone(vit(), changed, freeze, epochs=epochs, make=make).losses)
    assert sum("have changed since" in said for said in notes(capfd)) >= 2


def test_a_folder_that_somebody_removes_meanwhile(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def between(trainer: Trainer, _elastic: ElasticTraining, epoch: int) -> None:
        if epoch == EPOCHS - 1 and trainer.world.rank == 0:
            for path in files_in(tmp_path):
                path.unlink(missing_ok=True)  # the other rank may be writing one anew

    assert_same(expected(), run(tmp_path, between=between))
    assert notes(capfd) == []


class BrokenError(Exception):
    """An error of the caller's."""


@pytest.mark.parametrize("place", [(2, 1), (2, 0)])
def test_a_run_that_fails_leaves_its_cache(place: tuple[int, int], tmp_path: Path) -> None:
    def loop(step: Step) -> Tensor:
        if (step.epoch, step.number) == place and step.trainer.world.rank == 1:
            raise BrokenError
        return step.train()

    with pytest.raises((BrokenError, RunError)):
        run(tmp_path, 3, loop=loop)
    assert len(files_in(tmp_path)) == 6
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-features")]
    assert_same(expected(), run(tmp_path, 3))  # which takes it over
    assert files_in(tmp_path) == []


class Noisy(Dataset[Any]):
    """Images that are drawn anew each time, as by random augmentation."""

    def __init__(self) -> None:
        self.data = images()
        self.random = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.data[index]
        return image + torch.randn(image.shape, generator=self.random, dtype=image.dtype), label


def test_samples_that_change_are_not_cached(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = train_elastically(vit(), 2, Noisy(), FREEZE, epochs=EPOCHS, folder=tmp_path)
    assert not any(change.cached for change in found.changes)
    (said,) = notes(capfd)
    assert "are not cached" in said
    assert "cache_views=3" in said


def test_variants_of_samples_that_change(tmp_path: Path) -> None:
    """With all layers frozen and nothing learned, an epoch's loss is that of the variants that it has."""

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    found = train_elastically(vit(), 2, Noisy(), [0, 6], epochs=9, make=make, folder=tmp_path, cache_views=3)
    assert [change.cached for change in found.changes] == [False, *[True] * 8]
    totals = [16 * found.losses[at] + 16 * found.losses[at + 1] + 12 * found.losses[at + 2] for at in range(0, 27, 3)]
    assert totals[1:6] == pytest.approx(totals[4:9], rel=1e-6)
    for one, other in ((1, 2), (2, 3), (1, 3)):
        assert totals[one] != pytest.approx(totals[other], rel=1e-6)


def test_rows_that_a_cast_crosses_are_not_cached(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    single = torch.float32
    found = train_elastically(
        vit(single), 2, images(single), FREEZE, epochs=EPOCHS, make=sgd, folder=tmp_path,
        arranged={"autocast": torch.bfloat16},
    )  # fmt: skip
    assert not any(change.cached for change in found.changes)
    assert "autocast is on" in notes(capfd)[0]


KEY: dict[str, Any] = {
    "program": '{"operations": []}', "weights": {"a.weight": "1f", "a.bias": "20"}, "data": [["2a"], ["3b"]],
    "num_processes": 2, "num_samples": 10, "num_views": 1, "stored": torch.bfloat16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("program", '{"operations": [1]}'),
        ("weights", {"a.weight": "1e", "a.bias": "20"}),
        ("weights", {"a.weight": "1f"}),
        ("weights", {"b.weight": "1f", "a.bias": "20"}),
        ("data", [["2a"]]),
        ("data", [["2a", "3b"]]),
        ("num_processes", 3),
        ("num_samples", 11),
        ("num_views", 2),
        ("stored", torch.float32),
    ],
)
def test_whatever_a_cache_s_values_depend_on_changes_its_key(field: str, value: object) -> None:
    assert len(cache_key(**KEY)) == 32
    assert cache_key(**KEY | {field: value}) != cache_key(**KEY)
