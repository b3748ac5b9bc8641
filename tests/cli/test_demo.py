"""`penstock demo`, shortened."""

import json
import re
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., tuple[int, str, str]]


def test_the_whole_flow_learns_and_agrees(penstock: Run, tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    status, out, _ = penstock("demo", "--epochs", 2, "--json", file)
    assert status == 0
    said = json.loads(file.read_text())
    assert said["accuracy"] > 0.2  # twice chance after two passes
    assert [row["stages"] for row in said["rows"]] == [1, 2, 4]
    assert all(row["bit_equal"] for row in said["rows"])
    assert all(row["accuracy"] == said["accuracy"] for row in said["rows"])
    assert "Every output equals the one of a single process" in out
    assert re.findall(r"penstock (\w+) ", out.partition("Next")[2]) == ["infer", "generate", "train"]
