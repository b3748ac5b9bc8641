"""Rows come back as they were written, in any order, by whoever may read them, and only from a file that is whole."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.elastic.cache.shard import Shard, bytes_per_row, make_columns, remove, writing
from penstock.errors import CacheError, UsageError
from tests.elastic.cache.shards import VALUES, check_rows, fill_shard, layout_of, rows
from tests.processes import run_python


@pytest.mark.parametrize("stored", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (40,), (2, 0)])
def test_round_trips(tmp_path: Path, shape: tuple[int, ...], stored: torch.dtype | None) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64]
    dtypes += [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
    values = [(shape, dtype) for dtype in dtypes]
    torch.manual_seed(0)
    batch = [(torch.randn(7, *shape) * 100).to(dtype) for dtype in dtypes]
    layout = layout_of(7, values=values, stored=stored)
    with writing(tmp_path, layout, None) as append:
        append([tensor[:2] for tensor in batch])
        append([tensor[2:] for tensor in batch])
    with Shard.open(tmp_path, layout) as shard:
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
    with writing(tmp_path, layout, None) as append:
        append([special])
    with Shard.open(tmp_path, layout) as shard:
        assert torch.equal(shard.read([0])[0].view(torch.int32), special.view(torch.int32))


def test_strided_and_learned_tensors_are_taken(tmp_path: Path) -> None:
    batch = torch.randn(3, 4, requires_grad=True)
    layout = layout_of(4, values=[((3,), torch.float32)])
    with writing(tmp_path, layout, None) as append:
        append([batch.t()])
    with Shard.open(tmp_path, layout) as shard:
        (found,) = shard.read(torch.arange(4))
        assert torch.equal(found, batch.t())
        assert not found.requires_grad


def test_what_is_read_is_a_copy(tmp_path: Path) -> None:
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


def test_a_shard_of_no_rows(tmp_path: Path) -> None:
    with fill_shard(tmp_path, 0) as shard:
        assert [len(tensor) for tensor in shard.read([])] == [0, 0]


@pytest.mark.parametrize("places", [[8], [-1], [0, 9]])
def test_rows_that_are_not_there(tmp_path: Path, places: list[int]) -> None:
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
        writing(tmp_path, layout_of(), None) as append,
    ):
        append(batch)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("last", "message"), [(2, r"\b1 row .* got 2;"), (0, r"7 of 8 rows")])
def test_more_or_fewer_rows_than_are_missing_are_refused(tmp_path: Path, last: int, message: str) -> None:
    def fill() -> None:
        with writing(tmp_path, layout_of(), None) as append:
            append(rows(0, 7))
            append(rows(7, last))

    with pytest.raises(CacheError, match=message):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_a_limit_is_kept(tmp_path: Path) -> None:
    num_bytes = layout_of().num_bytes
    with pytest.raises(CacheError, match=rf"needs {num_bytes} B, .* {num_bytes - 1} B; set a larger limit, or s"):
        fill_shard(tmp_path, limit_bytes=num_bytes - 1)
    assert list(tmp_path.iterdir()) == []
    fill_shard(tmp_path, limit_bytes=num_bytes).close()
    with pytest.raises(CacheError, match=r"set a larger limit$"):
        fill_shard(tmp_path / "b", values=[((4,), torch.int64)], limit_bytes=1)


def test_a_closed_shard_says_so(tmp_path: Path) -> None:
    shard = fill_shard(tmp_path)
    shard.close()
    shard.close()
    with pytest.raises(CacheError, match="is closed; open it again"):
        shard.read([])


_READ = """
import sys
from pathlib import Path
from penstock.elastic.cache.shard import Shard
from tests.elastic.cache.shards import check_rows, layout_of

with Shard.open(Path(sys.argv[1]), layout_of()) as shard:
    check_rows(shard)
    print("first", flush=True)
    input()
    check_rows(shard)
"""


def test_another_process_reads_while_it_is_open_and_after_it_is_deleted(tmp_path: Path) -> None:
    with fill_shard(tmp_path) as shard:
        found = run_python("-c", _READ, str(tmp_path), deadline_s=60, stdin="\n")
        assert found.stdout == "first\n", found.stderr
        assert found.status == 0
        with Shard.open(tmp_path, layout_of()) as reader:
            shard.delete()
            check_rows(reader)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_goes_on_while_the_file_is_written_anew(tmp_path: Path) -> None:
    with fill_shard(tmp_path) as reader, fill_shard(tmp_path) as other:
        check_rows(reader)
        check_rows(other)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda rows, _: _flip(rows), "is damaged"),
        (lambda rows, _: os.truncate(rows, 100), "expected 256 bytes, got 100"),
        (lambda rows, _: rows.unlink(), "holds no cache"),
        (lambda _, mark: mark.unlink(), "is not finished"),
        (lambda _, mark: mark.write_bytes(b""), "is damaged"),
        (lambda _, mark: mark.write_bytes(mark.read_bytes().replace(b'"k"', b'"other"')), "belong to another cache"),
    ],
)
def test_a_file_that_is_damaged_or_unfinished_is_not_used(
    tmp_path: Path, damage: Callable[[Path, Path], object], message: str
) -> None:
    fill_shard(tmp_path).close()
    damage(tmp_path / "shard-1.rows", tmp_path / "shard-1.done")
    with pytest.raises(CacheError, match=message) as refused:
        Shard.open(tmp_path, layout_of())
    assert "\n" not in str(refused.value)
    with fill_shard(tmp_path) as shard:  # and is written anew
        check_rows(shard)


@pytest.mark.parametrize(
    "changed",
    [{"key": "other"}, {"num_rows": 7}, {"stored": torch.bfloat16}, {"values": VALUES[::-1]}, {"owner": 2}],
)
def test_a_file_of_other_rows_is_not_used(tmp_path: Path, changed: dict[str, object]) -> None:
    fill_shard(tmp_path).close()
    with pytest.raises(UsageError):
        Shard.open(tmp_path, layout_of(**changed))  # type: ignore[arg-type]


def test_owners_do_not_meet(tmp_path: Path) -> None:
    with fill_shard(tmp_path) as shard:
        fill_shard(tmp_path, owner=0).delete()
        check_rows(shard)
        Shard.open(tmp_path, layout_of()).close()


def test_deletion_leaves_what_it_did_not_make(tmp_path: Path) -> None:
    shard = fill_shard(tmp_path)
    kept = [tmp_path / "notes.txt", tmp_path / "shard-99.rows"]
    for path in kept:
        path.write_text("mine")
    shard.delete()
    remove(tmp_path, shard.layout)
    assert sorted(tmp_path.iterdir()) == kept


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
    with fill_shard(tmp_path) as shard:
        check_rows(shard)
    assert (tmp_path / "mine").read_text() == "mine"
