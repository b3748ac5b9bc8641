"""Machines by ssh, against real sshd processes on the hosts of a lab: looked at, prepared, run on, and left clean."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from penstock.cli.main import main
from penstock.cluster.lab import HostSpec, LabSpec
from penstock.cluster.ssh.prepare import check_hosts, push
from penstock.cluster.ssh.remote import RemoteRun, environment, hosts_of, remote_command
from penstock.spec.cluster import read_cluster
from penstock.version import __version__
from tests.cluster.labs import until
from tests.cluster.sshd import SshLab, needs_sshd, ssh_lab
from tests.processes import PROGRAMS, ROOT

pytestmark = needs_sshd
NUM_HOSTS = 2
MODEL = "timm:vit_tiny_patch16_224,img_size=8,patch_size=2,depth=2,embed_dim=16,num_heads=2,in_chans=1,num_classes=10"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshLab]:
    hosts = tuple(
        HostSpec(name=f"board{index}", cpu=0.6, memory_bytes=1000 * 2**20, bandwidth_bytes_per_s=125_000_000.0)
        for index in range(NUM_HOSTS)
    )
    with ssh_lab(LabSpec(name=f"s{os.getpid()}", hosts=hosts), tmp_path_factory.mktemp("ssh")) as made:
        yield made


def verb(*words: object) -> int:
    return main([str(word) for word in words])


def of_machine(name: str, word: str) -> list[psutil.Process]:
    """The processes that were started for a machine, apart from sshd's."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        try:
            if (
                word in " ".join(process.info["cmdline"] or [])
                and (process.info["environ"] or {}).get("PENSTOCK_HOST") == name
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_hosts_are_pushed_checked_and_run(machines: SshLab, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # nothing is there yet: every machine says what is missing, and by what it is mended
    assert verb("hosts", "check", machines.cluster, "--json", tmp_path / "check.json") == 1
    out = capsys.readouterr().out
    assert f"board1: no penstock; penstock hosts push {machines.cluster}" in out
    found = json.loads((tmp_path / "check.json").read_text())["hosts"]
    assert [each["name"] for each in found] == ["board0", "board1"]
    assert all(each["reached"] and each["cores"] >= 1 and abs(each["clock_s"]) < 2 for each in found)

    assert verb("hosts", "push", machines.cluster, "--no-install") == 0
    assert (machines.folder("board1") / "src/penstock/version.py").read_text()
    sent = capsys.readouterr().out
    assert "board1: " in sent
    assert "unchanged" not in sent
    # only what has changed goes again, and files of others stay
    (machines.folder("board1") / "src/penstock/version.py").write_text("__version__ = '0'")
    (machines.folder("board1") / "src/penstock/stale.py").write_text("")
    assert verb("hosts", "check", machines.cluster) == 1
    assert f"board1: penstock 0, here {__version__}; penstock hosts push" in capsys.readouterr().out
    assert verb("hosts", "push", machines.cluster, "--no-install") == 0
    sent = capsys.readouterr().out
    assert sent.count("unchanged") == 1
    assert (machines.folder("board1") / "src/penstock/stale.py").exists()
    assert verb("hosts", "check", machines.cluster) == 0
    assert capsys.readouterr().out.endswith("all machines are ready\n")

    wanted = tmp_path / "predictions.csv"
    words = ["infer", MODEL, "--images", "digits", "--num-images", 20, "-o", wanted]
    status = verb(*words, "--cluster", machines.cluster)
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert "20 images at" in captured.out
    assert "through 2 stages" in captured.out
    assert len(wanted.read_text().splitlines()) == 21
    assert verb("hosts", "run", machines.cluster, "--dry-run", "--", *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == NUM_HOSTS
    assert all(f"RANK={rank}" in line and "MASTER_ADDR=10.77.0.1" in line for rank, line in enumerate(lines))
    for index in range(NUM_HOSTS):
        assert of_machine(f"board{index}", "penstock") == []


def test_remote_processes_end_with_their_caller(machines: SshLab) -> None:
    push(hosts_of(read_cluster(machines.cluster)), install=False)
    waits = ["worker", "--join", "10.77.0.9:1", "--patience", "500"]
    command = [sys.executable, "-m", "penstock", "hosts", "run", str(machines.cluster), "--", *waits]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": f"{ROOT}/src"})
    until(lambda: all(of_machine(f"board{index}", "worker") for index in range(NUM_HOSTS)), 60)
    process.kill()  # it says nothing to anybody
    process.wait(30)
    until(lambda: not any(of_machine(f"board{index}", "worker") for index in range(NUM_HOSTS)), 20)


def test_a_scan_finds_what_the_security_page_names(machines: SshLab, tmp_path: Path) -> None:
    push(hosts_of(read_cluster(machines.cluster)), install=False)
    rows = tmp_path / "rows.csv"
    slow = "timm:vit_small_patch16_224,img_size=64,patch_size=8,num_classes=10"  # beyond the end of the scan
    words = ["infer", slow, "--images", "digits", "-o", str(rows)]
    command = [sys.executable, "-m", "penstock", "hosts", "run", str(machines.cluster), "--", *words]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": f"{ROOT}/src"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: rows.exists() and rows.read_text().count("\n") > 3, 90)
        name = machines.lab.spec.name
        inside = ["ip", "netns", "exec", f"penstock.{name}.board0"]
        listening = subprocess.run([*inside, "ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
        places = [line.split()[3].rsplit(":", 1) for line in listening.splitlines()]
        own = sorted(int(port) for address, port in places if address == "10.77.0.1")
        # the rendezvous, this process's board and its data; nothing of it on any other address
        assert len(own) == 3, listening
        assert 29500 in own
        assert {port for address, port in places if address != "10.77.0.1"} == {"22"}
        program = [sys.executable, str(PROGRAMS / "scan_ports.py"), "10.77.0.1"]
        scan = ["ip", "netns", "exec", f"penstock.{name}.board1", *program]
        found = subprocess.run(scan, capture_output=True, text=True, check=True).stdout.split()
        assert sorted(map(int, found)) == sorted([22, *own])
        # the key is in a file of this account alone, and in no command line and no environment
        keys = list(machines.folder("board0").glob("run-*.key"))
        assert [key.stat().st_mode & 0o777 for key in keys] == [0o600]
        secret = keys[0].read_text().strip()
        for seen in psutil.process_iter(["cmdline", "environ"]):
            assert secret not in " ".join(seen.info["cmdline"] or [])
            assert secret not in (seen.info["environ"] or {}).values()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert not list(machines.folder("board0").glob("run-*.key"))


def test_first_failure_ends_all_machines(machines: SshLab) -> None:
    cluster = read_cluster(machines.cluster)
    hosts = hosts_of(cluster)
    variables = environment(hosts, ["10.77.0.1"] * NUM_HOSTS, [1] * NUM_HOSTS, 29500)
    waits = ["worker", "--join", "10.77.0.9:1", "--patience", "500"]
    commands = [remote_command(host, own, waits) for host, own in zip(hosts, variables, strict=True)]
    commands[1] = ["sh", "-c", "sleep 4; exit 3"]
    began_s = time.monotonic()
    with RemoteRun(hosts, commands, output=lambda _line: None) as run:
        codes = run.wait(60)
    assert codes["board1"] == 3
    assert codes["board0"]
    assert run.first_failure is not None
    assert time.monotonic() - began_s < 40
    assert not any(of_machine(f"board{index}", "worker") for index in range(NUM_HOSTS))


def test_unreachable_machine_is_reported(machines: SshLab) -> None:
    machines.lab.cut("board1")
    try:
        cluster = read_cluster(machines.cluster)
        hosts = [replace(host, connect_s=2) for host in hosts_of(cluster)]
        found = {each.name: each for each in check_hosts(cluster, hosts, "cluster.toml")}
    finally:
        machines.lab.restore("board1")
    assert found["board0"].reached
    assert not found["board1"].reached
    assert found["board1"].mend == "ssh 10.77.0.2"
    assert "timed out" in found["board1"].problem or "No route" in found["board1"].problem
