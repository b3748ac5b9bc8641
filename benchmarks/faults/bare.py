"""From machines with Python and sshd alone to first predictions: `python -m benchmarks.faults.bare --json FILE`."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.faults.__main__ import DEIT, make_images
from benchmarks.training.__main__ import environment

HOSTS, PORT, NUM_IMAGES = 2, 2222, 20
_LONGEST_S = 1800.0


def main() -> None:
    """Push to hosts that have nothing, stream there, and write down when what was there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.bare")
    parser.add_argument("--json", type=Path, required=True, help="the times")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        images = make_images(folder / "images", NUM_IMAGES)
        daemon = start_daemon(folder)
        try:
            rows: dict[str, Any] = {"hosts": HOSTS, "environment": environment()}
            rows["first"] = run(folder, images, folder / "first.csv")
            rows["again"] = run(folder, images, folder / "again.csv")
        finally:
            daemon.terminate()
            daemon.wait()
    given.json.write_text(json.dumps(rows, indent=1))
    print(json.dumps(rows, indent=1))


def start_daemon(folder: Path) -> "subprocess.Popen[bytes]":
    """Start an sshd on an address of loopback for each host, and write what reaches them."""
    for key in ("host_key", "user_key"):
        subprocess.run([program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    addresses = [f"127.0.0.{index + 2}" for index in range(HOSTS)]
    listen = "".join(f"ListenAddress {address}:{PORT}\n" for address in addresses)
    (folder / "sshd_config").write_text(
        f"{listen}HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nPidFile none\n"
        "PasswordAuthentication no\nUsePAM no\nStrictModes no\nPermitRootLogin yes\nMaxStartups 100\n"
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
    return subprocess.Popen([program("sshd"), "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL)


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
