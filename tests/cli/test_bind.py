"""Where the processes of a verb listen: nowhere on one machine, or on the address that was chosen alone."""

import contextlib
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import SMALL
from tests.fewer import long
from tests.processes import Running, free_port
from tests.recipes.test_fit import VIT

Run = Callable[..., tuple[int, str, str]]


def listening(running: Running) -> dict[int, set[str]]:
    """The addresses that each process of a command listens on."""
    found: dict[int, set[str]] = {}
    for pid in [running.pid, *(child.pid for child in running.children())]:
        with contextlib.suppress(psutil.Error):
            places = psutil.Process(pid).net_connections("tcp")
            found[pid] = {place.laddr.ip for place in places if place.status == psutil.CONN_LISTEN}
    return found


def addresses_while(running: Running, num_processes: int) -> set[str]:
    """Collect every address that is listened on until the command ends, by so many processes at least."""
    seen: set[str] = set()
    listeners: set[int] = set()
    while not running.has_ended():
        now = listening(running)
        listeners |= {pid for pid, addresses in now.items() if addresses}
        seen.update(*now.values())
        time.sleep(0.1)  # a port stays open for seconds, and to look takes the processor from those that are looked at
    assert len(listeners) >= num_processes
    done = running.wait()
    assert done.status == 0, done.stderr
    return seen


def start(arguments: Collection[object], env: dict[str, str] | None = None) -> Running:
    return Running([sys.executable, "-m", "penstock", *map(str, arguments)], deadline_s=120.0, env=env)


def bound(verb: str, address: str) -> list[str]:
    return ["--bind", address] if verb == "train" else ["--set", f"bind={address}"]


@pytest.mark.parametrize(("bind", "address"), [long((), "127.0.0.1"), (("--set", "bind=127.0.0.2"), "127.0.0.2")])
def test_one_process_under_torchrun(bind: tuple[str, ...], address: str, photos: Path, tmp_path: Path) -> None:
    port = str(free_port())
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with start(["infer", SMALL, "--images", photos, "-o", tmp_path / "out.csv", *bind], env) as running:
        assert addresses_while(running, 1) == {address}


@pytest.mark.parametrize(("verb", "bind"), [("infer", ()), ("train", ("--bind", "127.0.0.2")), long("train", ())])
def test_several_processes_of_one_machine(verb: str, bind: tuple[str, ...], tmp_path: Path) -> None:
    arguments: dict[str, list[object]] = {
        "infer": [SMALL.replace("=4", "=10"), "--images", "digits", "--num-images", 300, "-o", tmp_path / "out.csv"],
        "train": [VIT, "--data", "digits", "--set", "num_rows=400", "--steps", 10, "-o", tmp_path / "run"],
    }
    with start([verb, *arguments[verb], "--stages", 2, *bind]) as running:
        assert addresses_while(running, 2 if bind else 0) == set(bind[1:])


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("192.0.2.1", "got '192.0.2.1' (Cannot assign"),
        ("0.0.0.0", "means all addresses of this"),
        ("no such name", "got 'no "),
    ],
)
@pytest.mark.parametrize("verb", ["infer", "bench", "train"])
def test_invalid_bind_address_is_refused(verb: str, address: str, said: str, penstock: Run) -> None:
    data = {"infer": ["--images", "digits"], "bench": [], "train": ["--data", "digits"]}[verb]
    status, _, err = penstock(verb, VIT, *data, *bound(verb, address))
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("error: bind must be")
    assert said in err


@pytest.mark.parametrize("verb", ["infer", "bench", "train"])
def test_bind_is_refused_for_labs(verb: str, penstock: Run) -> None:
    data = {"infer": ["--images", "digits"], "bench": [], "train": ["--data", "digits"]}[verb]
    status, _, err = penstock(verb, VIT, *data, *bound(verb, "127.0.0.1"), "--cluster", "lab.toml")
    assert (status, err.count("\n")) == (2, 1)
    assert "a lab's hosts have their own" in err
