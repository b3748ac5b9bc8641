"""Memory of a worker, and of stages on small boards: `python -m benchmarks.boards --json boards.json`, as root.

The boards are emulated (`scripts/aarch64.sh build`). The memory of a process is its anonymous memory, without that of
the emulator: what a board without a swap file has to have.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.faults.__main__ import make_images
from benchmarks.training.__main__ import environment
from penstock.cluster.lab import parse_lab
from penstock.cluster.lab.lab import lab_session
from penstock.cluster.lab.processes import inside, root_folder
from penstock.errors import OutOfMemory

BOARD = "aarch64"
# a model, and the number of boards that hold its stages but the first
CASES = (("timm:deit_tiny_patch16_224", 1), ("timm:deit_small_patch16_224", 1), ("timm:deit_base_patch16_224", 1))
NUM_IMAGES = 2
_INTERVAL_S = 0.2
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ \S+\s*(.*)")

# imports what a worker does, and reports each: (name, seconds of CPU time so far); waits after each to be measured
_IMPORT = """
import importlib, sys, time
for name in ("sys", "numpy", "torch", "penstock.deploy.worker", "penstock.runtime.onnx.onnx_runtime"):
    importlib.import_module(name)
    print(name, time.process_time(), flush=True)
    sys.stdin.readline()
"""


def main() -> None:
    """Measure the imports of a worker, then streams whose stages but the first are on boards."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.boards")
    parser.add_argument("--json", type=Path, required=True, help="the measurements")
    parser.add_argument("--memory", default="400 MiB", help="memory of each board; default: %(default)s")
    parser.add_argument("--only", choices=("worker", "stages"), help="one of the two parts")
    given = parser.parse_args()
    rows: dict[str, Any] = {"environment": environment()}
    if given.only != "stages":
        rows["worker"] = {arch: imports(None if arch == "here" else BOARD) for arch in ("here", BOARD)}
    if given.only != "worker":
        rows["stages"] = [stages(model, boards, given.memory) for model, boards in CASES]
    given.json.write_text(json.dumps(rows, indent=1))
    print(json.dumps(rows, indent=1))


def imports(arch: str | None) -> dict[str, dict[str, float]]:
    """Import what a worker imports; return the memory and the CPU time after each module."""
    command = ["unshare", "--mount", *inside(root_folder(arch), [sys.executable, "-c", _IMPORT])]
    found = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            name, cpu_s = line.split()
            found[name] = {"mb": round(anonymous_bytes(process.pid) / 1e6, 1), "cpu_s": round(float(cpu_s), 2)}
            process.stdin.write("\n")
            process.stdin.flush()
    return found


def stages(model: str, boards: int, memory: str) -> dict[str, Any]:
    """Stream images through this machine and boards with little memory; return the peak of each."""
    names = [f"board{index}" for index in range(boards)]
    hosts = [("near", "6 GiB", ""), *((name, memory, f'arch = "{BOARD}"\n') for name in names)]
    tables = (f'[[hosts]]\nname = "{name}"\ncpu = 1.0\nmemory = "{size}"\n{arch}' for name, size, arch in hosts)
    lab = f'name = "small"\nbandwidth = "1 Gbit/s"\n{"".join(tables)}'
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name, Peaks(names) as peaks:
        folder = Path(name)
        output = folder / "rows.csv"
        images = make_images(folder / "images", NUM_IMAGES)
        words = ["infer", model, "--images", str(images), "-o", str(output), "--stages", str(1 + boards)]
        command, failure = [sys.executable, "-m", "penstock", *words], None
        try:
            with lab_session(parse_lab(lab)) as session, session.start(command) as run:
                run.wait()
                failure = run.first_failure
        except OutOfMemory as error:
            failure = str(error)
        rows = output.read_text().count("\n") - 1 if output.exists() else 0
    return {
        "model": model, "boards": boards, "memory": memory, "rows": rows, "failure": failure,
        "mb": {host: round(peak / 1e6) for host, peak in sorted(peaks.bytes.items())},
    }  # fmt: skip


class Peaks:
    """Largest anonymous memory of a process of Penstock on each of these hosts, sampled while the `with` block runs."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self.bytes: dict[str, int] = dict.fromkeys(hosts, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Peaks":
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            for folder in Path("/proc").glob("[0-9]*"):
                if (host := host_of(folder)) in self.bytes:
                    self.bytes[host] = max(self.bytes[host], anonymous_bytes(int(folder.name)))


def host_of(folder: Path) -> str:
    """Return the host that a process belongs to, from its folder in /proc; empty if it is none of Penstock's."""
    try:
        if b"penstock" not in (folder / "cmdline").read_bytes():
            return ""
        variables = (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((each.decode().partition("=")[2] for each in variables if each.startswith(b"PENSTOCK_HOST=")), "")


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process, 0 after its exit.

    Of an emulated process, the emulator's own is left out: the instructions that it translated, its heap and its data.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:
        return 0
    return count_anonymous(lines)


def count_anonymous(lines: Iterable[str]) -> int:
    """Add up what a file `smaps` has."""
    total, of_emulator, emulated, count = 0, 0, False, False
    for line in lines:
        if found := _MAPPING.match(line):
            permissions, name = found.groups()
            emulated = emulated or "/qemu-" in name
            count = "/qemu-" in name or name == "[heap]" or (not name and "x" in permissions)
        elif line.startswith("Anonymous:"):
            size = int(line.split()[1]) * 1024
            total += size
            of_emulator += size if count else 0
    return total - (of_emulator if emulated else 0)


if __name__ == "__main__":
    main()
