"""Fills caches on a disk of 1 MB that it mounts, and prints what goes wrong and what is left."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.elastic.shard import Shard, ShardFile, ShardLayout, make_columns
from penstock.errors import CacheError

place = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=True)


def layout(num_rows: int) -> ShardLayout:
    return ShardLayout(owner=0, num_rows=num_rows, columns=make_columns([((1024,), torch.float32)], None))


def fill(num_rows: int, full: Callable[[], None] = lambda: None) -> Shard:
    with ShardFile(place / "cache", layout(num_rows), None) as file:
        full()
        for first in range(0, num_rows, 10):
            file.append([torch.full((10, 1024), float(first))])
        return file.shard()


def use_up() -> None:
    filler = (place / "filler").open("wb", buffering=0)
    try:
        while True:
            filler.write(bytes(4096))
    except OSError as full:
        print(full.strerror)


real = shutil.disk_usage
for disk_says in (True, False):
    if not disk_says:
        shutil.disk_usage = lambda path: real(path)._replace(free=2**40)
    try:
        fill(300)
    except CacheError as error:
        print(error)
    assert not list(place.rglob("shard*"))

try:
    fill(200, use_up)
except CacheError as error:
    print(error)
(place / "filler").unlink()
with fill(200) as shard:
    assert torch.equal(shard.read(range(200))[0][:, 5], torch.arange(0.0, 200, 10).repeat_interleave(10))
print(sorted(path.name for path in place.iterdir()))
