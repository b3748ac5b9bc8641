"""`penstock compress` from the command line."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.compress.test_steps import MODEL


def test_compress_writes_its_frontier(penstock: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    few = ["--data", "digits", "--num-rows", 100, "--num-test-rows", 20, "--epochs", 0, "--importance", "magnitude"]
    few += ["--runtime", "eager", "--ratio", 0.4, "-o", tmp_path / "run", "--json", tmp_path / "found.json"]
    status, out, err = penstock("compress", MODEL, *few, "--max-drop", 0.9)
    assert status == 0, err
    assert "40%" in out
    assert (tmp_path / "run" / "frontier.png").stat().st_size > 1000
    assert len(json.loads((tmp_path / "found.json").read_text())["rows"]) == 2
    status, _, err = penstock("compress", MODEL, *few, "--accuracy-floor", 0.999)
    assert status == 1
    assert "99.90% right; the nearest is" in err
    status, _, err = penstock("compress", MODEL, *few)
    assert (status, err.count("\n")) == (2, 1)
