"""Check of each machine of a cluster, with the command that fixes a missing requirement."""

import inspect
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from penstock.cluster.install import CPU_BYTES, CUDA_BYTES, has_gpu, is_arm, takes_cpu_build
from penstock.cluster.ssh.remote import Host, on_all, run_on
from penstock.spec.cluster import Cluster
from penstock.units import format_bytes
from penstock.version import LOWEST_TORCH, __version__

_CLOCK_S = 2.0
# run by the machine's Python, with the virtual environment's interpreter and the folder as arguments; needs only the
# standard library
_PROBE = "import json, os, platform, shutil, subprocess, sys, time\n"
_PROBE += "".join(inspect.getsource(each) for each in (has_gpu, is_arm, takes_cpu_build))
_PROBE += r"""
venv, folder = (os.path.expanduser(os.path.join("~", path)) for path in sys.argv[1:3])
found = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
found["at_s"] = time.time()
try:
    found["cores"] = len(os.sched_getaffinity(0))
except AttributeError:
    pass
try:
    found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
except (ValueError, OSError):
    found["memory_bytes"] = 0
place = folder
while not os.path.isdir(place):
    place = os.path.dirname(place)
found["free_bytes"] = shutil.disk_usage(place).free
found["bits"] = 64 if sys.maxsize > 2**32 else 32
found["takes_cpu_build"] = takes_cpu_build()
began = time.perf_counter()
total = 0
for number in range(300000):
    total += number * number
found["loop_s"] = time.perf_counter() - began
ask = "import importlib.metadata as m, json, sys\nd = {}\n"
ask += "for n in ('torch', 'timm', 'transformers'):\n try: d[n] = m.version(n)\n except m.PackageNotFoundError: pass\n"
ask += "sys.path.insert(0, sys.argv[1])\n"
ask += "try:\n from penstock.version import __version__ as v; d['penstock'] = v\nexcept ImportError: pass\n"
ask += "print(json.dumps(d))"
try:
    out = subprocess.run([venv, "-c", ask, os.path.join(folder, "src")], capture_output=True, text=True, timeout=30)
    found["packages"] = json.loads(out.stdout) if out.returncode == 0 else {}
except (OSError, subprocess.TimeoutExpired):
    found["packages"] = None
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCheck:
    """Result of one machine's check: the `problem` and what mends it, both empty if there is none."""

    name: str
    target: str
    reached: bool
    python: str = ""
    machine: str = ""
    penstock: str = ""
    torch: str = ""
    cores: int = 0
    memory_bytes: int = 0
    free_bytes: int = 0
    clock_s: float = 0.0  # its clock minus this machine's, the difference nearest to 0 that was possible
    loop_s: float = 0.0  # seconds of a fixed Python loop
    bits: int = 64  # word size of its Python
    takes_cpu_build: bool = False  # True if it gets PyTorch's CPU build
    problem: str = ""
    mend: str = ""


def check_hosts(cluster: Cluster, hosts: Sequence[Host], file: str) -> list[HostCheck]:
    """Check all machines in parallel.

    Example:
        for found in check_hosts(cluster, hosts_of(cluster), "cluster.toml"):
            print(found.name, found.problem, found.mend)
    """
    found = on_all(hosts, _probe)
    return [_judge(host, cluster, found[host.name], file) for host in hosts]


def _probe(host: Host) -> "Mapping[str, object] | str":
    began_s = time.time()
    done = run_on(host, [host.python, "-", host.interpreter, host.folder], data=_PROBE.encode())
    if done.unreached is not None:
        return done.unreached
    if done.status:
        return f"\n{(done.err.splitlines() or ['no reason'])[-1]}"
    found: dict[str, object] = json.loads(done.out)
    # the machine read its clock between these two times, which are seconds apart if the machine is busy
    at_s, ended_s = float(str(found["at_s"])), time.time()
    found["clock_s"] = max(0.0, at_s - ended_s) + min(0.0, at_s - began_s)
    return found


def _judge(host: Host, cluster: Cluster, found: "Mapping[str, object] | str", file: str) -> HostCheck:
    """Report the first missing requirement and the command that fixes it."""
    if isinstance(found, str):
        if found.startswith("\n"):
            return HostCheck(
                name=host.name, target=host.target, reached=True, problem=f"no {host.python}: {found.strip()}",
                mend=f"ssh {host.target} sudo apt-get install python3 python3-venv",
            )  # fmt: skip
        return HostCheck(name=host.name, target=host.target, reached=False, problem=found, mend=f"ssh {host.target}")
    packages = found["packages"] if isinstance(found["packages"], Mapping) else None
    base = HostCheck(
        name=host.name, target=host.target, reached=True, python=str(found["python"]), machine=str(found["machine"]),
        penstock=str((packages or {}).get("penstock", "")), torch=str((packages or {}).get("torch", "")),
        cores=int(str(found["cores"])), memory_bytes=int(str(found["memory_bytes"])),
        free_bytes=int(str(found["free_bytes"])), clock_s=float(str(found["clock_s"])),
        loop_s=float(str(found["loop_s"])), bits=int(str(found.get("bits", 64))),
        takes_cpu_build=bool(found.get("takes_cpu_build")),
    )  # fmt: skip
    problem, mend = _missing(base, host, cluster.device(host.name).memory_bytes, packages, file)
    return replace(base, problem=problem, mend=mend)


def _missing(
    found: HostCheck, host: Host, memory_bytes: int, packages: Mapping[str, object] | None, file: str
) -> tuple[str, str]:
    push = f"penstock hosts push {file}"
    if tuple(map(int, found.python.split(".")[:2])) < (3, 11):
        return f"Python {found.python}, and 3.11 is needed", f'another python = "..." for {host.name} in {file}'
    if found.bits < 64:
        return f"{found.bits}-bit Python, and PyTorch is built for 64 bits", "the 64-bit system on its card"
    if packages is None or not found.torch:
        needed = CPU_BYTES if found.takes_cpu_build else CUDA_BYTES
        if found.free_bytes < needed:
            free = format_bytes(found.free_bytes)
            return (
                f"no torch, and {free} of disk are not enough for it: up to {format_bytes(needed)}",
                f'another folder = "..." for {host.name} in {file}',
            )
        return ("no virtual environment" if packages is None else "no torch"), push
    if is_older(found.torch, LOWEST_TORCH):
        return f"torch {found.torch}, and {LOWEST_TORCH} is needed", push
    if found.penstock != __version__:
        return (f"penstock {found.penstock}, here {__version__}" if found.penstock else "no penstock"), push
    if 0 < found.memory_bytes < memory_bytes:
        has = format_bytes(found.memory_bytes)
        return f"{has} of memory, {file} has {format_bytes(memory_bytes)}", f"correct memory in {file}"
    if abs(found.clock_s) > _CLOCK_S:
        return f"its clock is off by {found.clock_s:+.1f} s", f"ssh {host.target} sudo timedatectl set-ntp true"
    return "", ""


def is_older(version_: str, lowest: str) -> bool:
    """Return True if a version precedes another.

    >>> is_older("2.9.1", "2.10"), is_older("2.10.0+cpu", "2.10"), is_older("2.15.0a0+git", "2.10")
    (True, False, False)
    """
    numbers = [[int(part) for part in text.partition("+")[0].split(".")[:2]] for text in (version_, lowest)]
    return numbers[0] < numbers[1]


def torch_version() -> str:
    """Return the version of torch on this machine, without its local build tag."""
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return ""
