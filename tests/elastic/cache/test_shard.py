"""Rows come back as they were written, in any order, by whoever may read them."""

import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.elastic.cache import layout
from penstock.elastic.cache.shard import Shard, room_needed
from penstock.errors import CacheError
from tests.elastic.cache.shards import VALUES, check_rows, open_shard, rows
from tests.processes import Running, run_python


@pytest.mark.parametrize("stored", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (40,), (2, 0)])
def test_round_trips(tmp_path: Path, shape: tuple[int, ...], stored: torch.dtype | None) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64]
    dtypes += [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
    values = [(shape, dtype) for dtype in dtypes]
    torch.manual_seed(0)
    batch = [(torch.randn(7, *shape) * 100).to(dtype) for dtype in dtypes]
    with open_shard(tmp_path, 7, values=values, stored=stored) as shard:
        shard.append([tensor[:2] for tensor in batch])
        shard.append([tensor[2:] for tensor in batch])
        order = torch.tensor([6, 0, 3, 3])
        for (_, dtype), found, given in zip(values, shard.read(order), batch, strict=True):
            expected = given[order]
            if dtype.is_floating_point and stored is not None and stored.itemsize < dtype.itemsize:
                expected = expected.to(stored).to(dtype)
            assert found.dtype == dtype
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)) if shape else found.equal(expected)


def test_special_floats_keep_their_bits(tmp_path: Path) -> None:
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]).view(1, 4)
    with open_shard(tmp_path, 1, values=[((4,), torch.float32)]) as shard:
        shard.append([special])
        assert torch.equal(shard.read([0])[0].view(torch.int32), special.view(torch.int32))


def test_strided_and_learned_tensors_are_taken(tmp_path: Path) -> None:
    batch = torch.randn(3, 4, requires_grad=True)
    with open_shard(tmp_path, 4, values=[((3,), torch.float32)]) as shard:
        shard.append([batch.t()])
        (found,) = shard.read(torch.arange(4))
        assert torch.equal(found, batch.t())
        assert not found.requires_grad


def test_what_is_read_is_a_copy(tmp_path: Path) -> None:
    with open_shard(tmp_path) as shard:
        shard.append(rows(0, 8))
        for tensor in shard.read([0, 1]):
            tensor.zero_()
        check_rows(shard, 8)


def test_a_shard_goes_on_at_the_last_flush(tmp_path: Path) -> None:
    with open_shard(tmp_path) as shard:
        assert (shard.num_done, shard.num_rows, shard.complete, shard.num_bytes) == (0, 8, False, 152 * 2 + 80)
        shard.append(rows(0, 4))
        check_rows(shard, 4)
        shard.flush()
        shard.append(rows(100, 2))  # lost
    assert sorted(path.name for path in (tmp_path / "shard-1").iterdir()) == [
        *("0.rows", "1.rows", "2.rows", "manifest.json")
    ]
    with open_shard(tmp_path) as shard:
        check_rows(shard, 4)
        shard.append(rows(4, 0))
        shard.append(rows(4, 4))
        shard.flush()
        assert shard.complete
    with open_shard(tmp_path) as shard:
        check_rows(shard, 8)


def test_files_of_another_size_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_shard(tmp_path) as shard:
        shard.append(rows(0, 4))
        shard.flush()
    monkeypatch.setattr(layout, "FILE_BYTES", 2**20)
    with open_shard(tmp_path) as shard:
        shard.append(rows(4, 4))
        check_rows(shard, 8)


def test_a_shard_of_no_rows_is_complete(tmp_path: Path) -> None:
    with open_shard(tmp_path, 0) as shard:
        assert shard.complete
        shard.flush()
        assert [len(tensor) for tensor in shard.read([])] == [0, 0]
    with Shard.open_existing(tmp_path, "k", 1) as shard:
        assert shard.complete


@pytest.mark.parametrize("places", [[4], [-1], [0, 9]])
def test_rows_that_are_not_there_yet(tmp_path: Path, places: list[int]) -> None:
    with open_shard(tmp_path) as shard:
        shard.append(rows(0, 4))
        with pytest.raises(CacheError, match=r"row (4|-1|9) .* below 4"):
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
    with open_shard(tmp_path) as shard:
        with pytest.raises(CacheError, match=r"tensors of .*; got "):
            shard.append(batch)
        check_rows(shard, 0)


def test_more_rows_than_are_missing_are_refused(tmp_path: Path) -> None:
    with open_shard(tmp_path) as shard:
        shard.append(rows(0, 7))
        with pytest.raises(CacheError, match=r"\b1 rows .* got 2;"):
            shard.append(rows(7, 2))
        check_rows(shard, 7)


def test_a_limit_is_kept(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"384 B, .* 383 B"):
        open_shard(tmp_path, limit_bytes=383)
    assert list(tmp_path.iterdir()) == []
    open_shard(tmp_path, limit_bytes=384).close()
    with pytest.raises(CacheError, match=r"give a larger limit$"):
        open_shard(tmp_path / "b", values=[((4,), torch.int64)], limit_bytes=1)


def test_one_shard_is_filled_from_another(tmp_path: Path) -> None:
    deeper = [((4,), torch.float32)]
    with open_shard(tmp_path / "2") as old:
        old.append(rows(0, 8))
        room = room_needed(old, deeper, torch.bfloat16, 8)
        assert room == old.num_bytes + room_needed(None, deeper, torch.bfloat16, 8)
        with open_shard(
            tmp_path / "3", key="q", values=deeper, stored=torch.bfloat16, limit_bytes=room - old.num_bytes
        ) as new:
            while not new.complete:
                (value, _) = old.read(range(new.num_done, min(8, new.num_done + 3)))
                new.append([value.flatten(1)[:, :4]])
            new.flush()
        old.delete()
    assert list((tmp_path / "2").iterdir()) == []


def test_a_closed_shard_says_so(tmp_path: Path) -> None:
    shard = open_shard(tmp_path)
    shard.close()
    shard.close()
    acts: list[Callable[[], object]] = [lambda: shard.read([]), lambda: shard.append([]), shard.flush, shard.delete]
    for act in acts:
        with pytest.raises(CacheError, match="is closed; open it again"):
            act()


_READ = """
import sys
from pathlib import Path
from penstock.elastic.cache.shard import Shard
from tests.elastic.cache.shards import check_rows

with Shard.open_existing(Path(sys.argv[1]), "k", 1) as shard:
    check_rows(shard, 8)
    print("first", flush=True)
    input()
    check_rows(shard, 8)
"""


def test_another_process_reads_while_it_is_open_and_after_it_is_deleted(tmp_path: Path) -> None:
    with open_shard(tmp_path) as shard:
        shard.append(rows(0, 8))
        shard.flush()
        found = run_python("-c", _READ, str(tmp_path), deadline_s=60, stdin="\n")
        assert found.stdout == "first\n", found.stderr
        assert found.status == 0
        with Shard.open_existing(tmp_path, "k", 1) as reader:
            shard.delete()
            check_rows(reader, 8)


def test_a_reader_neither_writes_nor_deletes(tmp_path: Path) -> None:
    with open_shard(tmp_path) as shard:
        shard.append(rows(0, 8))
        shard.flush()
    with Shard.open_existing(tmp_path, "k", 1) as reader:
        check_rows(reader, 8)
        acts: list[Callable[[], object]] = [lambda: reader.append(rows(0, 1)), reader.flush, reader.delete]
        for act in acts:
            with pytest.raises(CacheError, match="opened to be read"):
                act()


def test_what_a_reader_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"holds no cache: .*manifest\.json"):
        Shard.open_existing(tmp_path, "k", 1)
    with open_shard(tmp_path) as shard:
        shard.append(rows(0, 4))
        shard.flush()
        with pytest.raises(CacheError, match="4 of 8 rows"):
            Shard.open_existing(tmp_path, "k", 1)
        with pytest.raises(CacheError, match=r"owner 1 .*key k, .*owner 1 .*key other"):
            Shard.open_existing(tmp_path, "other", 1)


_OPEN = """
import sys
from pathlib import Path
from tests.elastic.cache.shards import open_shard

with open_shard(Path(sys.argv[1])):
    print("open", flush=True)
    input()
"""


def test_two_processes_do_not_fill_one_shard(tmp_path: Path) -> None:
    with Running([sys.executable, "-c", _OPEN, str(tmp_path)], deadline_s=60, stdin="\n") as other:
        assert other.line() == "open"
        with pytest.raises(CacheError, match=re.escape(str(tmp_path))):
            open_shard(tmp_path, replace=True)
        open_shard(tmp_path, owner=2).close()
        assert other.wait().status == 0
    open_shard(tmp_path).close()


def test_a_forked_process_keeps_nothing_locked(tmp_path: Path) -> None:
    shard = open_shard(tmp_path)
    assert shard._lock is not None
    inherited = os.dup(shard._lock)
    shard.close()
    open_shard(tmp_path).close()
    os.close(inherited)


_STEP = st.one_of(st.integers(0, 5), st.sampled_from(["flush", "reopen"]))


@settings(deadline=None, max_examples=40)
@given(st.lists(_STEP, max_size=12), st.integers(0, 12), st.sampled_from([1, 30, 100, 1000]))
def test_any_order_of_appends_flushes_and_reopening(steps: list[int | str], num_rows: int, file_bytes: int) -> None:
    num_done = num_flushed = 0
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "FILE_BYTES", file_bytes)
        shard = open_shard(Path(folder), num_rows)
        for step in steps:
            if step == "flush":
                shard.flush()
                num_flushed = num_done
            elif step == "reopen":
                shard.close()
                shard = open_shard(Path(folder), num_rows)
                num_done = num_flushed
            elif isinstance(step, int) and num_done + step <= num_rows:
                shard.append(rows(num_done, step))
                num_done += step
            check_rows(shard, num_done)
        assert shard.complete == (num_done == num_rows)
        shard.close()


def test_values_are_those_of_the_helper() -> None:
    assert [tensor.shape[1:] for tensor in rows(0, 2)] == [shape for shape, _ in VALUES]
