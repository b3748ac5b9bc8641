"""`penstock lab`: an emulated cluster on this Linux machine."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import JsonFile, Written, write_json
from penstock.cluster.lab import (
    DEFAULT_PORT,
    PRESETS,
    Lab,
    LabStatus,
    lab_session,
    preset,
    read_lab,
    take_down,
    write_lab,
)
from penstock.cluster.lab.machine import num_cores
from penstock.cluster.lab.processes import ended_by_signals
from penstock.cluster.output import EndTogether, exit_name
from penstock.errors import ClusterError, RunError, UsageError
from penstock.files import write_whole
from penstock.terminal.progress import working
from penstock.text import counted, note, say
from penstock.units import format_bytes, format_rate, parse_bytes, parse_rate

app = typer.Typer(no_args_is_help=True, help="An emulated cluster on this Linux machine (needs root).")

LabOrName = Annotated[str, typer.Argument(metavar="LAB", help="Lab file, or the name of a lab that is up.")]
HostName = Annotated[str, typer.Argument(metavar="HOST", help="Name of one of the lab's hosts.")]


@app.command()
def init(
    output: Annotated[Path, Written(), typer.Option("--output", "-o", help="Lab file to write.")] = Path("lab.toml"),
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    like: Annotated[str, typer.Option(help=f"Board to emulate: {', '.join(PRESETS)}.")] = "raspberry-pi-4",
    name: Annotated[str, typer.Option(help="Name of the lab.")] = "lab",
    cpu: Annotated[float | None, typer.Option(help="Share of a core per host.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory per host, like '1 GiB'.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Bandwidth per host, like '1 Gbit/s'.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    json: JsonFile = None,
) -> None:
    """Write a lab file: equal hosts with the memory and network of a known board."""
    if output.exists() and not force:
        raise ClusterError(f"{output} exists, and init does not overwrite files; use --force or another -o")
    spec = preset(
        like,
        hosts,
        num_cores(),
        name=name,
        cpu=cpu,
        memory_bytes=parse_bytes(memory) if memory else None,
        bandwidth_bytes_per_s=parse_rate(bandwidth) if bandwidth else None,
    )
    try:
        write_whole(output, write_lab(spec))
    except OSError as error:
        raise ClusterError(f"{output} cannot be written ({error.strerror}); choose another -o") from None
    host = spec.hosts[0]
    say(
        f"{output}: {counted(len(spec.hosts), 'host')} with {host.cpu:g} of a core, {format_bytes(host.memory_bytes)}, "
        f"{format_rate(host.bandwidth_bytes_per_s or 0)}"
    )
    write_json(json, spec)


@app.command()
def up(lab: Annotated[Path, typer.Argument(help="Lab file.")], json: JsonFile = None) -> None:
    """Start a lab: namespaces, links, CPU shares and memory limits."""
    target = Lab.from_file(lab)
    with ended_by_signals():
        with working(f"starting {len(target.spec.hosts)} hosts"):
            warnings = target.up()
        _warn(warnings)
    _print_status(target.status(), json)


@app.command()
def status(lab: LabOrName, json: JsonFile = None) -> None:
    """Report the resources and usage of a lab's hosts."""
    _print_status(_find(lab).status(), json)


@app.command()
def down(lab: LabOrName, json: JsonFile = None) -> None:
    """Stop a lab and all processes in it; also cleans up after a crash."""
    name = read_lab(lab).name if _is_file(lab) else lab
    with working("stopping the lab"):
        take_down(name)
    say(f"{name} is down")
    write_json(json, LabStatus(name=name, state="down"))


@app.command()
def run(
    lab: LabOrName,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="Command to run on every host.")],
    on: Annotated[list[str] | None, typer.Option(help="Host to run on; may be repeated. Default: all hosts.")] = None,
    nproc_per_host: Annotated[int, typer.Option(help="Processes per host.")] = 1,
    port: Annotated[int, typer.Option(help="Port of rank 0.")] = DEFAULT_PORT,
    on_loss: Annotated[
        str, typer.Option(metavar="ACTION", help="If a process other than rank 0 fails, stop or continue.")
    ] = "stop",
    json: JsonFile = None,
) -> None:
    """Run a command on the lab's hosts with torchrun's environment; by default the first failure ends all of them."""
    if on_loss not in {"stop", "continue"}:
        raise UsageError(f"--on-loss must be stop or continue; got {on_loss!r}")
    ends: EndTogether = "first-failed" if on_loss == "continue" else True
    with (
        lab_session(_find(lab).spec, warn=_warn) as target,
        target.start(command, on=on, nproc_per_host=nproc_per_host, port=port, end_together=ends) as started,
    ):
        try:
            started.wait()
        finally:
            result = {"exit_codes": started.exit_codes, "first_failure": started.first_failure}
            write_json(json, {"lab": target.spec.name, **result})
    failed = [f"{host} ended with {exit_name(code)}" for host, code in started.exit_codes.items() if code]
    if on_loss == "stop" and started.first_failure:
        raise RunError(
            f"every process must exit with status 0, but {started.first_failure}; its output is above; a "
            "script that survives lost processes needs lab run --on-loss continue"
        )
    if started.first_code:
        raise RunError(f"rank 0 must exit with status 0, but {', '.join(failed)}; its output is above")
    if failed:
        note(f"{', '.join(failed)}; the run continued on the other hosts")


@app.command()
def cut(
    lab: LabOrName,
    host: HostName,
    restore: Annotated[bool, typer.Option("--restore", help="Reconnect the host.")] = False,
    json: JsonFile = None,
) -> None:
    """Disconnect a host's network, or reconnect it."""
    target = _find(lab)
    (target.restore if restore else target.cut)(host)
    say(f"{host} is {'connected' if restore else 'cut off'}")
    write_json(json, {"host": host, "cut": not restore})


@app.command()
def slow(
    lab: LabOrName,
    host: HostName,
    cpu: Annotated[float | None, typer.Option(help="New share of a core.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="New bandwidth of its link, as in '10 Mbit/s'.")] = None,
    json: JsonFile = None,
) -> None:
    """Change a host's share of a core, or the bandwidth of its link, while it runs."""
    if cpu is None and bandwidth is None:
        raise UsageError("slow needs a new share or bandwidth; give --cpu 0.1 or --bandwidth '10 Mbit/s'")
    rate = None if bandwidth is None else parse_rate(bandwidth)
    _find(lab).slow(host, cpu=cpu, bandwidth_bytes_per_s=rate)
    has = [*([] if cpu is None else [f"{cpu:g} of a core"]), *([] if rate is None else [f"{format_rate(rate)}"])]
    say(f"{host} has {' and '.join(has)}")
    write_json(json, {"host": host, "cpu": cpu, "bandwidth_bytes_per_s": rate})


@app.command()
def kill(lab: LabOrName, host: HostName, json: JsonFile = None) -> None:
    """Kill every process of a host immediately, like a power failure."""
    num_processes = _find(lab).kill(host)
    say(f"{host}: {counted(num_processes, 'process')} ended")
    write_json(json, {"host": host, "num_processes": num_processes})


def _is_file(lab: str) -> bool:
    # names have neither dots nor slashes, so a mistyped path is not mistaken for a name
    return "." in lab or "/" in lab or Path(lab).is_file()


def _find(lab: str) -> Lab:
    return Lab.from_file(lab) if _is_file(lab) else Lab.from_name(lab)


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        say(f"warning: {warning}", err=True)


def _print_status(found: LabStatus, json: Path | None) -> None:
    hint = f"; run penstock lab down {found.name}" if found.state == "partial" else ""
    say(f"{found.name} is {found.state}{hint}")
    for host in found.hosts:
        rate = host.bandwidth_bytes_per_s
        say(
            f"  {host.name}  {host.address}  cpu {host.cpu:.3g}  "
            f"memory {format_bytes(host.memory_used_bytes)} of {format_bytes(host.memory_bytes)}  "
            f"{format_rate(rate) if rate else 'unlimited'}{' (cut)' if host.cut else ''}  "
            f"{counted(host.num_processes, 'process')}"
        )
    write_json(json, found)
