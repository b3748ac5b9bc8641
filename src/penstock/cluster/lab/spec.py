"""The lab file: the emulated hosts and their resources.

name = "lab"                      # optional
bandwidth = "1 Gbit/s"            # optional, default of all hosts
[[hosts]]
name = "host0"
cpu = 0.35                        # share of a core
memory = "1 GiB"
bandwidth = "100 Mbit/s"          # optional; without it the link is not limited
arch = "aarch64"                  # optional; another processor, emulated in its own system
"""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.errors import ClusterError
from penstock.spec.cluster import HOST_FIELDS
from penstock.spec.fields import RENAME, check_fields, needed, read_quantity, read_tables, read_text
from penstock.text import nearest
from penstock.units import format_bytes, parse_bytes, parse_rate

MAX_HOSTS = 200
_LAB_FIELDS = ("name", "bandwidth", "hosts")
_NOT_EMULATED = ("latency", "loss", "jitter")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?")
_ARCH = re.compile(r"[a-z0-9_]{1,20}")
_MIN_CPU = 0.01
_MIN_MEMORY_BYTES = 2**20
_MIN_BANDWIDTH_BYTES_PER_S = 125.0
# above this share of the cores, hosts start to slow each other down
QUIET_SHARE = 0.7


class HostSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An emulated host: its share of a core, its memory and, unless None, its bandwidth and processor.

    Raises `ClusterError` if a value cannot be emulated.

    >>> HostSpec(name="host0", cpu=0.35, memory_bytes=2**30).bandwidth_bytes_per_s is None
    True
    """

    name: str
    cpu: float
    memory_bytes: int
    bandwidth_bytes_per_s: float | None = None
    arch: str | None = None

    def __post_init__(self) -> None:
        _check_name("a host name", self.name)
        check_cpu(self.name, self.cpu)
        if self.memory_bytes < _MIN_MEMORY_BYTES:
            raise ClusterError(
                f"a host's memory must be at least 1 MiB; {self.name} has {self.memory_bytes} bytes; "
                'write it like memory = "1 GiB"'
            )
        if self.arch is not None and not _ARCH.fullmatch(self.arch):
            raise ClusterError(
                f"arch must be a processor as printed by uname -m; {self.name} has {self.arch!r}; "
                'write it like arch = "aarch64"'
            )
        if self.bandwidth_bytes_per_s is not None:
            check_bandwidth(self.name, self.bandwidth_bytes_per_s)


class LabSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An emulated cluster: a name and its hosts.

    Raises `ClusterError` if there are no hosts, too many, or two with the same name.

    >>> LabSpec(hosts=(HostSpec(name="a", cpu=0.5, memory_bytes=2**30),)).name
    'lab'
    """

    name: str = "lab"
    hosts: tuple[HostSpec, ...]

    def __post_init__(self) -> None:
        _check_name("a lab name", self.name)
        if not 1 <= len(self.hosts) <= MAX_HOSTS:
            raise ClusterError(
                f"a lab must have 1 to {MAX_HOSTS} hosts; got {len(self.hosts)}; write one [[hosts]] table per host"
            )
        names = [host.name for host in self.hosts]
        for name in names:
            if names.count(name) > 1:
                raise ClusterError(
                    f"names of hosts must be unique; {name!r} is given {names.count(name)} times; rename one"
                )

    def host(self, name: str) -> HostSpec:
        """Return the host of this name.

        Raises `ClusterError` if the lab has no such host.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        names = [host.name for host in self.hosts]
        raise ClusterError(
            f"host {name!r} not found in lab {self.name}; it has {', '.join(names)}{nearest(name, names, 1, RENAME)}"
        )


def parse_lab(text: str) -> LabSpec:
    """Read the text of a lab file.

    Raises `ClusterError` if the text is not TOML or has an unknown field or an invalid value.

    >>> parse_lab('[[hosts]]\\nname = "a"\\ncpu = 0.5\\nmemory = "1 GiB"').hosts[0].cpu
    0.5
    """
    try:
        table = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise ClusterError(f"a lab file must be TOML, but this one is not: {error}; correct that line") from None
    _check_fields("a lab file", table, _LAB_FIELDS)
    hosts = read_tables(table, "hosts")
    default = _rate("the lab", table)
    return LabSpec(
        name=read_text("the lab's name", table.get("name", "lab")),
        hosts=tuple(_parse_host(index, host, default) for index, host in enumerate(hosts)),
    )


def read_lab(path: str | os.PathLike[str]) -> LabSpec:
    """Read a lab file.

    Raises `ClusterError` if it cannot be read or is not valid; the message starts with the path.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ClusterError(
            f"a lab file must be readable, but {path} is not ({reason}); make one with penstock lab init -o {path}"
        ) from None
    try:
        return parse_lab(text)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def write_lab(spec: LabSpec) -> str:
    """Return the text of a lab file; reading it returns an equal spec.

    >>> print(write_lab(LabSpec(hosts=(HostSpec(name="a", cpu=0.5, memory_bytes=2**30),))))
    name = "lab"
    <BLANKLINE>
    [[hosts]]
    name = "a"
    cpu = 0.5
    memory = "1 GiB"
    <BLANKLINE>
    """
    lines = [f'name = "{spec.name}"']
    for host in spec.hosts:
        lines += ["", "[[hosts]]", f'name = "{host.name}"', f"cpu = {host.cpu!r}"]
        lines.append(f'memory = "{_exact(host.memory_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))}"')
        if host.bandwidth_bytes_per_s is not None:
            bits = round(host.bandwidth_bytes_per_s * 8)
            lines.append(f'bandwidth = "{_exact(bits, 1000, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))}"')
        if host.arch is not None:
            lines.append(f'arch = "{host.arch}"')
    return "\n".join(lines) + "\n"


def check_fit(spec: LabSpec, num_cores: int, memory_bytes: int) -> list[str]:
    """Compare a lab with the machine that runs it; return warnings, one line each.

    Raises `ClusterError` if the hosts' CPU shares exceed the machine's cores.

    >>> check_fit(LabSpec(hosts=(HostSpec(name="a", cpu=0.5, memory_bytes=2**30),)), 2, 2**33)
    []
    """
    cpu = sum(host.cpu for host in spec.hosts)
    # tolerate rounding of the sum: shares such as 4 x 0.35 are meant to be exactly 70%
    slack = 1 + 1e-9
    if cpu > num_cores * slack:
        raise ClusterError(
            f"the hosts' CPU shares must add up to at most the machine's {num_cores} cores; got {cpu:.3g}; use cpu = "
            f"{_floor(num_cores * QUIET_SHARE / len(spec.hosts))} or fewer hosts"
        )
    warnings = []
    if cpu > QUIET_SHARE * num_cores * slack:
        warnings.append(
            f"the hosts' CPU shares add up to {cpu:.3g} of {num_cores} cores; above {QUIET_SHARE:.0%} "
            f"they disturb each other: use cpu = {_floor(num_cores * QUIET_SHARE / len(spec.hosts))}"
        )
    memory = sum(host.memory_bytes for host in spec.hosts)
    if memory > memory_bytes:
        warnings.append(
            f"the hosts' memory adds up to {format_bytes(memory)} but the machine has "
            f"{format_bytes(memory_bytes)}: a host may fail before it reaches its limit"
        )
    return warnings


def check_cpu(host: str, cpu: float) -> None:
    """Raise `ClusterError` unless the kernel supports this share of a core."""
    if not _MIN_CPU <= cpu < math.inf:
        raise ClusterError(
            f"a host's cpu, a share of a core, must be at least {_MIN_CPU}; {host} has {cpu:g}; write it like cpu = "
            "0.35"
        )


def check_bandwidth(host: str, bytes_per_s: float) -> None:
    """Raise `ClusterError` unless a link can have this bandwidth."""
    if not _MIN_BANDWIDTH_BYTES_PER_S <= bytes_per_s < math.inf:
        raise ClusterError(
            f"a host's bandwidth must be at least 1 kbit/s; {host} has {bytes_per_s * 8:g} bit/s; "
            'write it like bandwidth = "100 Mbit/s"'
        )


def _parse_host(index: int, table: Mapping[str, object], default_rate: float | None) -> HostSpec:
    where = f"host {table.get('name', f'number {index}')}"
    _check_fields(where, table, HOST_FIELDS)
    name, cpu, memory = (needed(where, table, field) for field in ("name", "cpu", "memory"))
    if isinstance(cpu, bool) or not isinstance(cpu, int | float):
        raise ClusterError(f"cpu must be a number; {where} has {cpu!r}; write it like cpu = 0.35")
    memory_bytes = read_quantity(f"memory of {where}", str(memory), parse_bytes) or 0
    rate = _rate(where, table)
    return HostSpec(
        name=read_text(f"the name of {where}", name),
        cpu=float(cpu),
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_s=default_rate if rate is None else rate,
        arch=None if table.get("arch") is None else read_text(f"arch of {where}", table["arch"]),
    )


def _check_fields(where: str, table: Mapping[str, object], known: tuple[str, ...]) -> None:
    for field in table:
        if field in _NOT_EMULATED:
            raise ClusterError(
                f"a lab emulates only CPU, memory and bandwidth; {where} has {field}, which would need the kernel's "
                f"netem; remove {field}"
            )
    check_fields(where, table, known)


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ClusterError(
            f"{what} must be 1 to 20 of a-z, 0-9 and '-' (not first or last); got {name!r}; write it like host0"
        )


def _rate(where: str, table: Mapping[str, object]) -> float | None:
    value = table.get("bandwidth")
    rate = read_quantity(f"bandwidth of {where}", None if value is None else str(value), parse_rate)
    # whole bits, so that reading a written file returns the same number
    return None if rate is None else round(rate * 8) / 8


def _exact(value: int, step: int, units: tuple[str, ...]) -> str:
    index = 0
    while index + 1 < len(units) and value % step == 0:
        value, index = value // step, index + 1
    return f"{value} {units[index]}"


def _floor(share: float) -> float:
    return max(_MIN_CPU, math.floor(share * 100 + 1e-9) / 100)


_GIGABIT = 125_000_000.0
# name: memory and bandwidth of the wired network, in bytes per second
# a lab emulates a board's memory and network, not its processor: every host gets the same share of this machine's
# cores, small enough that the hosts do not disturb each other
PRESETS: dict[str, tuple[int, float]] = {
    # BCM2837, 1 GB, 100 Mbit Ethernet over USB 2.0
    "raspberry-pi-3": (2**30, _GIGABIT / 10),
    # the same memory, with a gigabit port over USB 2.0, rated at 300 Mbit/s by its maker
    "raspberry-pi-3-plus": (2**30, _GIGABIT * 0.3),
    # sold with 1 to 8 GB; true gigabit Ethernet
    "raspberry-pi-4": (4 * 2**30, _GIGABIT),
    # sold with 1 to 16 GB; true gigabit Ethernet
    "raspberry-pi-5": (8 * 2**30, _GIGABIT),
}


def preset(
    like: str,
    num_hosts: int,
    num_cores: int,
    *,
    name: str = "lab",
    cpu: float | None = None,
    memory_bytes: int | None = None,
    bandwidth_bytes_per_s: float | None = None,
) -> LabSpec:
    """Make a lab of equal hosts from a known board; arguments that are given replace the board's values.

    Raises `ClusterError` for an unknown board or a value that cannot be emulated.

    >>> preset("raspberry-pi-4", 4, num_cores=2).hosts[3].cpu
    0.35
    """
    if like not in PRESETS:
        hint = nearest(like, PRESETS, 1, "; choose one of these")
        raise ClusterError(f"--like must be one of {', '.join(PRESETS)}; got {like!r}{hint}")
    if num_hosts < 1:
        raise ClusterError(f"a lab must have at least one host; got {num_hosts}; use --hosts 4")
    board_memory_bytes, board_rate = PRESETS[like]
    if cpu is None:  # with the usual single process per host, more than one core would be unused
        cpu = min(1.0, math.floor(QUIET_SHARE * num_cores / num_hosts * 100 + 1e-9) / 100)
    memory_bytes = board_memory_bytes if memory_bytes is None else memory_bytes
    bandwidth_bytes_per_s = board_rate if bandwidth_bytes_per_s is None else bandwidth_bytes_per_s
    hosts = tuple(
        HostSpec(name=f"host{index}", cpu=cpu, memory_bytes=memory_bytes, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        for index in range(num_hosts)
    )
    return LabSpec(name=name, hosts=hosts)
