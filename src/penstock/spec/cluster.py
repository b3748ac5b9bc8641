"""Clusters: devices and the links between them.

name = "office"                   # optional
feeder = "desk"                   # the driver: loads the data and receives the results; optional, else the first device
bandwidth = "1 Gbit/s"            # default for every device; optional, else not limited
latency = "0.2 ms"                # optional
[[devices]]
name = "desk"
speed = 1.0                       # times the speed of the device that was profiled
memory = "8 GiB"                  # memory for penstock
threads = 4                       # optional
address = "192.168.1.10"          # optional
ssh = "pi@board0"                 # optional: its `ssh` target, if not its address or name
folder = "penstock"               # optional: folder on the machine, relative to the home folder; users of one account
venv = "penstock/.venv"           #   need separate ones; and the virtual environment
python = "python3"                # optional: interpreter that makes the virtual environment
runtimes = ["onnxruntime:int8"]   # optional: its runtimes other than eager; default: all in a profile
bandwidth = "100 Mbit/s"          # optional, as is latency
[[links]]                         # optional: a specific link between two devices
between = ["desk", "board"]
bandwidth = "300 Mbit/s"
latency = "2 ms"

A lab file is also a cluster file: its hosts are the devices, and a host's share of a core is its speed.
"""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from statistics import fmean

import msgspec

from penstock.errors import ClusterError
from penstock.spec.fields import (
    RENAME,
    check_fields,
    check_name,
    decode_toml,
    needed,
    read_number,
    read_quantity,
    read_tables,
    read_text,
)
from penstock.text import nearest
from penstock.units import parse_bytes, parse_rate, parse_seconds, write_bytes

_CLUSTER_FIELDS = ("name", "feeder", "bandwidth", "latency", "devices", "hosts", "links")
_PATHS = ("folder", "venv", "python")  # on the machine
_REACHED = ("ssh", *_PATHS)
_DEVICE_FIELDS = ("name", "speed", "memory", "threads", "address", "bandwidth", "latency", "runtimes", *_REACHED)
HOST_FIELDS = ("name", "cpu", "memory", "bandwidth", "arch")  # fields of a host in a lab file
_LINK_FIELDS = ("between", "bandwidth", "latency")


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device: its speed as a multiple of the profiled device's, its memory, and its link to other devices.

    `bandwidth_bytes_per_s` is per direction, None if unlimited. `runtimes` lists the available runtimes other than
    eager; None means all in a profile.

    >>> Device(name="board", speed=0.25, memory_bytes=2**30).threads
    1
    """

    name: str
    speed: float
    memory_bytes: int
    threads: int = 1
    address: str = ""
    bandwidth_bytes_per_s: float | None = None
    latency_s: float = 0.0
    ssh: str = ""
    folder: str = ""
    venv: str = ""
    python: str = ""
    runtimes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for field in (*_REACHED, "address"):
            if getattr(self, field).startswith("-"):
                raise ClusterError(
                    f"{field} of {self.name} would be read as an option: {getattr(self, field)!r}; remove the -"
                )
        for field in _PATHS:
            value = getattr(self, field)
            if value.startswith("~") or "$" in value:
                raise ClusterError(
                    f"{field} of {self.name} must be a path, relative to the home folder or from /; got {value!r}: no "
                    "shell expands it; write it out"
                )
        check_name("a device's name", self.name, ClusterError)
        if not 0 < self.speed < math.inf:
            raise ClusterError(f"speed must be above 0; {self.name} has {self.speed:g}; write it like speed = 0.5")
        if self.memory_bytes < 1:
            raise ClusterError(
                f"memory must be above 0; {self.name} has {self.memory_bytes}; write it like memory = '1 GiB'"
            )
        if self.threads < 1:
            raise ClusterError(f"threads must be at least 1; {self.name} has {self.threads}; write it like threads = 4")
        _check_link(self.name, self.bandwidth_bytes_per_s, self.latency_s)


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A symmetric link between two devices, which replaces the bandwidth and latency of these devices."""

    between: tuple[str, str]
    bandwidth_bytes_per_s: float | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _check_link(f"the link between {' and '.join(self.between)}", self.bandwidth_bytes_per_s, self.latency_s)


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices that a plan may use, the links between them, and the driver.

    Raises `ClusterError` for repeated or unknown names.

    >>> Cluster(devices=(Device(name="a", speed=1, memory_bytes=2**30),)).feeding.name
    'a'
    """

    devices: tuple[Device, ...]
    name: str = "cluster"
    feeder: str = ""
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise ClusterError("a cluster must have at least one device; write one [[devices]] table per device")
        names = [device.name for device in self.devices]
        known = set(names)
        if len(known) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ClusterError(f"names of devices must be unique; {twice!r} is given twice; rename one")
        if self.feeder and self.feeder not in known:
            raise ClusterError(
                f"the feeder must be one of the devices; got {self.feeder!r}{nearest(self.feeder, names, 1, RENAME)}"
            )
        pairs: set[frozenset[str]] = set()
        for link in self.links:
            for name in link.between:
                if name not in known:
                    raise ClusterError(f"a link must be between devices; got {name!r}{nearest(name, names, 1, RENAME)}")
            pair = frozenset(link.between)
            if len(pair) < 2 or pair in pairs:
                raise ClusterError(
                    f"a link must be between two devices and given once; got {' and '.join(link.between)}; remove it"
                )
            pairs.add(pair)

    @property
    def feeding(self) -> Device:
        """The device that loads the data and receives the results."""
        return self.device(self.feeder) if self.feeder else self.devices[0]

    def device(self, name: str) -> Device:
        """Return the device with this name; raises `ClusterError` if there is none."""
        for device in self.devices:
            if device.name == name:
                return device
        names = [device.name for device in self.devices]
        raise ClusterError(f"device {name!r} not found in {self.name}{nearest(name, names, 1, RENAME)}")

    def at_speeds(self, speeds: Mapping[str, float]) -> "Cluster":
        """Return the cluster with new speeds for the named devices."""
        devices = tuple(msgspec.structs.replace(one, speed=speeds.get(one.name, one.speed)) for one in self.devices)
        return msgspec.structs.replace(self, devices=devices)

    def at_mean_speeds(self, speeds: Sequence[float]) -> "Cluster":
        """Return the cluster with new speeds; devices that had equal speeds get the mean of their new speeds.

        Of two identical processes on equal devices one may be a few percent faster for its whole life, but the next
        process on that device may not be.

        >>> text = "".join(f"[[devices]]\\nname='{name}'\\nmemory='1 GiB'\\nspeed={speed}\\n"
        ...                for name, speed in [("a", 1), ("b", 1), ("c", 0.5)])
        >>> [device.speed for device in parse_cluster(text).at_mean_speeds([1.0, 1.5, 0.75]).devices]
        [1.25, 1.25, 0.75]
        """
        alike: dict[float, list[float]] = {}
        for device, speed in zip(self.devices, speeds, strict=True):
            alike.setdefault(device.speed, []).append(speed)
        return self.at_speeds({device.name: fmean(alike[device.speed]) for device in self.devices})

    def without(self, names: Collection[str]) -> "Cluster":
        """Return the cluster without some devices; if the driver is removed, the first remaining device replaces it."""
        return msgspec.structs.replace(
            self,
            devices=tuple(device for device in self.devices if device.name not in names),
            feeder="" if self.feeder in names else self.feeder,
            links=tuple(link for link in self.links if not set(link.between) & set(names)),
        )


def parse_cluster(text: str) -> Cluster:
    """Read the text of a cluster file or a lab file.

    >>> parse_cluster('[[devices]]\\nname = "a"\\nspeed = 0.5\\nmemory = "1 GiB"').devices[0].speed
    0.5

    Raises `ClusterError` if the text is not TOML, or has an unknown field or a wrong value.
    """
    table = decode_toml(text, "a cluster file", ClusterError)
    check_fields("a cluster file", table, _CLUSTER_FIELDS)
    devices, hosts = read_tables(table, "devices"), read_tables(table, "hosts")
    if devices and hosts:
        raise ClusterError("a file must have either [[devices]] or, for a lab, [[hosts]]; keep one kind")
    bandwidth = read_quantity("bandwidth of the cluster", table.get("bandwidth"), parse_rate)
    latency_s = read_quantity("latency of the cluster", table.get("latency"), parse_seconds) or 0.0
    kind = "host" if hosts else "device"
    read = tuple(_device(item, bandwidth, latency_s, kind=kind) for item in devices or hosts)
    return Cluster(
        name=read_text("name of the cluster", table.get("name", "cluster")),
        feeder=read_text("feeder", table.get("feeder", "")),
        devices=read,
        links=tuple(_link(item) for item in read_tables(table, "links")),
    )


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster file or a lab file; raises `ClusterError` that starts with the path if it is invalid."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # editors may write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ClusterError(f"the cluster file {path} cannot be read ({reason}); give another") from None
    try:
        return parse_cluster(text)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def write_cluster(cluster: Cluster) -> str:
    """Write a cluster as the text of a cluster file; reading it returns an equal cluster."""
    lines = [f'name = "{cluster.name}"']
    if cluster.feeder:
        lines.append(f'feeder = "{cluster.feeder}"')
    for device in cluster.devices:
        lines += ["", "[[devices]]", f'name = "{device.name}"', f"speed = {float(device.speed)!r}"]
        lines += [f'memory = "{write_bytes(device.memory_bytes)}"', f"threads = {device.threads}"]
        if device.address:
            lines.append(f'address = "{device.address}"')
        lines += [f'{field} = "{getattr(device, field)}"' for field in _REACHED if getattr(device, field)]
        if device.runtimes is not None:
            names = ", ".join(f'"{name}"' for name in device.runtimes)
            lines.append(f"runtimes = [{names}]")
        lines += _link_lines(device.bandwidth_bytes_per_s, device.latency_s)
    for link in cluster.links:
        lines += ["", "[[links]]", f'between = ["{link.between[0]}", "{link.between[1]}"]']
        lines += _link_lines(link.bandwidth_bytes_per_s, link.latency_s)
    return "\n".join(lines) + "\n"


def _device(table: Mapping[str, object], bandwidth: float | None, latency_s: float, *, kind: str) -> Device:
    """Read a device of a cluster file, or a host of a lab file, whose speed is its share of a core."""
    where = _named(table)
    check_fields(where, table, HOST_FIELDS if kind == "host" else _DEVICE_FIELDS)
    name = read_text(f"a {kind}'s name", needed(where, table, "name"))
    field = "cpu" if kind == "host" else "speed"
    speed = read_number(f"{field} of {where}", needed(where, table, field), float)
    return Device(
        name=name,
        speed=min(speed, 1.0) if kind == "host" else speed,  # one thread cannot use more than one core
        memory_bytes=read_quantity(f"memory of {where}", needed(where, table, "memory"), parse_bytes) or 0,
        threads=read_number(f"threads of {where}", table.get("threads", 1), int),
        address=read_text(f"address of {where}", table.get("address", "")),
        bandwidth_bytes_per_s=read_quantity(f"bandwidth of {where}", table.get("bandwidth"), parse_rate) or bandwidth,
        latency_s=read_quantity(f"latency of {where}", table["latency"], parse_seconds) or 0.0
        if "latency" in table
        else latency_s,
        runtimes=_runtimes(where, table["runtimes"]) if "runtimes" in table else None,
        **{key: _in_home(key, read_text(f"{key} of {where}", table[key])) for key in _REACHED if key in table},
    )


def _in_home(field: str, value: str) -> str:
    """Return a path on a machine without ~/, since commands begin in the home folder; the python stays a path."""
    if field not in _PATHS or not value.startswith("~/") or not value.strip("~/"):
        return value
    return ("./" if field == "python" else "") + value.removeprefix("~/").lstrip("/")


def _runtimes(where: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name and '"' not in name for name in value):
        raise ClusterError(f'runtimes of {where} must be names; got {value!r}; write them like ["onnxruntime:int8"]')
    return tuple(value)


def _link(table: Mapping[str, object]) -> Link:
    check_fields("a link", table, _LINK_FIELDS)
    between = needed("a link", table, "between")
    if not isinstance(between, list) or len(between) != 2 or not all(isinstance(name, str) for name in between):
        raise ClusterError(f'a link must be between two devices; got {between!r}; write it like between = ["a", "b"]')
    return Link(
        between=(between[0], between[1]),
        bandwidth_bytes_per_s=read_quantity("bandwidth of a link", table.get("bandwidth"), parse_rate),
        latency_s=read_quantity("latency of a link", table.get("latency"), parse_seconds) or 0.0,
    )


def _link_lines(bandwidth_bytes_per_s: float | None, latency_s: float) -> list[str]:
    lines = []
    if bandwidth_bytes_per_s is not None:
        lines.append(f'bandwidth = "{_plain(bandwidth_bytes_per_s * 8)} bit/s"')
    if latency_s:
        lines.append(f'latency = "{_plain(latency_s)} s"')
    return lines


def _plain(value: float) -> str:
    """Write a number without an exponent, with as many digits as needed."""
    return format(Decimal(repr(float(value))), "f")


def _named(table: Mapping[str, object]) -> str:
    if "name" not in table:
        return "a device without a name"
    check_name("a device's name", table["name"], ClusterError)
    return f"device {table['name']}"


def _check_link(where: str, bandwidth_bytes_per_s: float | None, latency_s: float) -> None:
    if bandwidth_bytes_per_s is not None and not 0 < bandwidth_bytes_per_s < math.inf:
        raise ClusterError(
            f"bandwidth must be above 0; {where} has {bandwidth_bytes_per_s:g}; write it like '1 Gbit/s'"
        )
    if not 0 <= latency_s < math.inf:
        raise ClusterError(f"latency must be at least 0; {where} has {latency_s:g}; write it like '0.2 ms'")
