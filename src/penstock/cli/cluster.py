"""`--cluster FILE`: run a command on the machines of a cluster."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.config import read_config
from penstock.cli.options import bind_to
from penstock.cluster.lab import lab_session, read_lab
from penstock.cluster.lab.processes import ended_by_signals
from penstock.cluster.output import EndTogether, OutputLine, exit_name, print_line
from penstock.cluster.ssh.remote import PORT, Host, RemoteRun, address_of, environment, hosts_of, remote_command
from penstock.errors import ClusterError, UsageError
from penstock.files import check_paths
from penstock.group.launcher import QUIET, TRUSTED, module_command, module_path
from penstock.spec.cluster import Cluster as Spec
from penstock.spec.cluster import read_cluster
from penstock.spec.fields import decode_toml
from penstock.text import say

Cluster = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="Lab or cluster, to run a process on each of its hosts."),
]
_OPTION = "--cluster"


def take_cluster(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split `--cluster FILE` off a command line; raises `UsageError` if the file name is missing.

    >>> take_cluster(["bench", "timm:vit", "--cluster", "lab.toml"])
    (PosixPath('lab.toml'), ['bench', 'timm:vit'])
    """
    rest = list(arguments)
    for index, argument in enumerate(rest):
        if argument.startswith(f"{_OPTION}="):
            del rest[index]
            return Path(argument.partition("=")[2]).expanduser(), rest
        if argument == _OPTION:
            if index + 1 >= len(rest):
                raise UsageError("--cluster needs a file, as in --cluster lab.toml")
            path = Path(rest[index + 1]).expanduser()
            del rest[index : index + 2]
            return path, rest
    return None, rest


def run_on_cluster(path: Path, arguments: Sequence[str]) -> int:
    """Run `penstock` with these arguments on every host of a lab, or by ssh on a cluster; return the exit status.

    Standard output of the first host is printed unchanged; lines on standard error start with the host's name.
    """
    return _run_in_lab(path, arguments) if is_lab(path) else run_by_ssh(read_cluster(path), arguments)


def _run_in_lab(path: Path, arguments: Sequence[str]) -> int:
    spec = read_lab(path)
    first, ends = spec.hosts[0].name, ends_with(arguments)
    command = module_command("penstock", *arguments)
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(lab_session(spec))
        env = {**QUIET, TRUSTED: "1", "PYTHONPATH": module_path()}
        run = stack.enter_context(lab.start(command, env=env, output=_shown(first), end_together=ends))
        run.wait()
    if run.first_code is not None and run.first_code < 0:  # a signal, of which the process could say nothing
        say(f"error: {first} ended with {exit_name(run.first_code)}", err=True)
    return _status(run.exit_codes, first, ends)


def run_by_ssh(cluster: Spec, arguments: Sequence[str], port: int = PORT, key: bytes | None = None) -> int:
    """Run `penstock` with these arguments on every machine of a cluster; return the exit status.

    The machines receive a key over ssh (a new key if `key` is None) and connect only to processes that have it. With an
    empty key they trust the network.
    """
    hosts, commands = commands_by_ssh(cluster, arguments, port)
    ends = ends_with(arguments)
    shown = _shown(hosts[0].name)
    from penstock.transport.curve import make_key  # imported late, so that help is fast

    key = make_key() if key is None else key
    with ended_by_signals(), RemoteRun(hosts, commands, key=key, output=shown, end_together=ends) as run:
        codes = run.wait()
    status = _status(codes, hosts[0].name, ends)
    if status and run.first_failure is not None:
        say(f"error: {run.first_failure}; see its output above for the reason", err=True)
    return status


def commands_by_ssh(cluster: Spec, arguments: Sequence[str], port: int = PORT) -> tuple[list[Host], list[list[str]]]:
    """Return the machines of a cluster, the driver first, and the command to run on each."""
    hosts = hosts_of(cluster)
    addresses = [address_of(host, cluster.device(host.name)) for host in hosts]
    threads = [cluster.device(host.name).threads for host in hosts]
    variables = environment(hosts, addresses, threads, port)
    return hosts, [remote_command(host, own, arguments) for host, own in zip(hosts, variables, strict=True)]


def refuse_bind(path: Path, arguments: Sequence[str]) -> None:
    """Raise `UsageError` if `bind` is set with `--cluster`: each host has its own address."""
    bind_to(_given(arguments, "bind"), path)


def check_outputs(path: Path, arguments: Sequence[str]) -> None:
    """Raise `UsageError` if a command on a cluster would write over the cluster's file."""
    short = next((argument[2:] for argument in arguments if argument[:2] == "-o" and argument[2:]), None)
    given = {f"--{name}": _given(arguments, name) for name in ("output", "json", "trace", "report")}
    given |= {"-o": short or _option(arguments, "-o")}
    outputs = [(option, Path(value).expanduser()) for option, value in given.items() if value]
    check_paths([(_OPTION, path)], outputs)


def is_lab(path: Path) -> bool:
    """Return whether a file describes a lab rather than machines; raises `ClusterError` if it describes neither."""
    read_cluster(path)
    return "hosts" in decode_toml(path.read_bytes(), f"{path}", ClusterError)


def ends_with(arguments: Sequence[str]) -> EndTogether:
    """Return what ends a run: the first failure or, if the run survives lost processes, the first host's exit."""
    asked = _given(arguments, "on_loss")
    verb = next(iter(arguments), "")
    if verb == "train":
        survives = asked not in {None, "stop"}
    else:
        survives = verb in {"chat", "generate", "infer", "serve"} and asked != "stop" and not _given(arguments, "trace")
    return "first" if survives else True


def _shown(first: str) -> Callable[[OutputLine], None]:
    def show(line: OutputLine) -> None:
        if line.stream == "stdout" and line.host == first:
            say(line.text)
        elif line.stream == "stderr" and "hostname of the client socket" not in line.text:
            print_line(line)

    return show


def _status(codes: Mapping[str, int | None], first: str, ends: EndTogether) -> int:
    failed = [code for host, code in codes.items() if code and (host == first or ends is True)]
    return 0 if not failed else (2 if failed[0] == 2 else 1)


def _given(arguments: Sequence[str], name: str) -> str | None:
    """Return a setting from an option, `--set` or the file of settings; None if it is not given.

    >>> _given(["infer", "--set", "on_loss=wait"], "on_loss"), _given(["infer", "--on-loss=stop"], "on_loss")
    ('wait', 'stop')
    """
    found = _option(arguments, f"--{name.replace('_', '-')}")
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        option, equals, value = argument.partition("=")
        key, _, text = (value if equals else following).partition("=")
        if found is None and option == "--set" and key.strip().replace("-", "_") == name:
            found = text.strip(" \"'")
    config = _option(arguments, "--config")
    if found is None and config:
        in_file = read_config(Path(config).expanduser()).get(name)
        found = None if in_file is None else str(in_file)
    return found


def _option(arguments: Sequence[str], option: str) -> str | None:
    """Return the value of an option on a command line; None if it is not given.

    >>> _option(["infer", "--on-loss", "wait"], "--on-loss"), _option(["infer", "--on-loss=wait"], "--on-loss")
    ('wait', 'wait')
    """
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name == option:
            return value if equals else following
    return None
