"""Weights never pile up: a worker holds its stage, the process that feeds holds nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.zoo.models.models import load_model
from penstock.zoo.weights.weight_files import save_weights

MODEL = "timm:vit_base_patch16_224"
MIB = 2**20

# In a process of its own: peak memory never goes down again, so what ran before would hide what runs now.
SCRIPT = """
import json, os, sys
from pathlib import Path
import timm, torch, torch.export, torch._dynamo, sympy
import penstock
import penstock.stream.streaming_pipeline
from penstock.zoo.models.models import load_model

def read(pid, field):
    lines = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    return int(lines[field].split()[0]) * 1024

before = read(os.getpid(), "VmHWM")
zoo = load_model(sys.argv[1], weights=Path(sys.argv[2]))
image = torch.randn(1, 3, 224, 224)
with penstock.Pipeline(zoo.module, (image,), stages=4, threads=1, weights=zoo.weights) as pipe:
    list(pipe.stream(image for _ in range(4)))
    stages = penstock.graph.stages.divide(pipe.graph, pipe.cuts)
    print(json.dumps({
        "feeder": read(os.getpid(), "VmHWM") - before,
        "workers": [read(pid, "RssAnon") for pid in pipe._streaming.world.workers.pids],
        "stages": [program.state_bytes() for program in stages],
    }))
"""


@pytest.mark.fresh
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads peak memory from /proc")
def test_each_process_holds_its_own_share(tmp_path: Path) -> None:
    import json

    weights = tmp_path / "vit.safetensors"
    model_bytes = save_weights(load_model(MODEL).weights, weights)
    said = json.loads(_python(SCRIPT, MODEL, str(weights)))
    assert sum(said["stages"]) == pytest.approx(model_bytes, rel=0.01)
    worker_bytes = int(_python(
        "import sys\n"
        "import penstock.deploy.worker\n"
        "assert not {'sympy', 'timm', 'transformers', 'penstock.graph.capture'} & set(sys.modules)\n"
        "print([int(line.split()[1]) for line in open('/proc/self/status') if 'RssAnon' in line][0] * 1024)"
    ))  # fmt: skip
    # anonymous memory: how much of the libraries' files is mapped depends on what the machine has cached
    for held, stage in zip(said["workers"], said["stages"], strict=True):
        # 24 MiB for activations, message buffers and the libraries' own work space
        assert held <= worker_bytes + 1.15 * stage + 24 * MIB
    assert said["feeder"] < model_bytes / 2


def _python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
