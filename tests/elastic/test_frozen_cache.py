"""What happens to a training's cache: where it cannot be, goes wrong, is another's, or is of data that changes."""

import errno
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from penstock.elastic.shard import Shard, ShardLayout
from penstock.errors import RunError
from tests.disks import Disk
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


def test_a_disk_that_is_full_on_one_process(disk: Disk, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    disk.fail("posix_fallocate", errno.ENOSPC, only="shard-1")
    found = run(tmp_path, 3, hosts=["a", "b", "a"])
    assert_same(expected(), found)
    assert not any(change.cached for change in found.changes)
    (said,) = notes(capfd)
    assert "rank 1: the cache needs" in said
    assert "No space left on device" in said
    assert "no further layers are cached" in said
    assert not list(tmp_path.iterdir())


def test_a_disk_that_becomes_full_leaves_the_cache_that_is_there(
    disk: Disk, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    freeze = [0, 2, 4]
    disk.fail("posix_fallocate", errno.ENOSPC, only="shard-0", after=1)
    found = train_elastically(vit(), 2, images(), freeze, epochs=6, folder=tmp_path)
    assert_same(alone(vit(), images(), freeze, epochs=6), found)
    assert [change.cached for change in found.changes] == [False, *[True] * 5]
    assert "reads 2 layers" in found.changes[-1].why
    assert len(notes(capfd)) == 1
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_in_the_midst(disk: Disk, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    disk.fail("pwrite", errno.EIO)
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
    ("prepare", "said"), [(_file_in_its_place, "cannot be written"), (_too_small, "of the limit is 4 kB")]
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


def test_a_folder_that_may_not_be_written(disk: Disk, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As root every folder may be; so the system is made to refuse."""
    disk.fail("mkdir", errno.EACCES, only=str(tmp_path))
    assert_same(expected(), run(tmp_path))
    assert "Permission denied" in notes(capfd)[0]


def test_a_limit_is_for_a_machine_and_both_caches_of_a_change(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    row = 5 * 16 * 4  # bytes of a sample's output: tokens of float32
    freeze = [0, 2, 4]
    for hosts, limit, cached in (
        (["a", "b"], SAMPLES // 2 * row, "reads 2 layers"),  # too little for the second beside the first
        (["a", "a"], 2 * (SAMPLES // 2 * row), "reads 2 layers"),
        (["a", "a"], 4 * (SAMPLES // 2 * row), "reads 4 layers"),
    ):
        found = train_elastically(vit(), 2, images(), freeze, epochs=5, folder=tmp_path, hosts=hosts, cache_limit=limit)
        assert cached in found.changes[-1].why
    assert all("of the limit is" in said for said in notes(capfd) if "no further layers" in said)


def test_a_neighbour_whose_folder_is_not_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Containers may have one name and folders of their own."""
    real = Shard.open

    def elsewhere(folder: Path, layout: ShardLayout) -> Shard:
        return real(folder / "elsewhere" if layout.owner == 0 else folder, layout)

    monkeypatch.setattr(Shard, "open", elsewhere)
    assert_same(expected(), run(tmp_path, hosts=["a", "a"]))
    assert any("0.rows holds no cache" in said and "no further layers are cached" in said for said in notes(capfd))
    assert not list(tmp_path.iterdir())


class BrokenError(Exception):
    """An error of the caller's."""


@pytest.mark.parametrize("place", [(2, 1), (2, 0)])
def test_runs_that_fail_leave_nothing(place: tuple[int, int], tmp_path: Path) -> None:
    def loop(step: Step) -> Tensor:
        if (step.epoch, step.number) == place and step.trainer.world.rank == 1:
            raise BrokenError
        return step.train()

    with pytest.raises((BrokenError, RunError)):
        run(tmp_path, 3, loop=loop)
    assert files_in(tmp_path) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-features")]


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
