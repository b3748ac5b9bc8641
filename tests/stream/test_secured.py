"""Streams whose processes prove a key: the same results, the same survival, and nobody without the key."""

import json
import tempfile
import time
from pathlib import Path

import pytest

from penstock.transport.curve import write_key
from tests.processes import PROGRAMS, free_port, run_groups, run_python


def test_streams_behind_a_key(tmp_path: Path) -> None:
    for name in ("run", "other"):
        write_key(tmp_path / f"{name}.key")
    script = PROGRAMS / "secured_stream.py"
    cases = ["fine", "lost", "busy", "stranger"]
    run_groups(script, [(3, [str(tmp_path), case, str(free_port())]) for case in cases], 120.0)
    told = {
        (case, rank): json.loads(path.read_text())
        for case in cases
        for rank in range(3)
        if (path := tmp_path / f"{case}-{rank}.json").exists()
    }
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


@pytest.mark.fresh
def test_workers_of_this_machine_open_no_port() -> None:
    """Other accounts reach loopback too, and a folder of mode 0700 not; the last to go removes it."""
    with tempfile.TemporaryDirectory() as ended, tempfile.TemporaryDirectory() as killed:  # paths that are short enough
        places = {"ended": Path(ended), "killed": Path(killed)}
        run_and_look(places)


def run_and_look(places: dict[str, Path]) -> None:
    for case, place in places.items():
        done = run_python(str(PROGRAMS / "private_workers.py"), case, deadline_s=60.0, env={"TMPDIR": str(place)})
        assert done.status == (-9 if case == "killed" else 0), done.stderr
    deadline = time.monotonic() + 20.0
    while any(list(place.glob("penstock-*")) for place in places.values()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [path for place in places.values() for path in place.glob("penstock-*")]


def test_workers_of_this_machine_behind_a_key(tmp_path: Path) -> None:
    """A machine that others use too: loopback is theirs as well, and a key's file is not."""
    script = str(PROGRAMS / "secured_workers.py")
    write_key(tmp_path / "key")
    done = run_python(script, deadline_s=60.0, env={"PENSTOCK_KEY": str(tmp_path / "key")})
    assert done.status == 0, done.stderr
    (tmp_path / "key").chmod(0o644)
    done = run_python(script, deadline_s=60.0, env={"PENSTOCK_KEY": str(tmp_path / "key")})
    assert "other users may read" in done.stderr
