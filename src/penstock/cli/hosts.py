"""`penstock hosts`: how fast the machines of a cluster are, and what lies between them."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from penstock.cli.cluster import run_on_cluster
from penstock.cli.options import JsonFile, make_console, write_json
from penstock.errors import ClusterError, UsageError
from penstock.group.entry import join_torchrun, under_torchrun
from penstock.group.world import World
from penstock.measure.hosts import MeasuredHosts, measure_hosts
from penstock.spec.cluster import Cluster, Link, read_cluster, write_cluster
from penstock.spec.fields import write_text
from penstock.spec.profile import Profile, read_profile, write_profile
from penstock.terminal.progress import working
from penstock.units import format_rate, format_seconds

app = typer.Typer(no_args_is_help=True, help="Measure the machines of a cluster.")


@app.callback()
def _hosts() -> None:
    """Measure the machines of a cluster."""


@app.command()
def measure(
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER", help="A lab file, or under torchrun any cluster file.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="measured.toml", help="The cluster file as measured.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="profile.json", help="Compare speeds with the device of this profile.")
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Write what messages cost here into the profile.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each host computes.")] = 2.0,
    json: JsonFile = None,
) -> None:
    """Measure all hosts at once and the links one by one; write a cluster file that `penstock plan` takes."""
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
        raise UsageError(f"{profile} has no calibration; make it again with penstock profile")
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


def _as_measured(cluster: Cluster, world: World, measured: MeasuredHosts, profile: Profile | None) -> Cluster:
    """Return the cluster with measured speeds and links; raises `ClusterError` for a host that the file lacks."""
    known = {device.name for device in cluster.devices}
    missing = [name for name in world.hosts if name not in known]
    if missing:
        raise ClusterError(f"{', '.join(missing)} took part but is not in the cluster file; add it as a device")
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


def _print(world: World, measured: MeasuredHosts, profile: Profile | None) -> None:
    console = make_console()
    hosts = Table("host", "a round of reference work", "speed")
    for name, taken in zip(world.hosts, measured.calibration_s, strict=True):
        hosts.add_row(name, format_seconds(taken), f"{profile.calibration_s / taken:.3f}" if profile else "")
    links = Table("from", "to", "bandwidth", "latency")
    for link in measured.links:
        rate, latency = format_rate(link.bandwidth_bytes_per_s), format_seconds(link.latency_s)
        links.add_row(world.hosts[link.source], world.hosts[link.target], rate, latency)
    console.print(hosts, links)
