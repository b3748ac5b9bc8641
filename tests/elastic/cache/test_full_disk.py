"""A full disk is an error before the first row, and never the end of the process: pretended, and a small one really."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import CacheError
from tests.elastic.cache.shards import check_rows, open_shard, rows
from tests.processes import Running


def test_a_disk_that_is_full_at_the_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve, calls = os.posix_fallocate, []

    def full(descriptor: int, start: int, num_bytes: int) -> None:
        calls.append(num_bytes)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        CacheError,
        match=r"the cache needs 384 B, but the disk of .*shard-1 has .*B left \(No space left on device\); free space, "
        r"or give another folder, or store floats as bfloat16$",
    ):
        open_shard(tmp_path)
    assert list(tmp_path.iterdir()) == [], "it keeps the room that is missing"


def test_a_disk_that_reserves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refused)
    with open_shard(tmp_path) as shard:
        shard.append(rows(0, 4))
        shard.flush()
    with open_shard(tmp_path) as shard:
        check_rows(shard, 4)


def test_a_write_that_fails_counts_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def short(descriptor: int, data: memoryview, start: int) -> int:
        return real(descriptor, data[:5], start)

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_shard(tmp_path) as shard:
        shard.append(rows(0, 2))
        monkeypatch.setattr(os, "pwrite", failing)
        with pytest.raises(CacheError, match=r"Input/output error"):
            shard.append(rows(2, 2))
        check_rows(shard, 2)
        monkeypatch.setattr(os, "pwrite", short)  # less than asked for at once
        shard.append(rows(2, 6))
        check_rows(shard, 8)


_SMALL_DISK = """
import subprocess, sys
from pathlib import Path
import torch
from penstock.elastic.cache.shard import Shard
from penstock.errors import CacheError

place = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=True)

def open_shard(num_rows):
    values = [((1024,), torch.float32)]
    return Shard.create_or_resume(
        place / "cache", key="k", owner=0, num_rows=num_rows, values=values, stored=None, limit_bytes=None
    )

for disk_says in (True, False):
    if not disk_says:
        import shutil
        real = shutil.disk_usage
        shutil.disk_usage = lambda path: real(path)._replace(free=2**40)
    try:
        open_shard(300)
    except CacheError as error:
        print(error)
    assert not list(place.rglob("shard*"))

with open_shard(200) as shard:
    filler = (place / "filler").open("wb", buffering=0)
    try:
        while True:
            filler.write(bytes(4096))
    except OSError as full:
        print(full.strerror)
    while not shard.complete:
        shard.append([torch.full((10, 1024), float(shard.num_done))])
    try:
        shard.flush()
    except CacheError as error:
        print(error)
    filler.close()
    (place / "filler").unlink()
    shard.flush()
with open_shard(200) as shard:
    assert shard.complete
    assert torch.equal(shard.read(range(200))[0][:, 5], torch.arange(0.0, 200, 10).repeat_interleave(10))
    (place / "filler").write_bytes(bytes(1))
    shard.delete()
print(sorted(path.name for path in place.iterdir()))
"""


@pytest.mark.root
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("mounting needs root and unshare")
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system lets root have no mounts of its own")
    with Running(["unshare", "-m", sys.executable, "-c", _SMALL_DISK, str(tmp_path)], deadline_s=120) as running:
        found = running.wait()
    assert found.status == 0, found.stderr
    said, really, full, no_manifest, left = found.stdout.splitlines()
    assert said.startswith("the cache needs 1.23 MB, but the disk of ")
    assert "has 1.04 MB left (No space left on device); " in said
    assert really.startswith("the cache needs 1.23 MB, but the disk of ")
    assert full == "No space left on device"
    assert "is not (No space left on device); " in no_manifest
    assert left == "['cache', 'filler']"
    assert list(tmp_path.iterdir()) == [], "the mount was the process's own"
