"""Copying of changed files to every machine: source, requirements, and the machine's part of a bundle."""

import hashlib
import inspect
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.cluster import install as install_script
from penstock.cluster.ssh.check import is_older, torch_version
from penstock.cluster.ssh.remote import Host, on_all, require, run_on
from penstock.errors import ClusterError
from penstock.units import format_bytes
from penstock.version import LOWEST_TORCH

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
    hosts: Sequence[Host], *, bundle: Path | None = None, requirements: Sequence[str] = (), install: bool = True,
    tell: Progress = lambda _host, _what: None,
) -> dict[str, int]:  # fmt: skip
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
            if _missing(host, wanted):
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


def _missing(host: Host, wanted: Sequence[str]) -> bool:
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
    return [f"torch=={torch_version()}" if name == "torch" and torch_version() else name for name in names]


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
