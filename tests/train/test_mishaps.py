"""A process that dies while it trains: the others say so, and nobody hangs."""

import socket
import sys
import time
from pathlib import Path

import pytest

from tests.processes import ROOT, Running

SCRIPT = """
import os, signal, sys
import torch
import torch.nn.functional as F
import penstock
from tests.train.test_pipeline import images, small

pipe = penstock.Pipeline(small(), images(2)[0], microbatches=2, stages=int(sys.argv[1]))
x, y = images(8)
try:
    for step in range(1000):
        if step == 3 and pipe.trainer.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.train_step(x, y, F.cross_entropy)
except penstock.errors.PenstockError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("stages", [1, 2])
def test_a_killed_process_is_named(tmp_path: Path, stages: int) -> None:
    (tmp_path / "script.py").write_text("import penstock.errors\n" + SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(tmp_path / "script.py"), str(stages)]
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", **meeting}
    with (
        Running(command, deadline_s=60.0, env={**env, "RANK": "0"}) as first,
        Running(command, deadline_s=60.0, env={**env, "RANK": "1"}) as second,
    ):
        assert second.wait().status != 0
        begin = time.monotonic()
        finished = first.wait()
        assert time.monotonic() - begin < 15.0
    assert finished.stdout.startswith("DeviceLost rank 1 on"), finished.stdout + finished.stderr
