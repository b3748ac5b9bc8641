"""Streams whose processes prove a key: the same results, the same survival, and nobody without the key."""

import json
import tempfile
import time
from pathlib import Path

import pytest

from penstock.transport.curve import write_key
from tests.processes import free_port, run_groups, run_python

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from penstock.deploy import worker
from penstock.group import entry
from penstock.runtime.eager import Runtime
from penstock.errors import PenstockError
from penstock.pipeline import Pipeline
from tests.worlds import tower, tower_inputs

folder, case, port = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
rank = int(os.environ["RANK"])
# as penstock hosts run starts them: no agents, and a key in a file
del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
os.environ["MASTER_PORT"] = port
key = "other" if case == "stranger" and rank == 2 else "run"
os.environ["PENSTOCK_KEY"] = str(folder / f"{key}.key")
torch.set_num_threads(1)
calls, run = [], Runtime.__call__


def held(*given):
    calls.append(0)
    if rank == 1 and case == "lost" and len(calls) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and case == "busy" and len(calls) == 5:
        import ctypes
        ctypes.PyDLL(None).usleep(7_500_000)  # as a C extension that keeps the interpreter's lock
    return run(*given)


Runtime.__call__ = held


def tell(**what):
    (folder / f"{case}-{rank}.json").write_text(json.dumps(what))


if case == "stranger" and rank < 2:
    if not rank:  # the run that a process with another key would be part of
        store = entry.links_of_run("127.0.0.1").serve_store("127.0.0.1", int(port))
        while not (folder / f"{case}-2.json").exists():
            time.sleep(0.05)
        store.close()
    os._exit(0)
try:
    world = entry.join_torchrun(followed=True, again=True)
    if rank:
        tell(message=worker.follow(world))
    else:
        model, inputs = tower(), tower_inputs(60)
        with world:
            with Pipeline(model, inputs[0], stages=3, world=world, threads=1, on_loss="continue") as pipe:
                outputs = list(pipe.stream(inputs))
            world.last_word = "fine"
        with torch.no_grad():
            equal = all(torch.equal(one, model(*two)) for one, two in zip(outputs, inputs, strict=True))
        tell(equal=equal, changes=[change.why for change in pipe.changes], transport=type(world.transport).__name__)
except PenstockError as error:
    tell(kind=type(error).__name__, message=str(error))
"""


def test_streams_behind_a_key(tmp_path: Path) -> None:
    for name in ("run", "other"):
        write_key(tmp_path / f"{name}.key")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cases = ["fine", "lost", "busy", "stranger"]
    run_groups(script, [(3, [str(tmp_path), case, str(free_port())]) for case in cases], 120.0)
    told = {
        (case, rank): json.loads(path.read_text())
        for case in cases for rank in range(3) if (path := tmp_path / f"{case}-{rank}.json").exists()
    }  # fmt: skip
    for case in ("fine", "busy"):
        assert told[case, 0] == {"equal": True, "changes": [], "transport": "ZmqTransport"}, told
        assert told[case, 1] == told[case, 2] == {"message": "fine"}
    # the same survival as without a key
    assert told["lost", 0]["equal"]
    first, *others = told["lost", 0]["changes"]
    assert "is lost" in first
    assert set(others) <= {"a device has joined"}  # on a busy machine one that answers late
    assert told["lost", 2] == {"message": "fine"}
    # who has another key gets nowhere, and is told why
    assert "does not prove this run's key" in told["stranger", 2]["message"]


OWN = """
import glob, os, signal, stat, sys, tempfile
from pathlib import Path
import psutil, torch
from penstock.pipeline import Pipeline
from tests.worlds import tower, tower_inputs

model, inputs = tower(), tower_inputs(30)
torch.set_num_threads(1)
with Pipeline(model, inputs[0], stages=2, threads=1) as pipe:
    outputs = list(pipe.stream(inputs))
    processes = [psutil.Process(), *psutil.Process().children()]
    assert len(processes) == 3
    listening = [c for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert not listening, listening
    (folder,) = Path(tempfile.gettempdir()).glob("penstock-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    if sys.argv[1:] == ["killed"]:
        os.kill(os.getpid(), signal.SIGKILL)
assert not folder.exists()
with torch.no_grad():
    assert all(torch.equal(one, model(*two)) for one, two in zip(outputs, inputs, strict=True))
"""


@pytest.mark.fresh
def test_workers_of_this_machine_open_no_port() -> None:
    """Other accounts reach loopback too, and a folder of mode 0700 not; the last to go removes it."""
    with tempfile.TemporaryDirectory() as ended, tempfile.TemporaryDirectory() as killed:  # paths that are short enough
        places = {"ended": Path(ended), "killed": Path(killed)}
        run_and_look(places)


def run_and_look(places: dict[str, Path]) -> None:
    for case, place in places.items():
        done = run_python("-c", OWN, case, deadline_s=60.0, env={"TMPDIR": str(place)})
        assert done.status == (-9 if case == "killed" else 0), done.stderr
    deadline = time.monotonic() + 20.0
    while any(list(place.glob("penstock-*")) for place in places.values()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [path for place in places.values() for path in place.glob("penstock-*")]


LOCAL = """
import torch
from penstock.pipeline import Pipeline
from tests.worlds import tower, tower_inputs

model, inputs = tower(), tower_inputs(30)
torch.set_num_threads(1)
with Pipeline(model, inputs[0], stages=2, threads=1) as pipe:
    world = pipe._streaming.world
    assert world.secured
    outputs = list(pipe.stream(inputs))
with torch.no_grad():
    assert all(torch.equal(one, model(*two)) for one, two in zip(outputs, inputs, strict=True))
"""


def test_workers_of_this_machine_behind_a_key(tmp_path: Path) -> None:
    """A machine that others use too: loopback is theirs as well, and a key's file is not."""
    write_key(tmp_path / "key")
    done = run_python("-c", LOCAL, deadline_s=60.0, env={"PENSTOCK_KEY": str(tmp_path / "key")})
    assert done.status == 0, done.stderr
    (tmp_path / "key").chmod(0o644)
    done = run_python("-c", LOCAL, deadline_s=60.0, env={"PENSTOCK_KEY": str(tmp_path / "key")})
    assert "other users may read" in done.stderr
