"""What is said of machines, and what is run on them, without any."""

import json
import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cluster.ssh.prepare import HostCheck, check_hosts
from penstock.cluster.ssh.remote import CommandResult, Host, environment, hosts_of, remote_command, require, run_on
from penstock.cluster.ssh.schedulers import kubernetes_manifest, slurm_script
from penstock.errors import ClusterError
from penstock.spec.cluster import Cluster, parse_cluster, write_cluster
from penstock.version import LOWEST_TORCH, __version__

FILE = """
[[devices]]
name = "desk"
speed = 1.0
memory = "4 GiB"
[[devices]]
name = "board"
speed = 0.2
memory = "1 GiB"
threads = 4
address = "192.168.1.11"
ssh = "pi@board"
folder = "ann/penstock"
venv = "/opt/venv"
"""


def cluster() -> Cluster:
    return parse_cluster(FILE)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the place of ssh: every machine is this one, with `python3` beside the script."""
    path = tmp_path / "ssh"
    path.write_text(f'#!/bin/sh\nfor last; do :; done\nPATH="{tmp_path}:$PATH"\nsh -c "$last"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PENSTOCK_SSH", str(path))
    return path


def check_answer(shell: Path, script: str) -> HostCheck:
    """Check a machine whose Python is a script."""
    python = shell.with_name("python3")
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return check_hosts(cluster(), hosts_of(cluster())[1:], "c.toml")[0]


def printed(answer: dict[str, object]) -> str:
    return f"cat <<'END'\n{json.dumps(answer)}\nEND"


@pytest.mark.parametrize(("off_s", "found_s"), [(0.2, 0.0), (2e6, 2e6), (-2e6, -2e6)])
def test_slow_answer_is_not_a_wrong_clock(off_s: float, found_s: float, shell: Path) -> None:
    """The machine reads its clock at some time between the question and the answer, a second later."""
    answer = FINE | {"at_s": time.time() + off_s}
    assert check_answer(shell, f"sleep 1; {printed(answer)}").clock_s == pytest.approx(
        found_s, abs=60.0 * (found_s != 0)
    )


def test_host_has_the_target_and_paths_of_its_file() -> None:
    desk, board = hosts_of(cluster())
    assert (desk.target, desk.folder, desk.interpreter) == ("desk", "penstock", "penstock/.venv/bin/python")
    assert (board.target, board.folder, board.interpreter) == ("pi@board", "ann/penstock", "/opt/venv/bin/python")
    assert parse_cluster(write_cluster(cluster())) == cluster()
    assert [host.name for host in hosts_of(parse_cluster('feeder = "board"\n' + FILE))] == ["board", "desk"]


@pytest.mark.parametrize("field", ["ssh", "address", "folder", "venv", "python"])
def test_cluster_file_cannot_inject_ssh_options(field: str) -> None:
    line = f'{field} = "-oProxyCommand=touch /tmp/x"'
    with pytest.raises(ClusterError, match=f"{field} of a would be read as an option"):
        parse_cluster(f'[[devices]]\nname = "a"\nspeed = 1\nmemory = "1 GiB"\n{line}')


def test_remote_words_arrive_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SSH", "ssh -F 'my config'")
    command = Host("board", "pi@board").command("echo", "a b; rm -rf $HOME")
    assert command[:3] == ["ssh", "-F", "my config"]
    assert command[-2] == "pi@board"
    assert shlex.split(command[-1]) == ["echo", "a b; rm -rf $HOME"]


@pytest.mark.parametrize("login", ["echo Welcome; echo '{'", "printf bytes; printf more >&2", "true"])
def test_login_output_is_not_an_answer(shell: Path, login: str) -> None:
    shell.write_text(f'#!/bin/sh\n{login}\nfor last; do :; done\nsh -c "$last"\necho Bye\n')
    host = hosts_of(cluster())[1]
    assert run_on(host, ["printf", "%s", "an answer"]).out == b"an answer"
    assert run_on(host, ["cat"], data=b"\x00bytes\n").out == b"\x00bytes\n"
    shell.write_text(f"#!/bin/sh\n{login}\n")  # a shell that runs nothing
    with pytest.raises(ClusterError, match="board cannot be reached: its shell"):
        require(host, run_on(host, ["true"]), "asking")


def test_each_process_gets_its_rank() -> None:
    hosts = hosts_of(cluster())
    first, second = environment(hosts, ["10.0.0.1", "10.0.0.2"], [1, 4], 29500)
    assert (first["RANK"], second["RANK"], second["WORLD_SIZE"]) == ("0", "1", "2")
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == "10.0.0.1"
    assert (second["PENSTOCK_HOST"], second["PENSTOCK_CPU"]) == ("board", "4")
    words = remote_command(hosts[1], {"RANK": "1"}, ["bench", "timm:x", "--", "y"])
    assert words[3:] == ["5", "ann/penstock", "/opt/venv/bin/python", "RANK=1", "--", "bench", "timm:x", "--", "y"]


def test_missing_ssh_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SSH", "no-such-program")
    with pytest.raises(ClusterError, match="no-such-program not found"):
        run_on(Host("a", "a"), ["true"])


def test_failed_command_names_the_machine() -> None:
    host = Host("board", "pi@board")
    assert require(host, CommandResult(0, b"fine", ""), "reading") == b"fine"
    with pytest.raises(ClusterError, match=r"board .*ssh: refused; .*ssh pi@board"):
        require(host, CommandResult(255, b"", "Warning\nssh: refused\n"), "reading")
    with pytest.raises(ClusterError, match="reading failed on board: no space"):
        require(host, CommandResult(1, b"", "Traceback\nno space\n"), "reading")


FINE: dict[str, object] = {
    "python": "3.11.2", "machine": "aarch64", "cores": 4, "memory_bytes": 8 * 2**30, "free_bytes": 20 * 10**9,
    "loop_s": 0.05, "packages": {"torch": "9.9.0+cpu", "penstock": __version__},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem", "mend"),
    [
        ({}, "", ""),
        ({"python": "3.9.1"}, "Python 3.9.1, and 3.11 is needed", 'another python = "..." for board in c.toml'),
        ({"packages": None}, "no virtual environment", "penstock hosts push c.toml"),
        ({"packages": {}}, "no torch", "penstock hosts push c.toml"),
        ({"packages": {}, "free_bytes": 10**9}, "no torch, and 1 GB of disk", 'another folder = "..." for board'),
        ({"packages": {}, "free_bytes": 5 * 10**9}, "no torch, and 5 GB of disk", 'another folder = "..." for board'),
        ({"packages": {}, "free_bytes": 5 * 10**9, "takes_cpu_build": True}, "no torch", "penstock hosts push c.toml"),
        ({"bits": 32}, "32-bit Python", "the 64-bit system"),
        ({"packages": {"torch": "2.9.1"}}, f"torch 2.9.1, and {LOWEST_TORCH} is needed", "penstock hosts push c.toml"),
        ({"packages": {"torch": "9.9.0"}}, "no penstock", "penstock hosts push c.toml"),
        (
            {"packages": {"torch": "9.9.0", "penstock": "0.0"}},
            f"penstock 0.0, here {__version__}",
            "penstock hosts push",
        ),
        ({"memory_bytes": 2**29}, "537 MB of memory, c.toml has 1.07 GB", "correct memory in c.toml"),
        ({"at_s": 90061.0}, "its clock is off by -", "ssh pi@board sudo timedatectl set-ntp true"),
    ],
)
def test_missing_requirement_names_its_fix(shell: Path, change: dict[str, object], problem: str, mend: str) -> None:
    found = check_answer(shell, printed(FINE | {"at_s": time.time()} | change))
    assert found.problem.startswith(problem)
    assert bool(found.problem) == bool(problem)
    assert found.mend.startswith(mend)


@pytest.mark.parametrize(
    ("script", "problem", "mend"),
    [
        ("echo 'ssh: refused' >&2; exit 255", "ssh: refused", "ssh pi@board"),
        ("echo 'not found' >&2; exit 127", "no python3: not found", "ssh pi@board sudo apt"),
    ],
)
def test_machine_without_an_answer_is_reported(shell: Path, script: str, problem: str, mend: str) -> None:
    found = check_answer(shell, script)
    assert (found.problem, found.mend.startswith(mend)) == (problem, True)
    assert replace(found, problem="", mend="") == HostCheck(name="board", target="pi@board", reached=found.reached)


def test_jobs_of_schedulers() -> None:
    words = ["infer", "timm:deit", "--images", "my photos"]
    script = slurm_script(words, 4, threads=2)
    assert "#SBATCH --nodes=4" in script
    assert "#SBATCH --cpus-per-task=2" in script
    assert "infer timm:deit --images 'my photos'" in script
    assert "--resume" in script
    assert "--no-kill" not in script
    assert "gpus" not in script
    assert "--resume" not in slurm_script(["bench", "timm:deit"], 4, threads=2)
    surviving = slurm_script(words, 4, threads=2, survives=True)
    assert "#SBATCH --no-kill" in surviving
    assert "infer timm:deit --images 'my photos'" in surviving
    service, job = json.loads(kubernetes_manifest(words, 4, threads=2))["items"]
    assert service["spec"]["clusterIP"] == "None"
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    container = spec["template"]["spec"]["containers"][0]
    assert container["command"][-4:] == words
    assert {"name": "WORLD_SIZE", "value": "4"} in container["env"]
    assert container["resources"]["limits"] == {"cpu": "2"}


@pytest.mark.parametrize(
    ("device", "gpus"),
    [(["--device", "cuda"], 1), (["--device=cuda"], 1), (["--device", "cuda:1"], 2), (["--device", "cpu"], 0)],
)
def test_jobs_request_the_gpus_that_the_command_uses(device: list[str], gpus: int) -> None:
    words = ["infer", "timm:deit", *device, "--images", "photos"]
    lines = slurm_script(words, 4, threads=2).splitlines()
    assert [line for line in lines if "gpus" in line] == ([f"#SBATCH --gpus-per-node={gpus}"] if gpus else [])
    job = json.loads(kubernetes_manifest(words, 4, threads=2))["items"][1]
    limits = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == (str(gpus) if gpus else None)


def test_lab_file_is_refused_as_hosts(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    file = f"{tmp_path}/lab.toml"
    with open(file, "w", encoding="utf-8") as written:
        written.write('name = "lab"\n[[hosts]]\nname = "h"\ncpu = 0.5\nmemory = "1 GiB"\n')
    assert main(["hosts", "check", file]) == 2
    assert "is a lab, whose hosts are on this machine" in capsys.readouterr().err
    assert main(["hosts", "run", file]) == 2
    assert "needs a command after --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check"], ["pi@board", "/opt/venv/bin/python ann/penstock"]),
        (["push", "-r", "einops"], ["board: changed files of ann/penstock/src (", "/opt/venv gets torch", "einops"]),
        (["push", "--no-install"], ["desk: changed files of penstock/src ("]),
        (["measure", "--seconds", "3"], ["pi@board", "hosts measure files/cluster.toml --seconds 3.0"]),
    ],
)
def test_dry_run_connects_to_no_machine(
    words: list[str], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PENSTOCK_SSH", f"{tmp_path}/no-such-program")
    (tmp_path / "cluster.toml").write_text(FILE)
    verb, *options = words
    assert main(["hosts", verb, str(tmp_path / "cluster.toml"), "--dry-run", *options]) == 0
    out = capsys.readouterr().out
    for part in said:
        assert part in out
    assert ("gets" in out) == (verb == "push" and "--no-install" not in options)
