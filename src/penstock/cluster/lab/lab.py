"""A lab: an emulated cluster on this machine, which can be started, inspected, disturbed and stopped.

`down` needs no stored state: namespaces, files and cgroups are found by the lab's name. A single file under
`/run/penstock` has the spec of a running lab, so that its name is enough to use it.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from penstock.cluster.lab import network
from penstock.cluster.lab.machine import Machine, this_machine
from penstock.cluster.lab.network import delete_command, host_namespace, lab_namespaces, switch_namespace
from penstock.cluster.lab.processes import Target, check_root, choose_cores, ended_by_signals, root_folder
from penstock.cluster.lab.run import DRAIN_S, GRACE_S, LabRun
from penstock.cluster.lab.spec import LabSpec, check_bandwidth, check_cpu, check_fit, read_lab
from penstock.cluster.output import EndTogether, Output, print_line
from penstock.errors import ClusterError, PenstockError
from penstock.text import counted

DEFAULT_PORT = 29500


State = Literal["up", "partial", "down"]


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Resources and usage of one host; its share of a core and its bandwidth may have been changed by `slow`."""

    name: str
    address: str
    cpu: float
    bandwidth_bytes_per_s: float | None
    memory_bytes: int
    memory_used_bytes: int
    memory_peak_bytes: int
    num_processes: int
    cut: bool


class LabStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of a lab, with its hosts if it is up; `partial` remains after a crash, for `down` to clean up."""

    name: str
    state: State
    hosts: tuple[HostStatus, ...] = ()


class Lab:
    """An emulated cluster on this machine.

    lab = Lab.from_file("lab.toml")
    lab.up()
    with lab.start(["python", "train.py"]) as run:
        run.wait(timeout_s=600)
    lab.down()

    Raises `ClusterError` if this machine cannot run labs.
    """

    def __init__(self, spec: LabSpec, machine: Machine | None = None) -> None:
        self.spec = spec
        self._machine = machine or this_machine()

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "Lab":
        """Read a lab file; raises `ClusterError` if it is not valid."""
        return cls(read_lab(path))

    @classmethod
    def from_name(cls, name: str, machine: Machine | None = None) -> "Lab":
        """Return a running lab by its name; raises `ClusterError` if there is none."""
        machine = machine or this_machine()
        spec = remembered(name, machine)
        if spec is None:
            up = ", ".join(remembered_names(machine)) or "none"
            raise ClusterError(f"no lab {name!r} is up; use its file, or one of the labs that are up: {up}")
        return cls(spec, machine)

    def up(self) -> list[str]:
        """Start the lab unless it is up; return warnings, one line each.

        Raises `ClusterError` if the machine is too small, or another lab of this name is up. On any error, or on
        Ctrl-C, everything started is removed again.
        """
        machine, name = self._machine, self.spec.name
        warnings = check_fit(self.spec, machine.num_cores, machine.memory_bytes)
        for host in self.spec.hosts:
            check_root(host.name, host.arch, machine.shell)
        with machine.locked():
            state = find_state(self.spec, machine)
            if state == "up":
                return warnings
            other = remembered(name, machine)
            if other is not None and other != self.spec and find_state(other, machine) == "up":
                raise ClusterError(
                    f"another lab {name!r} is up, and names of labs must be unique; run penstock lab down {name} or "
                    "rename this one"
                )
            if state == "partial":
                remove(name, machine)
            try:
                self._build()
            except BaseException:
                # report the first error; `down` can be run again for the rest
                with contextlib.suppress(PenstockError):
                    remove(name, machine)
                raise
        return warnings

    def down(self) -> None:
        """Stop the lab and all processes in it; no error if the lab is not up or only partly up."""
        take_down(self.spec.name, self._machine)

    def is_up(self) -> bool:
        """True if every part of the lab exists."""
        return find_state(self.spec, self._machine) == "up"

    def status(self) -> LabStatus:
        """Return the state of the lab and of each host."""
        state = find_state(self.spec, self._machine)
        if state != "up":
            return LabStatus(name=self.spec.name, state=state)
        cut = network.cut_hosts(self.spec, self._machine.shell)
        hosts = tuple(self._host_status(index, cut) for index in range(len(self.spec.hosts)))
        return LabStatus(name=self.spec.name, state="up", hosts=hosts)

    def start(
        self,
        command: Sequence[str],
        *,
        on: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        nproc_per_host: int = 1,
        port: int = DEFAULT_PORT,
        output: Output = print_line,
        end_together: EndTogether = True,
        grace_s: float = GRACE_S,
        drain_s: float = DRAIN_S,
    ) -> LabRun:
        """Start a command on every host, or on the hosts in `on`, with torchrun's environment.

        With `end_together`, all processes are ended when one fails: SIGTERM, then SIGKILL after `grace_s`. With "first"
        they are ended only when the process of the first host exits, with "first-failed" only when that process fails.
        Killed processes and their output have `drain_s` seconds to end.
        Raises `ClusterError` if the lab is not up, a host is unknown or still busy, or the command is empty.
        """
        if not command:
            raise ClusterError("a run needs a command; write it after --, as in -- python train.py")
        if nproc_per_host < 1:
            raise ClusterError(f"a host must run at least one process; got {nproc_per_host}; use --nproc-per-host 1")
        if not 1 <= port <= 65535:
            raise ClusterError(f"a port must be 1 to 65535; got {port}; use --port {DEFAULT_PORT}")
        self._require_up()
        targets = self._targets(on)
        for target in targets:
            self._require_idle(target.host)
        return LabRun(
            self._machine.cgroups,
            targets,
            command,
            env=env or {},
            nproc_per_host=nproc_per_host,
            port=port,
            output=output,
            end_together=end_together,
            grace_s=grace_s,
            drain_s=drain_s,
        )

    def cut(self, host: str) -> None:
        """Disconnect a host's network: packets to and from it are dropped silently.

        Raises `ClusterError` if the host is unknown or the lab is not up.
        """
        self._change(host, network.cut_command(self.spec, host))

    def restore(self, host: str) -> None:
        """Reconnect a host's network; raises the same errors as `cut`."""
        self._change(host, network.restore_command(self.spec, host))

    def slow(self, host: str, *, cpu: float | None = None, bandwidth_bytes_per_s: float | None = None) -> None:
        """Change a host's share of a core, or its link in both directions, while it runs.

        Raises the same errors as `cut`, and also for values that the kernel does not support.
        """
        if cpu is not None:
            check_cpu(host, cpu)
        if bandwidth_bytes_per_s is not None:
            check_bandwidth(host, bandwidth_bytes_per_s)
        self._require_host(host)
        if cpu is not None:
            self._machine.cgroups.set_cpu(self.spec.name, host, cpu)
        if bandwidth_bytes_per_s is not None:
            index = [each.name for each in self.spec.hosts].index(host)
            for command in network.bandwidth_commands(self.spec, index, bandwidth_bytes_per_s):
                self._machine.shell.run(command)

    def kill(self, host: str) -> int:
        """Kill every process of a host immediately, like a power failure; return the number of processes.

        Raises the same errors as `cut`.
        """
        self._require_host(host)
        num_processes = len(self._machine.cgroups.processes(self.spec.name, host))
        self._machine.cgroups.kill(self.spec.name, host)
        return num_processes

    def _build(self) -> None:
        machine, spec = self._machine, self.spec
        for host in spec.hosts:
            machine.cgroups.create(spec.name, host.name, host.cpu, host.memory_bytes)
            directory = machine.netns_directory / network.host_namespace(spec.name, host.name)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "hosts").write_text(network.hosts_file(spec))
        for command in network.up_commands(spec):
            machine.shell.run(command)
        remember(spec, machine)

    def _host_status(self, index: int, cut: set[str]) -> HostStatus:
        host, cgroups = self.spec.hosts[index], self._machine.cgroups
        memory = cgroups.memory(self.spec.name, host.name)
        return HostStatus(
            name=host.name,
            address=network.host_address(index),
            cpu=cgroups.cpu(self.spec.name, host.name),
            bandwidth_bytes_per_s=network.present_bandwidth(self.spec, host.name, self._machine.shell),
            memory_bytes=host.memory_bytes,
            memory_used_bytes=memory.used_bytes,
            memory_peak_bytes=memory.peak_bytes,
            num_processes=len(cgroups.processes(self.spec.name, host.name)),
            cut=host.name in cut,
        )

    def _targets(self, on: Sequence[str] | None) -> list[Target]:
        chosen = {self.spec.host(name).name for name in on} if on else None
        cores = choose_cores([host.cpu for host in self.spec.hosts], sorted(os.sched_getaffinity(0)))
        return [
            Target(
                lab=self.spec.name,
                host=host.name,
                address=network.host_address(index),
                cpu=host.cpu,
                bandwidth_bytes_per_s=host.bandwidth_bytes_per_s,
                memory_bytes=host.memory_bytes,
                core=cores[index],
                directories=tuple(self._machine.cgroups.directories(self.spec.name, host.name)),
                root=root_folder(host.arch),
            )
            for index, host in enumerate(self.spec.hosts)
            if chosen is None or host.name in chosen
        ]

    def _change(self, host: str, command: network.Command) -> None:
        self._require_host(host)
        self._machine.shell.run(command)

    def _require_host(self, host: str) -> None:
        self.spec.host(host)
        self._require_up()

    def _require_up(self) -> None:
        if not self.is_up():
            raise ClusterError(f"lab {self.spec.name} must be up for this, but it is not; run penstock lab up first")

    def _require_idle(self, host: str) -> None:
        pids = self._machine.cgroups.processes(self.spec.name, host)
        if pids:
            raise ClusterError(
                f"a host runs one command at a time; {host} still has {counted(len(pids), 'process')}; wait or "
                f"kill them with penstock lab kill {self.spec.name} {host}"
            )


@contextlib.contextmanager
def lab_session(
    spec: LabSpec, machine: Machine | None = None, *, warn: Callable[[list[str]], None] = lambda _lines: None
) -> Iterator[Lab]:
    """Use a lab within a context: start it unless it is up; if started here, stop it at the end, including on signals.

    with lab_session(read_lab("lab.toml")) as lab:
        ...

    `warn` receives the warnings of `Lab.up`. Raises as `Lab.up` does.
    """
    lab = Lab(spec, machine)
    with ended_by_signals():
        if lab.is_up():
            yield lab
            return
        warn(lab.up())
        try:
            yield lab
        finally:
            lab.down()


def take_down(name: str, machine: Machine | None = None) -> None:
    """Remove all resources of the lab of this name; no error if none exist.

    Raises `RunError` if a resource cannot be removed, after removing the rest.
    """
    machine = machine or this_machine()
    with machine.locked():
        remove(name, machine)


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
