"""A server on the hosts of a lab with 0.35 of a core each, and clients in the first host's network beside its share."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.labs import lab_text
from penstock.cluster.lab import Lab, lab_session, network, read_lab
from penstock.cluster.lab.machine import this_machine
from penstock.group.launcher import module_path

_CPU = 0.35
_PORT = 8000


@contextmanager
def served(
    model: str, hosts: int, folder: Path, *words: object, on_loss: str = "stop"
) -> Iterator[tuple[Lab, list[str]]]:
    """Serve a model with one stage per host; yields the lab, and what begins a command that reaches the server."""
    file = folder / f"{hosts}.toml"
    file.write_text(lab_text("serving", [_CPU] * hosts, memory="4 GiB"))
    with lab_session(read_lab(file)) as lab:
        own = ["serve", model, "--open", "--port", _PORT, "--stages", hosts, "--set=deadline=3600"]
        own += ["--on-loss", on_loss]
        command = [sys.executable, "-m", "penstock", *map(str, (*own, *words))]
        env = {"PENSTOCK_TRUSTED": "1", "PYTHONPATH": module_path()}
        with lab.start(command, env=env, end_together="first" if on_loss == "continue" else True):
            within = _within(lab)
            _wait(within)
            yield lab, within


def ask(within: Sequence[str], bodies: Sequence[dict[str, Any]], clients: int) -> dict[str, Any]:
    """Ask with so many clients; returns the seconds of all, and each answer with the moments of its tokens."""
    command = [*within, sys.executable, "-m", "benchmarks.serving.load", f"http://127.0.0.1:{_PORT}"]
    command += ["--clients", str(clients)]
    text = "".join(json.dumps(body) + "\n" for body in bodies)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def cpu_s(lab: Lab) -> list[float]:
    """Return the seconds of CPU that each host's processes have used since they started."""
    cgroups = this_machine().cgroups
    processes = [cgroups.processes(lab.spec.name, host.name) for host in lab.spec.hosts]
    return [sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in own) for own in processes]


def _within(lab: Lab) -> list[str]:
    return ["ip", "netns", "exec", network.host_namespace(lab.spec.name, lab.spec.hosts[0].name)]


def _wait(within: list[str]) -> None:
    look = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{_PORT}/health', timeout=5)"
    until = time.monotonic() + 600
    while subprocess.run([*within, sys.executable, "-c", look], capture_output=True, check=False).returncode:
        if time.monotonic() > until:
            raise RuntimeError("the server in the lab does not answer")
        time.sleep(1)
