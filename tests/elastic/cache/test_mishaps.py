"""Folders that are not a cache's own, and files that are damaged or lost: one line each, and others' files stay."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.elastic.cache.shard import Shard
from penstock.errors import CacheError, UsageError
from tests.elastic.cache.shards import check_rows, open_shard, rows


def fill(folder: Path, count: int = 5) -> None:
    with open_shard(folder) as shard:
        shard.append(rows(0, count))
        shard.flush()


def test_another_cache_is_refused_and_replaced_when_asked(tmp_path: Path) -> None:
    fill(tmp_path)
    with pytest.raises(UsageError) as refused:
        open_shard(tmp_path, key="other")
    assert str(refused.value) == (
        f"{tmp_path}/shard-1 holds a cache of another model or data: 8 rows of float32[3, 2] int64[] of owner 1 with "
        "the key k, not 8 rows of float32[3, 2] int64[] of owner 1 with the key other; give another folder, "
        "remove it, or replace it"
    )
    with open_shard(tmp_path) as shard:
        check_rows(shard, 5)
    (tmp_path / "shard-1" / "notes").touch()
    with open_shard(tmp_path, key="other", replace=True) as shard:
        check_rows(shard, 0)
    with open_shard(tmp_path, 2, key="other", replace=True) as shard:  # other rows of the same data
        shard.append(rows(0, 2))
    assert sorted(path.name for path in (tmp_path / "shard-1").iterdir()) == ["0.rows", "manifest.json", "notes"]


def test_replacing_keeps_what_fits(tmp_path: Path) -> None:
    fill(tmp_path)
    with open_shard(tmp_path, replace=True) as shard:
        check_rows(shard, 5)


def test_owners_do_not_meet(tmp_path: Path) -> None:
    fill(tmp_path)
    with open_shard(tmp_path, owner=0, key="other") as shard:
        check_rows(shard, 0)
        shard.delete()
    with open_shard(tmp_path) as shard:
        check_rows(shard, 5)
    with pytest.raises(CacheError, match=r"at least 0; got -1;"):
        open_shard(tmp_path, owner=-1)


def test_deletion_leaves_what_it_did_not_make(tmp_path: Path) -> None:
    fill(tmp_path)
    place = tmp_path / "shard-1"
    kept = [place / "notes.txt", place / "99.rows", place / "01.rows", tmp_path / "other"]
    for path in kept:
        path.write_text("mine")
    with open_shard(tmp_path) as shard:
        shard.delete()
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
    with pytest.raises(CacheError, match=r"99\.rows is in the way: .*manifest\.json"):
        open_shard(tmp_path)


def test_deletion_of_a_folder_that_is_not_its_own_any_more(tmp_path: Path) -> None:
    with open_shard(tmp_path) as shard:
        manifest = tmp_path / "shard-1" / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"k"', '"other"'))
        with pytest.raises(CacheError, match=r"shard-1 .*remove it by hand"):
            shard.delete()
    assert (tmp_path / "shard-1" / "0.rows").exists()


@pytest.mark.parametrize("place", ["cache", "cache/shard-1"])
def test_a_file_in_place_of_the_folder(tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("mine")
    with pytest.raises(CacheError, match=r"shard-1 .*\((Not a dir|File exists)"):
        open_shard(tmp_path / "cache")
    with pytest.raises(CacheError, match="holds no cache"):
        Shard.open_existing(tmp_path / "cache", "k", 1)
    assert (tmp_path / place).read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must be JSON"),
        ("{}", "is not valid"),
        ('{"format": "another"}', "is not valid"),
        (None, "cannot be read from"),
        ({"done": 9}, "9 of 8 rows are done"),
        ({"version": 2}, "is not valid at version"),
        ({"rows_per_file": 0}, "is not valid at rows_per_file"),
        ({"values": [{"shape": [], "dtype": "x\n", "stored": "int64"}]}, r"it has the dtype 'x\\n'"),
        ({"values": [{"shape": [-1], "dtype": "int64", "stored": "int64"}]}, "is not valid"),
    ],
)
def test_a_damaged_manifest(tmp_path: Path, text: str | dict[str, object] | None, reason: str) -> None:
    fill(tmp_path)
    manifest = tmp_path / "shard-1" / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.unlink()
    if text is None:
        manifest.mkdir()
    else:
        manifest.write_text(json.dumps(content | text) if isinstance(text, dict) else text)
    for replace in (False, True):  # nobody knows whose it is
        with pytest.raises(CacheError, match=reason) as refused:
            open_shard(tmp_path, replace=replace)
        assert "\n" not in str(refused.value)
    assert (tmp_path / "shard-1" / "0.rows").exists()


@pytest.mark.parametrize("change", ["short", "gone"])
def test_a_damaged_file(tmp_path: Path, change: str) -> None:
    fill(tmp_path, 8)
    path = tmp_path / "shard-1" / "1.rows"
    if change == "short":
        os.truncate(path, 100)
    else:
        path.unlink()
    reason = "expected 152 bytes, got 100" if change == "short" else "No such file or directory"
    acts: list[Callable[[], Shard]] = [lambda: open_shard(tmp_path), lambda: Shard.open_existing(tmp_path, "k", 1)]
    for act in acts:
        with pytest.raises(CacheError, match=rf"1\.rows is damaged: {reason}; .*shard-1"):
            act()


def test_a_file_that_is_lost_meanwhile(tmp_path: Path) -> None:
    with open_shard(tmp_path) as shard:
        shard.append(rows(0, 3))
        for path in (tmp_path / "shard-1").glob("*.rows"):
            path.unlink()
        with pytest.raises(CacheError, match=r"/1\.rows .*\(No such file or directory\)"):
            shard.append(rows(3, 3))
        with pytest.raises(CacheError, match=r"0\.rows is damaged: No such file or directory"):
            shard.read([0])
        with pytest.raises(CacheError, match=r"0\.rows is not \(No such file or directory\)"):
            shard.flush()
        assert shard.num_done == 3


def test_links_are_not_followed(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "shard-1" / "1.rows").unlink()
    (tmp_path / "shard-1" / "1.rows").symlink_to(tmp_path / "mine")
    with pytest.raises(CacheError, match=r"1\.rows .*\(Too many levels"):
        open_shard(tmp_path)
    assert (tmp_path / "mine").read_text() == "mine"
