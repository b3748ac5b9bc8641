"""`penstock hosts` and `penstock worker`: checks, runs and measurements on machines, and machines that join a run."""

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from penstock.cli import options as opt
from penstock.cli.cluster import commands_by_ssh, ends_with, is_lab, run_by_ssh, run_on_cluster
from penstock.cli.options import JsonFile, Written, make_console, write_json
from penstock.cluster.lab.processes import ended_by_signals
from penstock.cluster.ssh.prepare import FILES, bring, check_hosts, fetch, push, what_push_does
from penstock.cluster.ssh.remote import PORT, RemoteRun, address_of, hosts_of, on_all
from penstock.cluster.ssh.schedulers import kubernetes_manifest, slurm_script
from penstock.errors import ClusterError, RunError, UsageError
from penstock.spec.cluster import Cluster, Link, read_cluster, write_cluster
from penstock.spec.fields import write_text
from penstock.spec.profile import Profile, read_profile, write_profile
from penstock.terminal.progress import working
from penstock.text import say
from penstock.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.group.world import World
    from penstock.measure.hosts import MeasuredHosts


app = typer.Typer(no_args_is_help=True, help="Reach, prepare and measure the machines of a cluster.")
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the commands without running them.")]
ClusterFile = Annotated[Path, typer.Argument(metavar="CLUSTER", help="Cluster file, as for `penstock plan`.")]


@app.callback()
def _hosts() -> None:
    """Connect to the machines of a cluster by ssh, prepare them, run on them, and measure them."""


@app.command()
def key(
    path: Annotated[
        Path, Written(), typer.Argument(metavar="FILE", help="File of the key, readable only by this account.")
    ],
) -> None:
    """Write a new key; keep it secret, and pass it to every process of a run by --key or PENSTOCK_KEY."""
    from penstock.transport.curve import write_key

    write_key(path)
    say(f"{path}: a new key; give it to every process of a run with PENSTOCK_KEY={path}")


@app.command()
def check(cluster: ClusterFile, dry_run: DryRun = False, json: JsonFile = None) -> None:
    """Check each machine, and print the command that fixes its first missing requirement."""
    spec = _machines(cluster)
    if dry_run:
        for host in hosts_of(spec):
            say(f"{shlex.join(host.command(host.python, '-', host.interpreter, host.folder))}  # reads its versions")
        return
    with working("checking all machines"):
        found = check_hosts(spec, hosts_of(spec), str(cluster))
    console = make_console()
    table = Table("host", "ssh", "Python", "penstock", "torch", "cores", "memory", "disk", "clock", "plain Python")
    for each in found:
        if not each.reached:
            table.add_row(each.name, each.target, "not reached")
            continue
        table.add_row(
            each.name,
            each.target,
            each.python,
            each.penstock or "-",
            each.torch or "-",
            str(each.cores),
            format_bytes(each.memory_bytes),
            format_bytes(each.free_bytes),
            f"{each.clock_s:+.1f} s",
            format_seconds(each.loop_s),
        )
    console.print(table)
    wrong = [each for each in found if each.problem]
    for each in wrong:
        say(f"{each.name}: {each.problem}; {each.mend}")
    write_json(json, {"hosts": [asdict(each) for each in found]})
    if wrong:
        raise typer.Exit(1)
    say("all machines are ready")


@app.command(name="push")
def push_(
    cluster: ClusterFile,
    bundle: Annotated[Path | None, typer.Option(metavar="DIR", help="Bundle; each machine gets its part.")] = None,
    requirement: Annotated[
        list[str] | None,
        typer.Option("-r", "--requirement", metavar="PACKAGE", help="Additional package; may be repeated."),
    ] = None,
    install: Annotated[bool, typer.Option(help="Install virtual environments and packages.")] = True,
    dry_run: DryRun = False,
) -> None:
    """Send every machine the changed files of the source, the packages and its part of a bundle."""
    hosts = hosts_of(_machines(cluster))
    if dry_run:
        for line in what_push_does(hosts, bundle=bundle, requirements=requirement or (), install=install):
            say(line)
        return
    sent = push(
        hosts,
        bundle=bundle,
        requirements=requirement or (),
        install=install,
        tell=lambda name, what: say(f"{name}: {what}", err=True),
    )
    for name, num_bytes in sent.items():
        say(f"{name}: {format_bytes(num_bytes)} sent" if num_bytes else f"{name}: unchanged")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    cluster: ClusterFile,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the first machine.")] = PORT,
    dry_run: DryRun = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a batch script for Slurm instead.")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="Print a manifest for Kubernetes instead.")] = False,
    setup: Annotated[bool, typer.Option("--push", help="Push before the run.")] = False,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Key file of the run. Default: a new key for each run.")
    ] = None,
    trusted: Annotated[
        bool, typer.Option("--trusted", help="No key and no encryption, for a trusted network.")
    ] = False,
) -> None:
    """Run a command on every machine: penstock hosts run cluster.toml -- infer MODEL --images photos/.

    Paths are relative to each machine's folder. All processes end together; none is left running.
    """
    from penstock.transport.curve import read_key

    arguments = [word for index, word in enumerate(context.args) if index or word != "--"]
    if not arguments:
        raise UsageError("hosts run needs a command after --, as in: penstock hosts run cluster.toml -- bench MODEL")
    spec = _machines(cluster)
    threads = max(device.threads for device in spec.devices)
    if slurm:
        survives = ends_with(arguments) == "first"
        say(slurm_script(arguments, len(spec.devices), threads=threads, survives=survives))
        return
    if kubernetes:
        say(kubernetes_manifest(arguments, len(spec.devices), threads=threads))
        return
    if dry_run:
        _say_commands(spec, arguments, port)
        return
    if setup:
        push(hosts_of(spec), tell=lambda name, what: say(f"{name}: {what}", err=True))
    if trusted and key is not None:
        raise UsageError("--trusted and --key exclude each other; pass one of them")
    secret = b"" if trusted else read_key(key) if key else None
    raise typer.Exit(run_by_ssh(spec, arguments, port, secret))


def _say_commands(cluster: Cluster, arguments: Sequence[str], port: int = PORT) -> None:
    """Print the ssh command that each machine would get."""
    for host, words in zip(*commands_by_ssh(cluster, arguments, port), strict=True):
        say(shlex.join(host.command(*words)))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def join(
    context: typer.Context,
    cluster: ClusterFile,
    host: Annotated[str, typer.Argument(metavar="HOST", help="Name of one of the cluster's machines.")],
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Key file of the run to join.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the first machine.")] = PORT,
) -> None:
    """Add a machine to a running job: a machine that returns, or a new one.

    It joins a stream as a worker, a training run by its command: penstock hosts join CLUSTER HOST -- train MODEL --data
    DIR
    """
    from penstock.transport.curve import read_key

    spec = _machines(cluster)
    spec.device(host)
    first = hosts_of(spec)[0]
    arguments = join_arguments(context.args, f"{address_of(first, spec.device(first.name))}:{port}")
    hosts, commands = commands_by_ssh(spec, arguments, port)
    index = [each.name for each in hosts].index(host)
    secret = read_key(key) if key else b""
    with ended_by_signals(), RemoteRun([hosts[index]], [commands[index]], key=secret) as started:
        raise typer.Exit(1 if started.wait()[host] else 0)


def join_arguments(given: Sequence[str], place: str) -> list[str]:
    """Return the command with which a machine joins a run at HOST:PORT: the given command, else `worker`.

    >>> join_arguments([], "10.0.0.1:29500")
    ['worker', '--join', '10.0.0.1:29500']
    >>> join_arguments(["--", "train", "MODEL"], "10.0.0.1:29500")
    ['train', 'MODEL', '--join', '10.0.0.1:29500']
    """
    verb = [word for index, word in enumerate(given) if index or word != "--"]
    return [*(verb or ["worker"]), "--join", place]


def _machines(path: Path) -> Cluster:
    """Read a cluster file; raises `ClusterError` for a lab, whose hosts are on this machine."""
    if is_lab(path):
        raise ClusterError(f"{path} is a lab, whose hosts are on this machine; run in it with penstock lab run")
    return read_cluster(path)


@app.command()
def measure(
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER", help="Lab file, or under torchrun any cluster file.")],
    output: Annotated[
        Path | None,
        Written(),
        typer.Option("-o", "--output", metavar="measured.toml", help="Cluster file to write with measured values."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="profile.json", help="Profile whose device has speed 1.")
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Write the measured costs of messages into the profile.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of computation on each host.")] = 2.0,
    dry_run: DryRun = False,
    json: JsonFile = None,
) -> None:
    """Measure all hosts simultaneously and the links one by one; write a cluster file for `penstock plan`."""
    from penstock.group.entry import join_torchrun, under_torchrun
    from penstock.measure.hosts import measure_hosts

    if dry_run:
        _say_commands(_machines(cluster), _measuring(seconds, profile, update=update))
        return
    if not under_torchrun() and not is_lab(cluster):
        raise typer.Exit(_measure_by_ssh(cluster, output, profile, seconds, json, update=update))
    if not under_torchrun():
        arguments = ["hosts", "measure", str(cluster), "--seconds", str(seconds)]
        for option, path in (("--output", output), ("--profile", profile), ("--json", json)):
            arguments += [option, str(path)] if path else []
        with working("measuring hosts and links"):
            status = run_on_cluster(cluster, [*arguments, *(["--update"] if update else [])])
        raise typer.Exit(status)
    given = read_cluster(cluster)
    compared = read_profile(profile) if profile else None
    if compared is not None and not compared.calibration_s:
        raise UsageError(f"calibration not found in {profile}; make the profile again with penstock profile")
    with join_torchrun(followed=True) as world:
        measured = measure_hosts(world, seconds=seconds, threads=compared.threads if compared else 1)
        if measured is None:
            return
        seen = _as_measured(given, world, measured, compared)
    _print(world, measured, compared)
    if output is not None:
        write_text(output, write_cluster(seen))
    if update and compared is not None and profile is not None:
        write_profile(profile, msgspec.structs.replace(compared, **asdict(measured.messages)))
    write_json(json, {"hosts": world.hosts, "cluster": seen, **asdict(measured)})


def _measuring(seconds: float, profile: Path | None, *, update: bool) -> list[str]:
    """Return the command that machines run to measure, with files that were sent to their folders."""
    arguments = ["hosts", "measure", f"{FILES}/cluster.toml", "--seconds", str(seconds)]
    arguments += ["--output", f"{FILES}/measured.toml", "--json", f"{FILES}/measured.json"]
    return arguments + (["--profile", f"{FILES}/profile.json", *(["--update"] * update)] if profile else [])


def _measure_by_ssh(
    cluster: Path, output: Path | None, profile: Path | None, seconds: float, json: Path | None, *, update: bool
) -> int:
    """Measure machines over ssh: send the input files and fetch the results."""
    spec = read_cluster(cluster)
    hosts = hosts_of(spec)
    given = {"cluster.toml": cluster.read_bytes()} | ({"profile.json": profile.read_bytes()} if profile else {})
    arguments = _measuring(seconds, profile, update=update)
    on_all(hosts, lambda host: bring(host, f"{host.folder}/{FILES}", given, clean=False))
    if status := run_by_ssh(spec, arguments):
        return status
    wanted = {"measured.toml": output, "measured.json": json, "profile.json": profile if update else None}
    for name, path in wanted.items():
        if path is not None:
            write_text(path, fetch(hosts[0], f"{hosts[0].folder}/{FILES}/{name}").decode())
    return 0


def _as_measured(cluster: Cluster, world: "World", measured: "MeasuredHosts", profile: Profile | None) -> Cluster:
    """Return the cluster with measured speeds and links; raises `ClusterError` for a host missing in the file."""
    known = {device.name for device in cluster.devices}
    missing = [name for name in world.hosts if name not in known]
    if missing:
        raise ClusterError(f"{', '.join(missing)} is in the run but not in the cluster file; add it as a device")
    if profile is not None:
        seconds = zip(world.hosts, measured.calibration_s, strict=True)
        cluster = cluster.at_speeds({name: profile.calibration_s / taken for name, taken in seconds})
    slower: dict[tuple[str, str], tuple[float, float]] = {}
    for link in measured.links:  # a link is as fast as its slower direction
        first, second = sorted((world.hosts[link.source], world.hosts[link.target]))
        rate, latency_s = slower.get((first, second), (math.inf, 0.0))
        slower[first, second] = min(rate, link.bandwidth_bytes_per_s), max(latency_s, link.latency_s)
    links = tuple(
        Link(between=pair, bandwidth_bytes_per_s=rate, latency_s=latency_s)
        for pair, (rate, latency_s) in slower.items()
    )
    return msgspec.structs.replace(cluster, links=links)


def _print(world: "World", measured: "MeasuredHosts", profile: Profile | None) -> None:
    console = make_console()
    hosts = Table("host", "seconds of reference work", "speed")
    for name, taken in zip(world.hosts, measured.calibration_s, strict=True):
        hosts.add_row(name, format_seconds(taken), f"{profile.calibration_s / taken:.3f}" if profile else "")
    links = Table("from", "to", "bandwidth", "latency")
    for link in measured.links:
        rate, latency = format_rate(link.bandwidth_bytes_per_s), format_seconds(link.latency_s)
        links.add_row(world.hosts[link.source], world.hosts[link.target], rate, latency)
    console.print(hosts, links)


def worker(
    join: Annotated[
        str, typer.Option("--join", metavar="HOST:PORT", help="First host of the run, as printed at its start.")
    ],
    patience: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the run to start.")] = 120.0,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Key file of the run. Default: PENSTOCK_KEY.")
    ] = None,
    bind: opt.Bind = None,
) -> None:
    """Join a running job as a returning or new device; exit when the job ends."""
    from penstock.deploy.worker import follow
    from penstock.group.launcher import KEY
    from penstock.group.regroup import join_later, read_place

    host, port = read_place(join)
    opt.bind_to(bind)
    if key is not None:
        os.environ[KEY] = str(key)
    world = join_later(host, port, patience)
    if world is None:
        raise RunError(f"the run at {join} ended before it admitted this process; join the next one")
    say(f"admitted to the run at {join}")
    say(follow(world) or "the run is over")
