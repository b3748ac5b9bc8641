"""Rows come back as they were written, in any order, by whoever may read them, and only from a file that is whole."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.elastic.shard import Shard, ShardFile, bytes_per_row, make_columns, remove_abandoned
from penstock.errors import CacheError
from tests.elastic.cache.shards import check_rows, fill_shard, layout_of, rows
from tests.processes import PROGRAMS, run_python


@pytest.mark.parametrize("stored", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (40,), (2, 0)])
def test_round_trips(tmp_path: Path, shape: tuple[int, ...], stored: torch.dtype | None) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64]
    dtypes += [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
    values = [(shape, dtype) for dtype in dtypes]
    torch.manual_seed(0)
    batch = [(torch.randn(7, *shape) * 100).to(dtype) for dtype in dtypes]
    layout = layout_of(7, values=values, stored=stored)
    with ShardFile(tmp_path, layout, None) as file:
        file.append([tensor[:2] for tensor in batch])
        file.append([tensor[2:] for tensor in batch])
        shard = file.shard()
    with shard:
        order = torch.tensor([6, 0, 3, 3])
        for (_, dtype), found, given in zip(values, shard.read(order), batch, strict=True):
            expected = given[order]
            if dtype.is_floating_point and stored is not None and stored.itemsize < dtype.itemsize:
                expected = expected.to(stored).to(dtype)
            assert found.dtype == dtype
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)) if shape else found.equal(expected)


def test_special_floats_keep_their_bits(tmp_path: Path) -> None:
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]).view(1, 4)
    layout = layout_of(1, values=[((4,), torch.float32)])
    with ShardFile(tmp_path, layout, None) as file:
        file.append([special])
        shard = file.shard()
    with shard:
        assert torch.equal(shard.read([0])[0].view(torch.int32), special.view(torch.int32))


def test_strided_and_learned_tensors_are_taken(tmp_path: Path) -> None:
    batch = torch.randn(3, 4, requires_grad=True)
    layout = layout_of(4, values=[((3,), torch.float32)])
    with ShardFile(tmp_path, layout, None) as file:
        file.append([batch.t()])
        shard = file.shard()
    with shard:
        (found,) = shard.read(torch.arange(4))
        assert torch.equal(found, batch.t())
        assert not found.requires_grad


def test_read_rows_are_copies(tmp_path: Path) -> None:
    with fill_shard(tmp_path) as shard:
        for tensor in shard.read([0, 1]):
            tensor.zero_()
        check_rows(shard)


@pytest.mark.parametrize(
    ("dtype", "stored", "expected"),
    [
        (torch.float32, None, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),  # as exact in half the room
        (torch.float16, torch.bfloat16, torch.float16),
        (torch.int64, torch.bfloat16, torch.int64),
        (torch.bool, torch.float32, torch.bool),
    ],
)
def test_floats_are_stored_narrower_and_nothing_else(
    dtype: torch.dtype, stored: torch.dtype | None, expected: torch.dtype
) -> None:
    (column,) = make_columns([((2,), dtype)], stored)
    assert (column.dtype, column.stored) == (dtype, expected)


def test_bytes_of_a_row_and_of_a_file() -> None:
    values = [((197, 384), torch.float32), ((), torch.int64), ((0, 5), torch.float32), ((3,), torch.bool)]
    assert bytes_per_row(values, None) == 197 * 384 * 4 + 8 + 3
    assert bytes_per_row(values, torch.bfloat16) == 197 * 384 * 2 + 8 + 3
    assert bytes_per_row([], None) == 0
    layout = layout_of(8, values=[((5,), torch.float32), ((), torch.int64)])
    assert layout.starts == [0, 192, 256]
    assert layout.num_bytes == 256
    for empty in ([], [((0,), torch.float32)]):
        assert layout_of(3, values=empty).num_bytes == 1  # an empty file cannot be mapped


def test_shard_may_have_no_rows(tmp_path: Path) -> None:
    with fill_shard(tmp_path, 0) as shard:
        assert [len(tensor) for tensor in shard.read([])] == [0, 0]


@pytest.mark.parametrize("places", [[8], [-1], [0, 9]])
def test_rows_beyond_the_shard_are_refused(tmp_path: Path, places: list[int]) -> None:
    with fill_shard(tmp_path) as shard, pytest.raises(CacheError, match=r"0 to 7; got (8|-1|9);"):
        shard.read(places)


@pytest.mark.parametrize(
    "batch",
    [
        rows(0, 2)[:1],
        [rows(0, 2)[0], rows(0, 3)[1]],
        [rows(0, 2)[0].double(), rows(0, 2)[1]],
        [rows(0, 2)[0].view(2, 6), rows(0, 2)[1]],
        [rows(0, 1)[0][0], torch.tensor(1)],
    ],
)
def test_rows_of_another_kind_are_refused(tmp_path: Path, batch: list[torch.Tensor]) -> None:
    with (
        pytest.raises(CacheError, match=r"the values are .*, got .*; fill"),
        ShardFile(tmp_path / "cache", layout_of(), None) as file,
    ):
        file.append(batch)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("last", "message"), [(2, r"\b1 row .* got 2;"), (0, r"7 of 8 rows")])
def test_more_or_fewer_rows_than_are_missing_are_refused(tmp_path: Path, last: int, message: str) -> None:
    def fill() -> None:
        with ShardFile(tmp_path / "cache", layout_of(), None) as file:
            file.append(rows(0, 7))
            file.append(rows(7, last))
            file.shard()

    with pytest.raises(CacheError, match=message):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_a_limit_is_kept(tmp_path: Path) -> None:
    num_bytes = layout_of().num_bytes
    with pytest.raises(CacheError, match=rf"needs {num_bytes} B, .* {num_bytes - 1} B; set a larger limit, or s"):
        fill_shard(tmp_path / "a", limit_bytes=num_bytes - 1)
    fill_shard(tmp_path / "a", limit_bytes=num_bytes).close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CacheError, match=r"set a larger limit$"):
        fill_shard(tmp_path / "b", values=[((4,), torch.int64)], limit_bytes=1)


def test_closed_shard_is_refused(tmp_path: Path) -> None:
    shard = fill_shard(tmp_path)
    shard.close()
    shard.close()
    with pytest.raises(CacheError, match="is closed; open it again"):
        shard.read([])


def test_other_processes_read_a_file_while_it_has_a_name_and_keep_it(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with ShardFile(folder, layout_of(), None) as file:
        file.append(rows(0, 8))
        found = run_python(str(PROGRAMS / "read_shard.py"), str(folder), deadline_s=60)
        assert found.status == 0, found.stderr
        reader = Shard.open(folder, layout_of())
    assert list(tmp_path.iterdir()) == []
    with reader:
        check_rows(reader)


@pytest.mark.parametrize(
    ("damage", "message"),
    [(lambda path: os.truncate(path, 100), "expected 256 bytes, got 100"), (Path.unlink, "holds no cache")],
)
def test_files_of_another_size_are_not_read(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    layout = layout_of()
    with ShardFile(tmp_path / "cache", layout, None):
        damage(layout.path(tmp_path / "cache"))
        with pytest.raises(CacheError, match=message):
            Shard.open(tmp_path / "cache", layout)


def test_files_that_a_killed_process_was_filling_are_removed(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "shard-0.rows").write_bytes(bytes(100))
    os.utime(killed / "shard-0.rows", (0, 0))
    (tmp_path / "mine.txt").write_text("mine")
    with ShardFile(tmp_path / "other", layout_of(), None) as file:  # of a run that goes on
        remove_abandoned(tmp_path)
        file.append(rows(0, 8))
        with file.shard() as shard:
            check_rows(shard)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_shards_of_owners_are_separate(tmp_path: Path) -> None:
    with fill_shard(tmp_path / "cache") as shard, fill_shard(tmp_path / "cache", owner=0) as other:
        check_rows(shard)
        check_rows(other)


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("mine")
    with pytest.raises(CacheError, match=r"cache cannot be written \(File exists\).*choose anoth"):
        fill_shard(tmp_path / "cache")
    with pytest.raises(CacheError, match="holds no cache"):
        Shard.open(tmp_path / "cache", layout_of())
    assert (tmp_path / "cache").read_text() == "mine"


def test_links_are_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "shard-1.rows").symlink_to(tmp_path / "mine")
    with pytest.raises(CacheError, match="File exists"):
        fill_shard(tmp_path)
    assert (tmp_path / "mine").read_text() == "mine"
