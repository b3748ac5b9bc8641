"""Jobs of a real Slurm, whose two nodes are this machine: run through, stopped, resumed, and one node less."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cluster.ssh.schedulers import slurm_script
from penstock.recipes.metrics import newest_checkpoint
from penstock.recipes.settings import SETTINGS, read_settings
from tests.cluster.labs import until
from tests.cluster.slurm_nodes import FIRST, SECOND, SlurmNodes, needs_slurm, slurm_nodes
from tests.processes import PROGRAMS, run_python

pytestmark = needs_slurm
MODEL = "timm:vit_tiny_patch16_224,depth=2,img_size=32,patch_size=8,num_classes=10"
SLOW = "timm:vit_tiny_patch16_224,depth=2,img_size=64,patch_size=8,num_classes=10"  # long enough to lose a node
# a node refuses to start what has a credential of the second in which it ended the job, and the job fails
REVOKED_S = 2.5
JOB_S = 100.0  # of a machine that other tests use as well


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmNodes]:
    with slurm_nodes(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def nodes(running: SlurmNodes) -> Iterator[SlurmNodes]:
    yield running
    running.clear()


def verb(*words: object) -> int:
    return main([str(word) for word in words])


def output(nodes: SlurmNodes, name: str) -> str:
    return (nodes.folder / f"{name}.out").read_text()


def num_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def test_the_printed_script_predicts_as_one_process(
    nodes: SlurmNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, alone, rows = tmp_path / "cluster.toml", tmp_path / "alone.csv", tmp_path / "rows.csv"
    lines = ['name = "nodes"']
    for name in ("a", "b"):
        lines += ["[[devices]]", f'name = "{name}"', "speed = 1.0", 'memory = "1 GiB"', "threads = 2"]
    cluster.write_text("\n".join(lines))
    words = ["infer", MODEL, "--images", "digits", "--num-images", 20, "--threads", 1]
    assert verb("hosts", "run", cluster, "--slurm", "--", *words, "-o", rows, "--json", tmp_path / "rows.json") == 0
    script = capsys.readouterr().out
    assert "#SBATCH --no-kill" in script  # a stream goes on without a lost device
    job = nodes.submit("infer", script)
    until(lambda: f"StepId={job}.0 " in nodes.run("scontrol", "show", "step", "-o"), JOB_S)
    # a step has the cores of the job, and not one for each task
    assert " CPUs=4 " in nodes.run("scontrol", "show", "step", "-o", f"{job}.0")
    assert verb(*words, "--stages", 1, "-o", alone) == 0
    assert nodes.ended(job, JOB_S) == "COMPLETED", output(nodes, "infer")
    assert len(json.loads((tmp_path / "rows.json").read_text())["stages"]) == 2
    assert num_lines(rows) == 21
    assert rows.read_text() == alone.read_text()


def test_own_script_gets_its_ranks(nodes: SlurmNodes, tmp_path: Path) -> None:
    script = PROGRAMS / "slurm_script.py"
    nodes.run("srun", "-N2", "-n2", "python", str(script), str(tmp_path), timeout_s=JOB_S)
    assert run_python(str(script), str(tmp_path), deadline_s=JOB_S).status == 0
    alone, first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (None, 0, 1))
    assert (first["WORLD_SIZE"], first["MASTER_ADDR"], first["SLURMD_NODENAME"]) == ("2", FIRST, FIRST)
    assert (second["WORLD_SIZE"], second["MASTER_ADDR"], second["SLURMD_NODENAME"]) == ("2", FIRST, SECOND)
    assert len(first["outputs"]) == 12
    assert first["outputs"] == alone["outputs"]
    assert second["outputs"] == []
    assert first["losses"] == second["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def step_of(folder: Path) -> int:
    """The step of the newest whole checkpoint of a training, 0 without one."""
    if not (folder / SETTINGS).exists():
        return 0
    found = newest_checkpoint(read_settings(folder / SETTINGS))
    return int(found.name.removeprefix("step-")) if found is not None else 0


def test_a_training_is_stopped_requeued_and_resumed(nodes: SlurmNodes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", MODEL, "--data", "digits", "--set", "num_rows=200", "--batch-size", "20", "--epochs", "1000"]
    words += ["--stages", "2", "--set", "checkpoint_every=2", "-o", str(run)]
    job = nodes.submit("train", slurm_script(words, 2, threads=1), "--open-mode=append")
    until(lambda: step_of(run) >= 2, JOB_S)
    assert nodes.processes(job)

    nodes.run("scontrol", "requeue", job)
    until(lambda: nodes.waits(job), JOB_S)
    before = step_of(run)
    assert before >= 2
    time.sleep(REVOKED_S)

    def goes_on() -> bool:
        # Slurm would wait for two minutes, in case the nodes do not know yet, and may say so after it was asked not to
        nodes.start_now(job)
        time.sleep(0.5)
        return step_of(run) > before

    try:
        until(goes_on, 2 * JOB_S)
    except AssertionError:
        fields = [nodes.field(job, name) for name in ("JobState", "Reason", "Restarts", "StartTime", "EligibleTime")]
        log = [line for line in (nodes.folder / "slurmctld.log").read_text().splitlines() if "already fin" not in line]
        raise AssertionError(
            f"{fields} {before} {step_of(run)}\n{output(nodes, 'train')[-3000:]}\n{log[-20:]}"
        ) from None
    assert nodes.field(job, "Restarts") == "1"

    nodes.run("scancel", job)
    assert nodes.ended(job, JOB_S) == "CANCELLED"
    before = step_of(run)
    last = [*words, "--resume", "--steps", str(before + 2)]
    assert run_python("-m", "penstock", *last, deadline_s=JOB_S).status == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, before + 3))


def test_slurm_stream_survives_a_lost_node(nodes: SlurmNodes, tmp_path: Path) -> None:
    alone, rows = tmp_path / "alone.csv", tmp_path / "rows.csv"
    words = ["infer", SLOW, "--images", "digits", "--num-images", "400", "--threads", "1"]
    own = [*words, "-o", str(rows), "--json", f"{tmp_path}/rows.json", "--on-loss", "continue"]
    job = nodes.submit("loss", slurm_script(own, 2, threads=1, survives=True))
    until(lambda: num_lines(rows) > 3, JOB_S)
    nodes.run("scontrol", "update", f"nodename={SECOND}", "state=down", "reason=test")
    # the first node alone is left of the job, which has not failed
    assert nodes.field(job, "NodeList") == FIRST
    assert verb(*words, "--stages", 1, "-o", alone) == 0
    assert nodes.ended(job, JOB_S) == "COMPLETED", output(nodes, "loss")
    assert len(json.loads((tmp_path / "rows.json").read_text())["changes"]) == 1
    assert num_lines(rows) == 401
    assert rows.read_text() == alone.read_text()


def test_fewer_nodes_than_devices_are_one_line(nodes: SlurmNodes, tmp_path: Path) -> None:
    words = ["train", MODEL, "--data", "digits", "--processes", "3", "-o", f"{tmp_path}/run"]
    # who has but two nodes hands the script in for two
    job = nodes.submit("few", slurm_script(words, 3, threads=1), "--nodes=2")
    assert nodes.ended(job, JOB_S) == "FAILED"
    assert nodes.field(job, "ExitCode") == "2:0"
    written = [line for line in output(nodes, "few").splitlines() if not line.startswith("srun:")]
    assert len(set(written)) == 1, written
    assert re.search(r"3 processes; got 2", written[0])
    assert not (tmp_path / "run").exists()
