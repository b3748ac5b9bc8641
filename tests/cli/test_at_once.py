"""Wrong usage comes at once: no verb imports torch to read its options, and one process of a machine says it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.main import _HELP

pytestmark = pytest.mark.fresh  # not forked from a process that has torch

COUNTS = (
    "import sys\nfrom penstock.cli.main import main\nstatus = main(sys.argv[1:])\nprint('torch' in sys.modules, status)"
)


@pytest.mark.parametrize("verb", sorted(_HELP))
def test_no_verb_needs_torch_to_be_called_wrongly(verb: str) -> None:
    command = [sys.executable, "-c", COUNTS, verb, "--no-such-option"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.stdout.splitlines()[-1] == "False 2"


@pytest.mark.parametrize("arguments", [["split", "timm:vit", "--no-such"], ["infer", "nothing", "--images", "none"]])
def test_one_process_of_torchrun_says_what_is_wrong(arguments: list[str], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", "0",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "penstock", *arguments]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK")}
    ended = subprocess.run(torchrun, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path, env=env)
    said = [line for line in ended.stderr.splitlines() if line.lower().startswith("error:")]
    assert len(said) == 1, ended.stderr
    assert "frame #" not in ended.stderr
