"""Streams with two workers of this machine, and checks that they listen nowhere but in a folder of this account."""

import os
import signal
import stat
import sys
import tempfile
from pathlib import Path

import psutil
import torch

from penstock.pipeline import Pipeline
from tests.worlds import tower, tower_inputs

model, inputs = tower(), tower_inputs(30)
torch.set_num_threads(1)
with Pipeline(model, inputs[0], stages=2, threads=1) as pipe:
    outputs = list(pipe.stream(inputs))
    processes = [psutil.Process(), *psutil.Process().children()]
    assert len(processes) == 3
    listening = [c for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert not listening, listening
    (folder,) = Path(tempfile.gettempdir()).glob("penstock-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    if sys.argv[1:] == ["killed"]:
        os.kill(os.getpid(), signal.SIGKILL)
assert not folder.exists()
with torch.no_grad():
    assert all(torch.equal(one, model(*two)) for one, two in zip(outputs, inputs, strict=True))
