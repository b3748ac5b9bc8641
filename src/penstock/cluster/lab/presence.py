"""Detection of a lab on this machine, and its removal from any state.

A lab's file under `/run/penstock` is written last and removed first: if it exists, the lab is complete.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from penstock.cluster.lab.machine import Machine
from penstock.cluster.lab.network import delete_command, host_namespace, lab_namespaces, switch_namespace
from penstock.cluster.lab.spec import LabSpec
from penstock.errors import PenstockError

State = Literal["up", "partial", "down"]


def find_state(spec: LabSpec, machine: Machine) -> State:
    """Return the state of a lab: up, partial or down."""
    name = spec.name
    namespaces = set(lab_namespaces(name, machine.shell))
    needed = {switch_namespace(name), *(host_namespace(name, host.name) for host in spec.hosts)}
    whole = namespaces == needed and all(machine.cgroups.directories(name, host.name) for host in spec.hosts)
    if whole and remembered(name, machine) == spec:
        return "up"
    traces = namespaces or machine.cgroups.directories(name) or _host_files(name, machine)
    return "partial" if traces or _file(name, machine).exists() else "down"


def remember(spec: LabSpec, machine: Machine) -> None:
    """Record that a lab is complete."""
    file = _file(spec.name, machine)
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(spec))
    new.replace(file)


def remembered(name: str, machine: Machine) -> LabSpec | None:
    """Return the spec of a completed lab; None if there is none, or if its file is damaged."""
    try:
        return msgspec.json.decode(_file(name, machine).read_bytes(), type=LabSpec)
    except (OSError, msgspec.MsgspecError, PenstockError):
        return None


def remembered_names(machine: Machine) -> list[str]:
    """Return the names of completed labs."""
    return sorted(file.stem for file in machine.run_directory.glob("*.json"))


def remove(name: str, machine: Machine) -> None:
    """Remove all resources of a lab; no error if none exist.

    If a resource cannot be removed, raises the first `RunError` after trying all the others.
    """
    failures: list[PenstockError] = []

    @contextlib.contextmanager
    def attempt() -> Iterator[None]:
        try:
            yield
        except PenstockError as error:
            failures.append(error)

    _file(name, machine).unlink(missing_ok=True)
    _file(name, machine).with_suffix(".new").unlink(missing_ok=True)
    with attempt():
        machine.cgroups.kill(name)
    for namespace in lab_namespaces(name, machine.shell):
        with attempt():
            machine.shell.run(delete_command(namespace))
    for directory in _host_files(name, machine):
        shutil.rmtree(directory, ignore_errors=True)
    # remove their directory too if it is now empty
    with contextlib.suppress(OSError):
        machine.netns_directory.rmdir()
    with attempt():
        machine.cgroups.remove(name)
    if failures:
        raise failures[0]


def _file(name: str, machine: Machine) -> Path:
    return machine.run_directory / f"{name}.json"


def _host_files(name: str, machine: Machine) -> list[Path]:
    return list(machine.netns_directory.glob(host_namespace(name, "*")))
