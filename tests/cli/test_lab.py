import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.cli.lab import app
from penstock.cluster.lab import read_lab
from penstock.errors import ClusterError, RunError, UsageError

GIB = 2**30


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def done(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def refused(*arguments: object) -> str:
    result = invoke(*arguments)
    assert isinstance(result.exception, ClusterError), (result.output, result.exception)
    return str(result.exception)


def test_init_writes_a_lab_file(tmp_path: Path) -> None:
    file, record = tmp_path / "lab.toml", tmp_path / "lab.json"
    said = done("init", "--hosts", 3, "--cpu", 0.25, "--memory", "1 GiB", "-o", file, "--json", record)
    assert said == f"{file}: 3 hosts with 0.25 of a core, 1.07 GB, 1 Gbit/s\n"
    spec = read_lab(file)
    assert [(host.name, host.cpu, host.memory_bytes) for host in spec.hosts] == [
        (f"host{index}", 0.25, GIB) for index in range(3)
    ]
    assert json.loads(record.read_text())["hosts"][2]["bandwidth_bytes_per_s"] == 125e6


def test_init_does_not_overwrite(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text("mine")
    assert refused("init", "-o", file) == f"{file} exists, and init does not overwrite files; use --force or another -o"
    assert file.read_text() == "mine"
    done("init", "--like", "raspberry-pi-3", "--bandwidth", "10 Mbit/s", "--force", "-o", file)
    assert read_lab(file).hosts[0].bandwidth_bytes_per_s == 1.25e6


def test_invalid_lab_options_are_refused(tmp_path: Path) -> None:
    assert "did you mean raspberry-pi-5" in refused("init", "--like", "raspberrypi5", "-o", tmp_path / "x")
    assert "at least one host; got 0" in refused("init", "--hosts", 0, "-o", tmp_path / "x")
    assert "penstock lab init" in refused("down", tmp_path / "none.toml")


def test_a_run_needs_a_command(tmp_path: Path) -> None:
    assert invoke("run", tmp_path / "lab.toml").exit_code == 2


@pytest.mark.root
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="labs need root, ip and tc",
)
def test_every_verb_on_a_real_lab(tmp_path: Path) -> None:
    name = f"c{os.getpid()}"
    file, record = tmp_path / "lab.toml", tmp_path / "out.json"
    done("init", "--hosts", 2, "--memory", "256 MiB", "--name", name, "-o", file)
    assert done("status", file) == f"{name} is down\n"
    try:
        assert done("up", file).startswith(f"{name} is up\n  host0  10.77.0.1  cpu ")
        assert done("slow", name, "host1", "--cpu", 0.2) == "host1 has 0.2 of a core\n"
        assert done("slow", name, "host1", "--bandwidth", "20 Mbit/s") == "host1 has 20 Mbit/s\n"
        assert isinstance(invoke("slow", name, "host1").exception, UsageError)
        assert done("cut", name, "host1") == "host1 is cut off\n"
        done("status", name, "--json", record)
        host = json.loads(record.read_text())["hosts"][1]
        assert (host["cpu"], host["cut"], host["address"]) == (0.2, True, "10.77.0.2")
        assert host["bandwidth_bytes_per_s"] == 2_500_000
        assert done("cut", file, "host1", "--restore") == "host1 is connected\n"
        assert done("kill", name, "host1") == "host1: 0 processes ended\n"
        said = done("run", file, "--json", record, "--", "sh", "-c", "echo $PENSTOCK_HOST")
        assert sorted(said.splitlines()) == ["host0 | host0", "host1 | host1"]
        assert json.loads(record.read_text())["exit_codes"] == {"host0": 0, "host1": 0}
        failed = invoke("run", file, "--on", "host1", "--", "sh", "-c", "exit 3")
        assert isinstance(failed.exception, RunError)
        assert "host1 ended with status 3" in str(failed.exception)
        assert "must be up" not in failed.output
        last = ["--on-loss", "continue", "--", "sh", "-c"]
        said = done("run", file, "--json", record, *last, "[ $RANK = 1 ] && kill -9 $$; sleep 1; echo $PENSTOCK_HOST")
        assert sorted(said.splitlines()) == [
            "host0 | host0",
            "note: host1 ended with SIGKILL; the run continued on the other hosts",
        ]
        assert json.loads(record.read_text())["exit_codes"] == {"host0": 0, "host1": -9}
        failed = invoke("run", file, *last, "[ $RANK = 1 ] || exit 3; sleep 60")
        assert isinstance(failed.exception, RunError)
        assert "rank 0 must exit with status 0, but host0 ended with status 3" in str(failed.exception)
        assert isinstance(invoke("run", file, "--on-loss", "wait", "--", "true").exception, UsageError)
    finally:
        assert done("down", name) == f"{name} is down\n"
    assert done("down", file) == f"{name} is down\n"
    # without a lab that is up, run puts it up and takes it down
    done("run", file, "--", "true")
    assert done("status", file) == f"{name} is down\n"
    assert f"no lab '{name}' is up" in refused("status", name)
