"""A process that dies at any moment leaves a shard that goes on at its last flush."""

import os
import signal
import sys
from pathlib import Path

import pytest

from penstock.elastic.cache.shard import Shard
from tests.elastic.cache.shards import check_rows, open_shard, rows
from tests.processes import Running, run_python

_APPEND = """
import sys
from pathlib import Path
from penstock.elastic.cache import layout
from tests.elastic.cache.shards import SMALL_FILE, open_shard, rows

layout.FILE_BYTES = SMALL_FILE
with open_shard(Path(sys.argv[1])) as shard:
    shard.append(rows(0, 3))
    shard.flush()
    shard.append([tensor + 1 for tensor in rows(3, 3)])
    print("appended", flush=True)
    input()
"""


def test_killed_between_an_append_and_its_flush(tmp_path: Path) -> None:
    with Running([sys.executable, "-c", _APPEND, str(tmp_path)], deadline_s=60) as running:
        assert running.line() == "appended"
        running.kill()
        assert running.wait().status == -signal.SIGKILL
    with open_shard(tmp_path) as shard:
        check_rows(shard, 3)
        shard.append(rows(3, 5))
        shard.flush()
    with Shard.open_existing(tmp_path, "k", 1) as shard:
        check_rows(shard, 8)


# counts what is done to files, and dies before one of these steps: one process that has imported everything
# forks one for each of them, until one comes to its end
_EVERY_STEP = """
import os, signal, sys
from pathlib import Path
from penstock.elastic.cache import layout
from tests.elastic.cache.shards import SMALL_FILE, open_shard, rows

layout.FILE_BYTES = SMALL_FILE
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
        exec(FILL)
        os._exit(0)
    os.close(out)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), (last_step, status)
    if not status:
        print(last_step)
        break
"""

_FILL = """
with open_shard(Path(folder)) as shard:
    print("begun", shard.num_done, flush=True)
    while not shard.complete:
        shard.append(rows(shard.num_done, min(3, 8 - shard.num_done)))
        shard.flush()
        print("flushed", shard.num_done, flush=True)
    shard.delete()
"""


def test_killed_before_any_step_on_files(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    code = f"FILL = {_FILL!r}\n" + _EVERY_STEP
    found = run_python("-c", code, str(place), deadline_s=120)
    assert found.status == 0, found.stderr
    num_steps = int(found.stdout)
    assert num_steps > 40
    for step in range(num_steps):
        said = (tmp_path / f"run-{step}").read_text().split()
        promised = int(said[-1]) if said else 0
        with open_shard(place / str(step)) as shard:
            # a deletion that was begun leaves an empty shard; the last flush may be done and not said
            deleted = promised == 8 and shard.num_done == 0
            assert deleted or promised <= shard.num_done <= promised + 3, f"step {step}"
            check_rows(shard, shard.num_done)
            shard.append(rows(shard.num_done, 8 - shard.num_done))
            shard.flush()
        with Shard.open_existing(place / str(step), "k", 1) as shard:
            check_rows(shard, 8)
        names = sorted(path.name for path in (place / str(step) / "shard-1").iterdir())
        assert names == ["0.rows", "1.rows", "2.rows", "manifest.json"], f"step {step}"


def test_rows_are_on_the_disk_before_they_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = []
    with open_shard(tmp_path) as shard:
        shard.append(rows(0, 2))
        shard.flush()
        monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.readlink(f"/proc/self/fd/{file}")))
        shard.append(rows(2, 2))
        assert flushed == []
        shard.flush()
        shard.flush()
    names = [Path(path).name for path in flushed]
    assert names[:2] == ["0.rows", "1.rows"]
    assert names[2].startswith(".manifest.json.")
    assert names[3:] == ["shard-1"]
