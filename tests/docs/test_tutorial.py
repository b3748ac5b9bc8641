"""The tutorial's scripts are those in examples/, they run, and few lines differ."""

import difflib
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.processes import ROOT, run_python

SCRIPTS = ("digits_plain.py", "digits_pipeline.py")


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL)


def run(folder: Path, name: str, code: str, *before: str) -> list[str]:
    """Run a block as a script in a folder of its own; gives the losses that it printed."""
    folder.mkdir()
    (folder / name).write_text(f"import os; os.chdir({str(folder)!r})\n{code}")
    finished = run_python(*before, str(folder / name), deadline_s=120.0)
    assert finished.status == 0, finished.stderr
    # processes share a line now and then
    return re.findall(r"epoch \d: loss \d\.\d{4}", finished.stdout)


def test_the_scripts_are_the_examples() -> None:
    assert blocks() == [(ROOT / "examples" / name).read_text() for name in SCRIPTS]


def test_parallel_script_differs_in_at_most_six_lines() -> None:
    plain, pipeline = (block.splitlines() for block in blocks())
    changes = [line for line in difflib.ndiff(plain, pipeline) if line[0] in "+-" and line[2:].strip()]
    added, removed = ([line for line in changes if line[0] == sign] for sign in "+-")
    assert len(added) <= 6, added
    assert len(removed) <= 6, removed


@pytest.mark.long
def test_both_scripts_learn_and_processes_print_the_same_loss(tmp_path: Path) -> None:
    plain, pipeline = blocks()
    printed = run(tmp_path / "plain", "plain.py", plain)
    alone = run(tmp_path / "alone", "script.py", pipeline)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    together = run(tmp_path / "together", "script.py", pipeline, *torchrun)
    for lines in (printed, alone):
        losses = [float(line.rpartition(" ")[2]) for line in lines]
        assert len(losses) == 3
        assert losses[2] < 1.5, lines  # a guess has 2.3
    assert sorted(together) == sorted(alone * 2), (together, alone)
    assert len(load_file(tmp_path / "together" / "digits.safetensors")) == 8
