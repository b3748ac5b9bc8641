"""Preparation of the machines of a cluster: a check of each, with the command that fixes a missing requirement; copies.

Changed files are copied to every machine: source, requirements, and the machine's part of a bundle.
"""

import hashlib
import inspect
import io
import json
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock.cluster import install as install_script
from penstock.cluster.install import CPU_BYTES, CUDA_BYTES, has_gpu, is_arm, takes_cpu_build
from penstock.cluster.ssh.remote import Host, on_all, require, run_on
from penstock.errors import ClusterError
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
                name=host.name,
                target=host.target,
                reached=True,
                problem=f"no {host.python}: {found.strip()}",
                mend=f"ssh {host.target} sudo apt-get install python3 python3-venv",
            )
        return HostCheck(name=host.name, target=host.target, reached=False, problem=found, mend=f"ssh {host.target}")
    packages = found["packages"] if isinstance(found["packages"], Mapping) else None
    base = HostCheck(
        name=host.name,
        target=host.target,
        reached=True,
        python=str(found["python"]),
        machine=str(found["machine"]),
        penstock=str((packages or {}).get("penstock", "")),
        torch=str((packages or {}).get("torch", "")),
        cores=int(str(found["cores"])),
        memory_bytes=int(str(found["memory_bytes"])),
        free_bytes=int(str(found["free_bytes"])),
        clock_s=float(str(found["clock_s"])),
        loop_s=float(str(found["loop_s"])),
        bits=int(str(found.get("bits", 64))),
        takes_cpu_build=bool(found.get("takes_cpu_build")),
    )
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


def _torch_version() -> str:
    """Return the version of torch on this machine, without its local build tag."""
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return ""


_INSTALL_S = 3600.0
_COPY_S = 3600.0
# manifest in each target folder: the files that penstock wrote, with hashes
_MANIFEST = ".penstock-files.json"
# prints the manifest, and the hashes of the files named on standard input or in the manifest
_LIST = r"""
import hashlib, json, os, sys
top, manifest, found = os.path.expanduser(os.path.join("~", sys.argv[1])), None, {}
names = json.load(sys.stdin)
if os.path.exists(os.path.join(top, sys.argv[2])):
    with open(os.path.join(top, sys.argv[2])) as file:
        manifest = json.load(file)
for name in {*names, *(manifest or {})}:
    path = os.path.join(top, name)
    if os.path.isfile(path):
        with open(path, "rb") as file:
            found[name] = hashlib.sha256(file.read()).hexdigest()
print(json.dumps({"manifest": manifest, "found": found, "empty": not os.path.isdir(top) or not os.listdir(top)}))
"""
# removes the files named as arguments, and unpacks an archive from standard input, the manifest last; each file is
# replaced atomically
_TAKE = r"""
import os, sys, tarfile
top = os.path.expanduser(os.path.join("~", sys.argv[1]))
os.makedirs(top, exist_ok=True)
for name in sys.argv[2:]:
    os.remove(os.path.join(top, name))
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
    for member in archive:
        path = os.path.join(top, member.name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".part", "wb") as file:
            file.write(archive.extractfile(member).read())
        os.replace(path + ".part", path)
"""
_READ = r"""
import os, sys
with open(os.path.expanduser(os.path.join("~", sys.argv[1])), "rb") as file:
    sys.stdout.buffer.write(file.read())
"""
FILES = "files"  # below a machine's folder: input and output files of a run
# packages of a process that holds a stage; the first machine also needs the model's library
CORE = ("torch", "numpy", "safetensors", "msgspec", "pyzmq", "typer", "rich")
FIRST = ("timm", "transformers", "pillow")

Progress = Callable[[str, str], None]


def push(
    hosts: Sequence[Host],
    *,
    bundle: Path | None = None,
    requirements: Sequence[str] = (),
    install: bool = True,
    tell: Progress = lambda _host, _what: None,
) -> dict[str, int]:
    """Send missing files to all machines in parallel; return the number of bytes sent to each.

    `bundle` is a bundle's folder, from which each machine gets its part; `requirements` are additional packages. With
    `install`, a virtual environment is made if there is none, and packages are installed, including the build of
    PyTorch for the machine (`cluster/install.py`). `tell` is called with a machine's name and its progress. Raises
    `ClusterError`.

    Example:
        push(hosts_of(cluster), tell=lambda name, what: print(name, what))
    """
    source = _source_files()

    def prepare(host: Host) -> int:
        tell(host.name, "comparing files")
        sent = bring(host, f"{host.folder}/src", source)
        if bundle is not None:
            sent += bring(host, f"{host.folder}/bundle", _bundle_files(bundle, host.name))
        if install:
            wanted = _packages(requirements, first=host is hosts[0])
            if _lacks(host, wanted):
                tell(host.name, "installing packages; the first time takes minutes")
                words = [host.python, "-", host.environment, *wanted]
                script = Path(install_script.__file__).read_bytes()
                chosen = require(host, run_on(host, words, data=script, timeout_s=_INSTALL_S), "installing packages")
                tell(host.name, f"has {chosen.decode(errors='replace').strip()}")
        tell(host.name, "is ready")
        return sent

    return on_all(hosts, prepare)


def what_push_does(
    hosts: Sequence[Host], *, bundle: Path | None = None, requirements: Sequence[str] = (), install: bool = True
) -> list[str]:
    """Describe what `push` would send to each machine and install there, without connecting to it."""
    source, lines = _source_files(), []
    for host in hosts:
        folders = {f"{host.folder}/src": source}
        if bundle is not None:
            folders[f"{host.folder}/bundle"] = _bundle_files(bundle, host.name)
        sizes = [
            f"{folder} ({len(files)} files, {format_bytes(sum(map(len, files.values())))})"
            for folder, files in folders.items()
        ]
        packages = " ".join(_packages(requirements, first=host is hosts[0]))
        made = f"; {host.environment} gets {packages}, if missing" if install else ""
        lines.append(f"{host.name}: changed files of {' and '.join(sizes)}{made}")
    return lines


def bring(host: Host, folder: str, files: Mapping[str, bytes], *, clean: bool = True) -> int:
    """Copy files to a folder on a machine; return the number of bytes sent.

    A manifest in the folder lists the copied files. With `clean` the folder belongs to penstock: files in the manifest
    that are not in `files` are removed, unless they were changed meanwhile. No other file is removed or overwritten:
    raises `ClusterError` if such a folder has files but no manifest, or if another file is in the way.
    """
    words = [host.python, "-c", _LIST, folder, _MANIFEST]
    listed = json.loads(require(host, run_on(host, words, data=json.dumps(list(files)).encode()), "listing files"))
    known, found = listed["manifest"], listed["found"]
    if known is None and clean and not listed["empty"]:
        raise ClusterError(
            f"{host.name} has files in {folder} that penstock did not write; empty it, or set another "
            f'folder = "..." for {host.name} in the cluster file'
        )
    known = known or {}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    changed = {name: files[name] for name, digest in hashes.items() if found.get(name) != digest}
    if strange := sorted(name for name in changed if name in found and name not in known):
        raise ClusterError(
            f"{host.name} has a file {folder}/{strange[0]} that penstock did not write; move it, or set another "
            f'folder = "..." for {host.name} in the cluster file'
        )
    unwanted = [name for name in known if name not in files and is_below(name)] if clean else []
    gone = [name for name in unwanted if found.get(name) == known[name]]
    manifest = {**({} if clean else known), **hashes}
    if not changed and not gone and manifest == known:
        return 0
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, data in {**changed, _MANIFEST: json.dumps(manifest).encode()}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    words = [host.python, "-c", _TAKE, folder, *gone]
    require(host, run_on(host, words, data=archive.getvalue(), timeout_s=_COPY_S), "copying files")
    return sum(map(len, changed.values()))


def is_below(name: str) -> bool:
    """Return True if a relative path stays below its folder.

    >>> is_below("penstock/version.py"), is_below("../mine"), is_below("/etc/passwd")
    (True, False, False)
    """
    return not name.startswith("/") and ".." not in name.split("/")


def fetch(host: Host, path: str) -> bytes:
    """Return the contents of a file on a machine; raises `ClusterError`."""
    return require(host, run_on(host, [host.python, "-", path], data=_READ.encode()), f"reading {path}")


def _lacks(host: Host, wanted: Sequence[str]) -> bool:
    """Return True if the machine's virtual environment lacks one of these packages, or its torch is too old."""
    ask = inspect.getsource(is_older) + (
        "import importlib.metadata as m, sys\n"
        "lowest, *names = sys.argv[1:]\n"
        "found = {name: m.version(name.partition('==')[0]) for name in names}\n"
        "torch = [have for name, have in found.items() if name.startswith('torch==')]\n"
        "sys.exit(any(is_older(have, lowest) for have in torch))\n"
    )
    return run_on(host, [host.interpreter, "-c", ask, LOWEST_TORCH, *wanted]).status != 0


def _packages(further: Sequence[str], *, first: bool) -> list[str]:
    names = [*CORE, *(FIRST if first else ()), *further]
    return [f"torch=={_torch_version()}" if name == "torch" and _torch_version() else name for name in names]


def _source_files() -> dict[str, bytes]:
    """Return the files of this package."""
    top = Path(__file__).resolve().parents[2]
    return {
        f"penstock/{path.relative_to(top)}": path.read_bytes()
        for path in sorted(top.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def _bundle_files(bundle: Path, name: str) -> dict[str, bytes]:
    """Return the files of a bundle that a machine needs: the plan, the interface and its own part."""
    if not (bundle / "plan.json").is_file():
        raise ClusterError(
            f"{bundle} is not a bundle: plan.json not found; make one with penstock split --plan PLAN -o DIR"
        )
    own = bundle / name
    chosen = [*(path for path in bundle.iterdir() if path.is_file()), *(own.rglob("*") if own.is_dir() else ())]
    return {str(path.relative_to(bundle)): path.read_bytes() for path in sorted(chosen) if path.is_file()}
