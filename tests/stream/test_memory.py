"""Weights never pile up: a worker holds its stage, the process that feeds holds nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.zoo.models.models import load_model
from penstock.zoo.weights.weight_files import save_weights
from tests.processes import PROGRAMS

MODEL = "timm:vit_base_patch16_224"
MIB = 2**20


@pytest.mark.fresh
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads peak memory from /proc")
def test_each_process_holds_its_own_share(tmp_path: Path) -> None:
    import json

    weights = tmp_path / "vit.safetensors"
    model_bytes = save_weights(load_model(MODEL).weights, weights)
    # in a process of its own: peak memory never goes down again, so what ran before would hide what runs now
    said = json.loads(_python(str(PROGRAMS / "stream_memory.py"), MODEL, str(weights)))
    assert sum(said["stages"]) == pytest.approx(model_bytes, rel=0.01)
    worker_bytes = int(
        _python(
            "-c",
            "import sys\n"
            "import penstock.deploy.worker\n"
            "assert not {'sympy', 'timm', 'transformers', 'penstock.graph.capture'} & set(sys.modules)\n"
            "print([int(line.split()[1]) for line in open('/proc/self/status') if 'RssAnon' in line][0] * 1024)",
        )
    )
    # anonymous memory: how much of the libraries' files is mapped depends on what the machine has cached
    for held, stage in zip(said["workers"], said["stages"], strict=True):
        # 24 MiB for activations, message buffers and the libraries' own work space
        assert held <= worker_bytes + 1.15 * stage + 24 * MIB
    assert said["feeder"] < model_bytes / 2


def _python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
