"""A process that dies at any moment leaves a shard that is whole, or none."""

import contextlib
import os
from pathlib import Path

import pytest

from penstock.elastic.cache.shard import Shard
from penstock.errors import CacheError
from tests.elastic.cache.shards import check_rows, fill_shard, layout_of
from tests.processes import run_python

# counts what is done to files, and dies before one of these steps: one process that has imported everything
# forks one for each of them, until one comes to its end
_EVERY_STEP = """
import os, signal, sys
from pathlib import Path
from tests.elastic.cache.shards import fill_shard

folder, last_step, num_steps = sys.argv[1], -1, 0
first_folder = folder

def step():
    global num_steps
    num_steps += 1
    if num_steps > last_step:
        os.kill(os.getpid(), signal.SIGKILL)

def audit(event, arguments):
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and folder in str(arguments[0]):
        step()

def counted(real):
    def call(*arguments):
        step()
        return real(*arguments)
    return call

sys.addaudithook(audit)
os.pwrite, os.fsync, os.posix_fallocate = counted(os.pwrite), counted(os.fsync), counted(os.posix_fallocate)

while True:
    last_step += 1
    num_steps = 0
    folder = f"{first_folder}/{last_step}"
    out = os.open(f"{first_folder}-{last_step}", os.O_WRONLY | os.O_CREAT)
    pid = os.fork()
    if not pid:
        os.dup2(out, 1)
        shard = fill_shard(Path(folder))
        print("filled", flush=True)
        shard.delete()
        print("deleted", flush=True)
        os._exit(0)
    os.close(out)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), (last_step, status)
    if not status:
        print(last_step)
        break
"""


def test_killed_before_any_step_on_files(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    found = run_python("-c", _EVERY_STEP, str(place), deadline_s=120)
    assert found.status == 0, found.stderr
    num_steps = int(found.stdout)
    assert num_steps > 15
    outcomes = set()
    for step in range(num_steps):
        said = (tmp_path / f"run-{step}").read_text().split()
        folder = place / str(step)
        whole = False
        with contextlib.suppress(CacheError), Shard.open(folder, layout_of()) as shard:
            check_rows(shard)
            whole = True
        outcomes.add((tuple(said), whole))
        assert not (said == ["filled", "deleted"] and whole)
        with fill_shard(folder) as shard:
            check_rows(shard)
    assert {((), False), (("filled",), True)} <= outcomes


def test_rows_are_on_the_disk_before_their_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(Path(os.readlink(f"/proc/self/fd/{file}")).name))
    fill_shard(tmp_path).close()
    assert [name.rpartition(".")[0] or name for name in flushed] == [
        ".shard-1.rows", tmp_path.name, ".shard-1.done", tmp_path.name,
    ]  # fmt: skip
