"""A full disk is an error before the first row, and never the end of the process: pretended, and a small one really."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import CacheError
from tests.disks import Disk
from tests.elastic.cache.shards import check_rows, fill_shard
from tests.processes import PROGRAMS, Running


def test_a_disk_that_is_full(tmp_path: Path, disk: Disk) -> None:
    disk.fail("posix_fallocate", errno.ENOSPC)
    with pytest.raises(
        CacheError,
        match=r"the cache needs 256 B, but the disk of .*shard-1.rows has .*B left \(No space left on device\); free "
        r"space, or choose another folder, or store floats as bfloat16$",
    ):
        fill_shard(tmp_path / "cache")
    assert list(tmp_path.iterdir()) == [], "it keeps the room that is missing"


def test_a_disk_that_reserves_nothing(tmp_path: Path, disk: Disk) -> None:
    disk.fail("posix_fallocate", errno.EOPNOTSUPP)
    with fill_shard(tmp_path) as shard:
        check_rows(shard)


def test_a_write_that_fails_or_is_short(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def short(descriptor: int, data: memoryview, start: int) -> int:
        return real(descriptor, data[:5], start)

    disk.fail("pwrite", errno.EIO)
    with pytest.raises(CacheError, match=r"cannot be written \(Input/output error\)"):
        fill_shard(tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "pwrite", short)  # less than asked for at once
    with fill_shard(tmp_path) as shard:
        check_rows(shard)


@pytest.mark.root
def test_real_full_disk_is_reported(tmp_path: Path) -> None:
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("mounting needs root and unshare")
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system lets root have no mounts of its own")
    command = ["unshare", "-m", sys.executable, str(PROGRAMS / "small_disk.py"), str(tmp_path)]
    with Running(command, deadline_s=120) as running:
        found = running.wait()
    assert found.status == 0, found.stderr
    said, really, *later, left = found.stdout.splitlines()
    assert said.startswith("the cache needs 1.23 MB, but the disk of ")
    assert "has 1.05 MB left (No space left on device); " in said
    assert really.startswith("the cache needs 1.23 MB, but the disk of ")
    assert later == ["No space left on device"]  # the space was reserved, so writing did not need any
    assert left == "[]"
    assert list(tmp_path.iterdir()) == [], "the mount was the process's own"
