"""Wrong usage comes at once: no verb imports torch to read its options, and one process of a machine says it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.main import _HELP

pytestmark = pytest.mark.fresh  # not forked from a process that has torch

COUNTS = """
import sys
from penstock.cli.main import main
for verb in sys.argv[1:]:
    status = main([verb, "--no-such-option"])
    print(verb, "torch" in sys.modules, status, sep=":")
"""


def test_usage_errors_need_no_torch() -> None:
    command = [sys.executable, "-c", COUNTS, *sorted(_HELP)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.stdout.split() == [f"{verb}:False:2" for verb in sorted(_HELP)]


@pytest.mark.long
@pytest.mark.parametrize("arguments", [["infer", "nothing", "--images", "none"], ["split", "timm:vit", "--no-such"]])
def test_one_process_of_torchrun_says_what_is_wrong(arguments: list[str], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", "0",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "penstock", *arguments]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK")}
    ended = subprocess.run(torchrun, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path, env=env)
    said = [line for line in ended.stderr.splitlines() if line.lower().startswith("error:")]
    assert len(said) == 1, ended.stderr
    assert "frame #" not in ended.stderr
