"""`penstock plan`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.plan.check import read_plan
from penstock.spec.cluster import write_cluster
from penstock.spec.profile import Unit, read_profile, write_profile
from penstock.tracing.record import RECORDING_BYTES
from tests.spec.samples import make_cluster, make_profile

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A profile of twenty units of 1 MB and four unequal devices on slow links."""
    units = tuple(Unit(forward_s=(0.1,), parameters=((f"w{index}", 10**6),)) for index in range(20))
    profile = make_profile([0.0] * 20, [1000.0] * 21, units=units, send_s_per_byte=1e-6)
    write_profile(tmp_path / "profile.json", profile)
    cluster = make_cluster(1, 0.8, 0.5, 0.25, memory_bytes=RECORDING_BYTES + 12 * 10**6, bandwidth_bytes_per_s=1e4)
    (tmp_path / "cluster.toml").write_text(write_cluster(cluster))
    return tmp_path / "profile.json", tmp_path / "cluster.toml"


def test_a_plan_is_written_and_printed(penstock: Run, files: tuple[Path, Path], tmp_path: Path) -> None:
    status, out, err = penstock("plan", *files, "-o", tmp_path / "plan.json", "--num-rows", 40)
    assert (status, err) == (0, "")
    plan = read_plan(tmp_path / "plan.json")
    assert plan.prediction.num_rows == 40
    assert "line: 4 stages on 4 devices, 1 row per microbatch" in out
    assert "of 45.6 MB" in out


def test_memory_for_a_trace_is_in_the_plan(penstock: Run, files: tuple[Path, Path], tmp_path: Path) -> None:
    needs = []
    for option in ("--trace", "--no-trace"):
        assert penstock("plan", *files, option, "--no-alternate", "-o", tmp_path / "plan.json")[0] == 0
        loads = read_plan(tmp_path / "plan.json").prediction.devices
        needs.append(min(load.memory_bytes for load in loads))
    assert needs[0] > RECORDING_BYTES > needs[1]


def test_explain_names_the_pace_and_the_runner_up(penstock: Run, files: tuple[Path, Path], tmp_path: Path) -> None:
    status, out, _ = penstock("plan", *files, "--explain", "--json", tmp_path / "out.json")
    assert status == 0
    assert "the pace is set by" in out
    assert "the runner-up: " in out
    assert "replicas" in out
    assert "one device more like a" in out
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["plan"]["model"] == "line"
    assert result["helps"][0]["gain"] > 0.2


@pytest.mark.parametrize(("spread", "noise", "said"), [(0.01, 0.1, "below 10.0% are not decided"), (0.0005, 0.005, "")])
def test_differences_below_the_noise_of_the_profile_are_not_decided(
    spread: float, noise: float, said: str, penstock: Run, files: tuple[Path, Path], tmp_path: Path
) -> None:
    measured = read_profile(files[0])
    units = tuple(replace(unit, forward_spread_s=(spread,)) for unit in measured.units)
    write_profile(files[0], replace(measured, units=units))
    status, out, _ = penstock("plan", *files, "--json", tmp_path / "out.json")
    assert status == 0
    lines = [line for line in out.splitlines() if "not decided" in line]
    assert len(lines) == bool(said)
    assert said in out
    assert json.loads((tmp_path / "out.json").read_text())["noise"] == pytest.approx(noise)


def test_plan_reads_a_lab_file(penstock: Run, files: tuple[Path, Path], tmp_path: Path) -> None:
    lab = tmp_path / "lab.toml"
    lab.write_text('[[hosts]]\nname = "h0"\ncpu = 0.5\nmemory = "1 GiB"\n')
    status, out, _ = penstock("plan", files[0], lab)
    assert status == 0
    assert "1 stage on 1 device" in out
    assert "0.25 rows/s" in out


def test_plan_follows_the_chosen_aim(penstock: Run, files: tuple[Path, Path], tmp_path: Path) -> None:
    assert penstock("plan", *files, "--aim", "latency", "-o", tmp_path / "l.json")[0] == 0
    assert len(read_plan(tmp_path / "l.json").devices) == 2  # no device holds all
    target = ["--aim", "devices", "--target", "0.85", "--no-alternate", "--no-replicas"]
    assert penstock("plan", *files, *target, "-o", tmp_path / "d.json")[0] == 0
    assert len(read_plan(tmp_path / "d.json").devices) == 2


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--aim", "speed"], 2, "--aim must be one of throughput, latency, devices; got 'speed'"),
        (["--target", "3"], 2, "--target needs --aim devices"),
        (["--rows", "0"], 2, "--rows must be integers of at least 1"),
        (["--schedule", "zigzag"], 2, "1f1b, interleaved, zero-bubble; got 'zigzag'"),
        (["--aim", "devices", "--target", "99"], 1, "no plan reaches 99 rows/s"),
        (["--schedule", "1f1b", "--microbatches", "4"], 1, "needs backward seconds"),
    ],
)
def test_impossible_plan_is_one_line(
    arguments: list[str], status: int, said: str, penstock: Run, files: tuple[Path, Path]
) -> None:
    ended, _, err = penstock("plan", *files, *arguments)
    assert ended == status
    assert said in err
    assert err.count("\n") == 1


def test_a_model_too_large(penstock: Run, files: tuple[Path, Path], tmp_path: Path) -> None:
    small = tmp_path / "small.toml"
    small.write_text(write_cluster(make_cluster(1, 1, memory_bytes=RECORDING_BYTES + 6 * 10**6)))
    status, _, err = penstock("plan", files[0], small)
    assert status == 1
    assert "the model does not fit: it needs 20 MB" in err
    assert "on each of 2 devices" in err
