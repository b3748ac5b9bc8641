"""`--cluster`: a verb on the hosts of a lab."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import cluster
from penstock.cli.cluster import take_cluster
from penstock.cli.hosts import join_arguments
from penstock.errors import UsageError
from tests.cli.conftest import SMALL
from tests.cluster.labs import needs_lab
from tests.processes import lay_trap


@pytest.mark.parametrize("given", [["bench", "m", "--cluster", "a.toml"], ["bench", "--cluster=a.toml", "m"]])
def test_cluster_option_is_removed_from_the_command(given: list[str]) -> None:
    assert take_cluster(given) == (Path("a.toml"), ["bench", "m"])


def test_command_without_cluster_option_is_unchanged() -> None:
    assert take_cluster(["bench", "m"]) == (None, ["bench", "m"])
    with pytest.raises(UsageError, match="needs a file"):
        take_cluster(["bench", "--cluster"])


@pytest.mark.long
@needs_lab
def test_lab_bench_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    mark = lay_trap(tmp_path)
    hosts = "".join(f'[[hosts]]\nname = "h{i}"\ncpu = 0.9\nmemory = "4 GiB"\n' for i in range(2))
    (tmp_path / "lab.toml").write_text(f'name = "clitest"\nbandwidth = "1 Gbit/s"\n{hosts}')
    file = tmp_path / "bench.json"
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "bench", SMALL, "--stages", "2", "--num-images", "8",
         "--json", str(file), "--cluster", str(tmp_path / "lab.toml")],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert not mark.exists(), mark.read_text()
    assert done.returncode == 0, done.stderr
    said = json.loads(file.read_text())
    assert said["settings"]["devices"] == ["rank 0 on h0", "rank 1 on h1"]
    assert said["settings"]["threads"] == 1
    assert said["rows"][-1]["bit_equal"]


@needs_lab
@pytest.mark.parametrize("verb", ["infer", "bench"])
def test_a_first_host_that_is_killed_is_named(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        cluster, "module_command", lambda *_: ["sh", "-c", "[ $RANK = 0 ] || exec sleep 60; kill -9 $$"]
    )
    hosts = "".join(f'[[hosts]]\nname = "h{i}"\ncpu = 0.5\nmemory = "64 MiB"\n' for i in range(2))
    (tmp_path / "lab.toml").write_text(f'name = "clikilled"\n{hosts}')
    assert cluster.run_on_cluster(tmp_path / "lab.toml", [verb]) == 1
    assert capsys.readouterr().err == "error: h0 ended with SIGKILL\n"


def test_a_machine_joins_as_a_worker_or_with_a_verb() -> None:
    assert join_arguments([], "10.0.0.1:29500") == ["worker", "--join", "10.0.0.1:29500"]
    verb = ["train", "MODEL", "--data", "photos/"]
    assert join_arguments(["--", *verb], "10.0.0.1:29500") == [*verb, "--join", "10.0.0.1:29500"]
