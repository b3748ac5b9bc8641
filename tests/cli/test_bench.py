"""`penstock bench`: the rows that other programs read."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import SMALL
from tests.models import OLD_TORCH
from tests.processes import free_port

Run = Callable[..., tuple[int, str, str]]
FIELDS = {
    "mode", "stages", "policy", "images_per_second", "speedup", "bit_equal", "max_abs_difference", "fill_s",
    "efficiency", "ceiling_images_per_second", "peer_images_per_second", "per_stage",
}  # fmt: skip


@pytest.mark.long
def test_rows_of_every_stage_count_and_policy(penstock: Run, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    arguments = ["--stages", "1,2", "--set", "policy=equal-blocks,balanced", "--num-images", 12, "--json", file]
    page = tmp_path / "page.html"
    status, out, err = penstock("bench", SMALL, *arguments, "--cut", "blocks.0.attn:after", "--report", page)
    assert status == 0
    assert re.search(r"row 2 of 5, about \d+ (s|min) to go\n1 stage, equal-blocks: [\d.]+ images/s, [\d.]+ times", err)
    rows = json.loads(file.read_text())["rows"]
    assert [(row["mode"], row["stages"], row["policy"]) for row in rows] == [
        ("serial", 1, None), ("pipeline", 1, "equal-blocks"), ("pipeline", 2, "equal-blocks"),
        ("pipeline", 2, "balanced"), ("pipeline", 2, "by hand"),
    ]  # fmt: skip
    for row in rows:
        assert set(row) >= FIELDS
        assert row["bit_equal"]
        assert row["max_abs_difference"] == 0
    for row in rows[1:]:
        assert len(row["per_stage"]) == row["stages"]
        assert set(row["per_stage"][0]) >= {"compute_s", "wait_s", "send_s"}
    assert out.splitlines()[-1].startswith("speed-up ")
    for head in ("runtime", "images/s", "speed-up, times", "efficiency, of 1", "fill, s", "compute, s per pass"):
        assert head in out
    assert "by the runtime too" not in out
    words = page.read_text(encoding="utf-8")
    assert "The outputs of all 4 pipelines are bit for bit those of one process." in words
    assert "2 stages, cut by hand at blocks.0.attn:after, splits at" in words


def test_finished_rows_are_kept_if_a_later_one_fails(penstock: Run, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    given = ["--stages", 1, "--num-images", 8, "--cut", "nowhere:after", "--json", file]
    assert penstock("bench", SMALL, *given)[0] == 2
    assert [row["mode"] for row in json.loads(file.read_text())["rows"]] == ["serial", "pipeline"]


def test_another_runtime_beside_eager_in_one_process(penstock: Run, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    given = ["--stages", "1,2", "--num-images", 8, "--runtime", "onnxruntime:int8", "--json", file]
    status, out, _ = penstock("bench", SMALL, *given)
    assert status == 0
    found = json.loads(file.read_text())
    assert found["settings"]["runtime"] == "onnxruntime:int8"
    serial, *rows = found["rows"]
    assert serial["runtime"] == "eager"
    assert "Rows on onnxruntime:int8 differ from one process by the runtime too" in out
    for row in rows:
        assert row["runtime"] == "onnxruntime:int8"
        assert 0 < row["max_abs_difference"] < 0.1
        assert row["top1_agreement"] >= 0.5
    assert "top-1" in out


@pytest.mark.skipif(OLD_TORCH, reason="torch.distributed.pipelining of 2.10 takes other stages")
def test_bench_runs_a_peer(penstock: Run, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    assert penstock("bench", SMALL, "--stages", 2, "--num-images", 8, "--set", "peer=true", "--json", file)[0] == 0
    rows = {row["mode"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["peer"]["cuts"] == ["blocks.1:before"]
    assert rows["pipeline"]["peer_images_per_second"] == rows["peer"]["images_per_second"] > 0


@pytest.mark.parametrize("verb", ["bench --stages 1", "profile -o x.json", "compress --max-drop 0.1 --data digits"])
def test_a_runtime_that_this_processor_lacks_is_refused_first(
    verb: str, penstock: Run, set_bfloat16: Callable[[bool], None]
) -> None:
    set_bfloat16(False)
    name, *options = verb.split()
    status, _, err = penstock(name, "timm:no_such_model", *options, "--runtime", "eager:bfloat16")
    assert (status, "avx512_bf16" in err) == (1, True), err


@pytest.mark.parametrize(
    "arguments",
    ["--stages 1,two", "--stages 0", "--policy fair", "--runtime abacus", "--device tpu", "--device cuda --peer"],
)
def test_invalid_bench_options_are_refused(arguments: str, penstock: Run) -> None:
    assert penstock("bench", SMALL, *arguments.split())[0] == 2


@pytest.mark.long
def test_the_script_for_each_machine_ends_with_the_speed_up(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "run.sh"
    environment = {**os.environ, "PORT": "0", "PYTHONWARNINGS": "ignore"}
    environment["PORT"] = str(free_port())
    options = ["--json", str(tmp_path / "bench.json")]
    done = subprocess.run(
        ["bash", str(script), "1", "2", "0", "127.0.0.1", SMALL, *options, "--num-images", "8"],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("speed-up ")
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["stages"] for row in rows] == [1, 2]
    assert all(row["bit_equal"] for row in rows)


def test_a_port_in_use_is_said_in_one_line(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment = {
            **os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "bench", SMALL, "--stages", "1"],
            capture_output=True, text=True, timeout=60, env=environment, check=False, cwd=tmp_path,
        )  # fmt: skip
    assert done.returncode == 1
    assert "is in use" in done.stderr.splitlines()[-1]
