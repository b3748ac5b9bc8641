"""`penstock split`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import SMALL

Run = Callable[..., tuple[int, str, str]]


def test_the_published_equal_size_split_of_deit_s(penstock: Run, tmp_path: Path) -> None:
    file = tmp_path / "split.json"
    arguments = ["timm:deit_small_patch16_224", "--stages", 4, "--cut", "equal-size", "--json", file]
    status, out, _ = penstock("split", *arguments)
    assert status == 0
    rows = json.loads(file.read_text())["stages"]
    assert [row["until"] for row in rows] == [f"blocks.{i}.norm2:after" for i in (2, 5, 8)] + [None]
    # 2 tensors of 197 x 384 floats: the residual and the norm's output
    assert rows[0]["crossing_bytes"] == 2 * 197 * 384 * 4
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    assert sum(row["parameter_bytes"] for row in rows) == 22_050_664 * 4
    for row in rows[:3]:
        assert row["until"] in out


def test_every_policy_is_compared(penstock: Run, tmp_path: Path) -> None:
    file = tmp_path / "split.json"
    assert penstock("split", SMALL, "--stages", 2, "--json", file)[0] == 0
    policies = {row["policy"]: row for row in json.loads(file.read_text())["policies"]}
    assert set(policies) == {"balanced", "equal-blocks", "equal-size", "smallest-crossing"}
    assert policies["equal-blocks"]["cuts"] == ["blocks.0:after"]
    assert policies["balanced"]["largest_share"] <= min(row["largest_share"] for row in policies.values())


def test_cuts_by_hand_and_measured_work(penstock: Run, tmp_path: Path) -> None:
    file = tmp_path / "split.json"
    cuts = ["--cut", "blocks.1.attn.proj:after", "--cut", "blocks.0:after"]
    assert penstock("split", SMALL, *cuts, "--work", "measured", "--json", file)[0] == 0
    names = [row["until"] for row in json.loads(file.read_text())["stages"]]
    assert names == ["blocks.0:after", "blocks.1.attn:after", None]


def test_all_cuts_are_listed(penstock: Run) -> None:
    out = penstock("split", SMALL, "--stages", 1, "--all")[1]
    assert "blocks.0.attn.qkv:after" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cut", "blocks.1.atn.proj:after"], "blocks.1.attn.proj:after"),
        (["--stages", 500], "use at most"),
        (["--stages", 4, "--cut", "blocks.0:after"], "2 for ['blocks.0:after']; got 4"),
        (["--cut", "equal-size", "--cut", "blocks.0:after"], "equal-size"),
        (["--cut", "fair"], "balanced"),
        (["--policy", "equal-size"], "--cut equal-blocks"),
        (["--work", "guessed"], "measured"),
    ],
)
def test_bad_input_names_the_next_step(arguments: list[object], said: str, penstock: Run) -> None:
    status, _, err = penstock("split", SMALL, *arguments)
    assert status == 2
    assert said in err
    assert err.count("\n") == 1


def test_a_model_that_does_not_export_says_why(penstock: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_model.py").write_text(
        "import torch\n"
        "class Odd(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x if x.sum().item() > 0 else -x\n"
        "def make():\n"
        "    return Odd(), (torch.ones(2, 3),)\n"
    )
    monkeypatch.chdir(tmp_path)
    status, _, err = penstock("split", "odd_model:make")
    assert status == 2
    assert err.startswith("error: Odd cannot be captured: ")
    assert err.count("\n") == 1
