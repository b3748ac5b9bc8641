"""The script that checks GPUs, on the CPU: its comparisons hold there, and see what is wrong."""

from typing import Any

import pytest
import torch

from scripts import gpu_check


def test_gpu_checks_hold_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    # those that are left out take long, and are made of the same pieces
    assert gpu_check.main(["streams", "training", "pipe", "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert table.count(" holds ") == 5
    assert "MISSED" not in table


def test_wrong_number_is_reported_as_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*_: Any) -> Any:
        yield gpu_check.Row("a sum", gpu_check.error(torch.ones(4), torch.ones(4) + 1e-3), gpu_check.GRADIENTS)
        yield gpu_check.Row("no number", gpu_check.error(torch.ones(4), torch.full((4,), torch.nan)), gpu_check.OUTPUTS)

    monkeypatch.setitem(gpu_check.CHECKS, "wrong", wrong)
    assert gpu_check.main(["wrong", "--device", "cpu"]) == 1
    assert capsys.readouterr().out.count("MISSED") == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU on this machine")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
