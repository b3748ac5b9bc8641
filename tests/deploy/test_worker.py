"""A worker does what it was started for, whatever it is asked."""

import json
import sys
from pathlib import Path

import pytest

from penstock.errors import RunError
from penstock.transport.base import send_bytes
from tests.processes import run_python
from tests.worlds import memory_world


@pytest.mark.parametrize("kind", ["peer", "import", "__class__", "alone "])
def test_no_job_loads_a_model_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'was-here')!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    job = {
        "kind": kind, "model": "stranger:model", "seed": 0, "modules": [], "ranks": [1], "num_microbatches": 1,
        "threads": 1, "number": 0,
    }  # fmt: skip
    with memory_world(1) as made:
        send_bytes(made.feeder.transport, json.dumps(job).encode(), 1)
        with pytest.raises(RunError, match=r"worker 1: .*the same command"):
            made.feeder.health.wait_for_failure(5.0)
    assert "stranger" not in sys.modules
    assert not (tmp_path / "was-here").exists()


@pytest.mark.fresh
def test_a_worker_of_infer_imports_what_a_worker_needs() -> None:
    """It starts as every other process of the run, with the whole command; on a small board each import is seconds."""
    others = "{'sympy', 'timm', 'transformers', 'penstock.pipeline', 'penstock.graph.capture', 'penstock.train'}"
    found = run_python(
        "-c", f"import sys, penstock.cli.infer; print(sorted({others} & set(sys.modules)))", deadline_s=60
    )
    assert found.stdout == "[]\n", found.stderr


@pytest.mark.fresh
def test_workers_import_no_model_library() -> None:
    """Nothing that a worker imports can find a model by its name."""
    code = "import sys, penstock.deploy.worker; print([m for m in sys.modules if m.startswith('penstock.zoo.models')])"
    assert run_python("-c", code, deadline_s=60.0).stdout.strip() == "[]"
