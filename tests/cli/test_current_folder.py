"""What lies in the current folder by chance is not imported, by no verb and by no process that one starts."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from penstock.measure.profiler import worker_bytes
from tests.cli.conftest import SMALL
from tests.processes import ROOT, lay_trap
from tests.recipes.test_fit import VIT

# as the installed `penstock` starts
SCRIPT = "import sys\nfrom penstock.cli.main import main\nsys.exit(main())\n"
USERS_MODEL = """
import fractions, timm, torch
from users_layers import make_layer

def make():
    return torch.nn.Sequential(*(make_layer() for _ in range(4))), (torch.zeros(2, 8),)
"""
USERS_LAYERS = """
def make_layer():
    from torch import nn
    import users_sizes
    return nn.Linear(users_sizes.WIDTH, users_sizes.WIDTH)
"""


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder with a picture, and modules that leave the file `mark` beside them when they are imported."""
    folder = lay_trap(tmp_path / "downloaded").parent
    Image.new("RGB", (32, 32)).save(folder / "picture.png")
    return folder


def run_in(folder: Path, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    env = {"PATH": "/usr/bin:/bin:/usr/sbin", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    mark = folder / "mark"
    assert not mark.exists(), mark.read_text()
    assert done.returncode == 0, done.stderr
    return done


def test_infer_and_train_import_nothing_from_the_current_folder(trap: Path, tmp_path: Path) -> None:
    (tmp_path / "penstock").write_text(SCRIPT)
    module = [sys.executable, "-m", "penstock"]
    script = [sys.executable, str(tmp_path / "penstock")]
    run_in(trap, [*module, "infer", SMALL, "--images", "picture.png", "--stages", "2"])
    run_in(trap, [*script, "train", VIT, "--data", "digits", "--set", "num_rows=40", "--steps", "1", "--stages", "2"])


def test_only_the_users_model_is_imported_from_the_folder(trap: Path) -> None:
    for name, text in (("model", USERS_MODEL), ("layers", USERS_LAYERS), ("sizes", "WIDTH = 8")):
        (trap / f"users_{name}.py").write_text(text)
    for name in ("timm", "fractions"):
        (trap / f"{name}.py").write_text((trap / "json.py").read_text())
    arguments = ["users_model:make", "--stages", "2", "--num-images", "4", "--json", "bench.json"]
    done = run_in(trap, [sys.executable, "-m", "penstock", "bench", *arguments])
    assert "speed-up" in done.stdout


def test_the_memory_of_a_worker_is_measured_without_it(trap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trap)
    monkeypatch.syspath_prepend(str(trap))  # as `python -m` has it
    assert worker_bytes() > 1e6
    assert not (trap / "mark").exists()
