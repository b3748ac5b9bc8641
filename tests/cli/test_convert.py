"""`penstock convert`."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

Run = Callable[..., tuple[int, str, str]]


def test_a_checkpoint_becomes_safetensors(penstock: Run, tmp_path: Path) -> None:
    torch.save({"model": {"module.weight": torch.arange(6.0).view(2, 3)}, "epoch": 3}, tmp_path / "a.pth")
    status, out, _ = penstock("convert", tmp_path / "a.pth", "-o", tmp_path / "a.safetensors")
    assert status == 0
    assert "1 tensor, 24 B" in out
    assert torch.equal(load_file(tmp_path / "a.safetensors")["weight"], torch.arange(6.0).view(2, 3))


def test_a_pickled_module_is_refused_in_one_line(penstock: Run, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pth")
    status, _, err = penstock("convert", tmp_path / "a.pth", "-o", tmp_path / "a.safetensors")
    assert status == 2
    assert err.count("\n") == 1
    assert not (tmp_path / "a.safetensors").exists()
