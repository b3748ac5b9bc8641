"""The benchmark of GPUs, small and on the CPU: every section gives rows, and what fails is in them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from tests.fewer import long

pytestmark = pytest.mark.usefixtures("one_thread")


def rows(folder: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    status = gpu.main(["--json", str(folder / "gpu.json"), *options])
    return status, json.loads((folder / "gpu.json").read_text())["rows"]


@pytest.mark.parametrize(
    ("section", "count"), [("ceilings", 2), long("cut", 1), long("training", 2), long("decode", 1), long("frozen", 2)]
)
def test_a_section_on_the_cpu(section: str, count: int, tmp_path: Path) -> None:
    status, found = rows(tmp_path, "--device", "cpu", "--tiny", "--only", section)
    assert (status, [row["section"] for row in found]) == (0, [section] * count)
    for row in found:
        assert None not in [rate for key in ("steps_per_s", "tokens_per_s") for rate in row.get(key, {}).values()]
        assert row.get("bit_equal", True)
        assert max(row.get("loss_error", {"": 0.0}).values()) < 1e-6
        assert set(row.get("rows_equal_to_transformers", {"": 2}).values()) == {2}


def test_failed_and_skipped_sections_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_device: torch.device, *, tiny: bool) -> Iterator[dict[str, Any]]:
        yield {"section": "cut", "tiny": tiny}
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setitem(gpu.SECTIONS, "cut", fails)
    status, found = rows(tmp_path, "--device", "cpu", "--only", "cut")
    assert (status, found[1:]) == (1, [{"section": "cut", "failed": "RuntimeError: no such kernel"}])
    status, found = rows(tmp_path, "--device", "cpu", "--only", "cut", "--seconds", "0")
    assert (status, found) == (0, [{"section": "cut", "left_out": "no time was left"}])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU on this machine")
def test_gpu_benchmark_needs_a_gpu(tmp_path: Path) -> None:
    assert gpu.main(["--json", str(tmp_path / "gpu.json")]) == 2
