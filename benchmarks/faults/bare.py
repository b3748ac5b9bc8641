"""From machines with Python and sshd alone to first predictions: `python -m benchmarks.faults.bare --json FILE`.

With `--board` the second machine is an emulated 64-bit ARM board (`scripts/aarch64.sh build`, as root).
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.boards import BOARD, Peaks
from benchmarks.faults.__main__ import DEIT, make_images
from benchmarks.training.__main__ import environment
from penstock.cluster.lab.processes import inside, root_folder

HOSTS, PORT, NUM_IMAGES = 2, 2222, 20
_LONGEST_S = 3600.0


def main() -> None:
    """Push to hosts that have nothing, stream there, and write down when what was there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.bare")
    parser.add_argument("--json", type=Path, required=True, help="the times")
    parser.add_argument("--board", action="store_true", help="the second machine is an emulated 64-bit ARM board")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        images = make_images(folder / "images", NUM_IMAGES)
        names = [f"host{index}" for index in range(HOSTS)]
        with daemons(folder, board=given.board), Peaks(names) as peaks:
            rows: dict[str, Any] = {"hosts": HOSTS, "board": given.board, "environment": environment()}
            rows["first"] = run(folder, images, folder / "first.csv")
            rows["again"] = run(folder, images, folder / "again.csv")
            rows["alone_equal"] = alone(images, folder / "alone.csv") == classes(folder / "first.csv")
            rows["machines"] = {
                name: {"memory_mb": round(peaks.bytes[name] / 1e6), **installed(folder / name)} for name in names
            }
    given.json.write_text(json.dumps(rows, indent=1))
    print(json.dumps(rows, indent=1))


@contextlib.contextmanager
def daemons(folder: Path, *, board: bool) -> Iterator[None]:
    """Have an sshd on an address of loopback for each host, and write what reaches them."""
    for key in ("host_key", "user_key"):
        subprocess.run([program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    addresses = [f"127.0.0.{index + 2}" for index in range(HOSTS)]
    for index, address in enumerate(addresses):
        (folder / f"sshd_config{index}").write_text(
            f"ListenAddress {address}:{PORT}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\n"
            "PidFile none\nPasswordAuthentication no\nUsePAM no\nStrictModes no\nPermitRootLogin yes\nMaxStartups 100\n"
        )
    (folder / "ssh_config").write_text(
        f"Host *\n Port {PORT}\n IdentityFile {folder}/user_key\n IdentitiesOnly yes\n StrictHostKeyChecking no\n"
        " UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
    )
    lines = ['name = "bare"']
    for index, address in enumerate(addresses):
        lines += ["[[devices]]", f'name = "host{index}"', "speed = 1.0", 'memory = "2 GiB"', "threads = 1"]
        lines += [f'ssh = "{address}"', f'address = "{address}"', f'folder = "{folder}/host{index}"']
    (folder / "cluster.toml").write_text("\n".join(lines) + "\n")
    Path("/run/sshd").mkdir(exist_ok=True)
    commands = [[program("sshd"), "-D", "-e", "-f", str(folder / f"sshd_config{index}")] for index in range(HOSTS)]
    if board:
        root = root_folder(BOARD) or sys.exit("this machine is such a board itself; leave --board out")
        (root / "run/sshd").mkdir(parents=True, exist_ok=True)
        commands[-1][0] = "/usr/sbin/sshd"
        commands[-1] = ["unshare", "--mount", *inside(root, commands[-1])]
    started = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]
    try:
        yield
    finally:
        for daemon in started:
            daemon.terminate()
            daemon.wait()


def installed(folder: Path) -> dict[str, Any]:
    """Say what is in a machine's folder: its size, PyTorch's version, and the packages of CUDA."""
    names = sorted(path.name for path in folder.glob(".venv/lib/python3*/site-packages/*.dist-info"))
    sizes = [path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()]
    return {
        "mb": round(sum(sizes) / 1e6),
        "torch": [name for name in names if name.startswith("torch-")],
        "cuda_packages": [name for name in names if name.startswith(("nvidia", "cuda", "triton"))],
    }


def alone(images: Path, output: Path) -> str:
    """Predict in one process; returns names and classes, since processors differ in the last bits."""
    command = [sys.executable, "-m", "penstock", "infer", DEIT, "--images", str(images), "-o", str(output)]
    subprocess.run([*command, "--stages", "1"], check=True)
    return classes(output)


def classes(output: Path) -> str:
    """Return the first two columns of what was predicted."""
    return "\n".join(",".join(line.split(",")[:2]) for line in output.read_text().splitlines())


def program(name: str) -> str:
    """Find a program of OpenSSH's."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    return found or sys.exit(f"this benchmark needs {name}, of openssh-server and openssh-client")


def run(folder: Path, images: Path, output: Path) -> dict[str, float | int]:
    """Run the one command; gives the seconds until the first prediction was written, and until the end."""
    command = [
        sys.executable, "-m", "penstock", "hosts", "run", "--push", str(folder / "cluster.toml"), "--",
        "infer", DEIT, "--images", str(images), "-o", str(output), "--stages", str(HOSTS),
    ]  # fmt: skip
    began_s = time.monotonic()
    first_s = 0.0
    env = {**os.environ, "PENSTOCK_SSH": f"ssh -F {folder}/ssh_config"}
    with subprocess.Popen(command, env=env) as started:
        while started.poll() is None and time.monotonic() - began_s < _LONGEST_S:
            if not first_s and output.exists() and output.read_bytes().count(b"\n") > 1:
                first_s = time.monotonic() - began_s
            time.sleep(0.1)
        started.kill()
    rows = output.read_bytes().count(b"\n") - 1 if output.exists() else 0
    return {"status": started.returncode, "rows": rows, "first_prediction_s": first_s,
            "end_s": time.monotonic() - began_s}  # fmt: skip


if __name__ == "__main__":
    main()
