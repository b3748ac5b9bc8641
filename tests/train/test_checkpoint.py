"""A run that is continued with other stages and replicas goes on as if it had never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from penstock.group.world import World
from penstock.train.captured import Captured
from penstock.train.checkpoint import load_checkpoint, save_checkpoint
from penstock.train.loader import Loader
from tests.models import gpt2
from tests.trainers import in_threads, make_trainer

ROWS, LENGTH = 22, 6


@pytest.fixture(scope="module")
def captured() -> Captured:
    return Captured(
        gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train(),
        (),
        {"input_ids": torch.zeros(2, LENGTH, dtype=torch.long)},
    )


def loss(output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output.logits.transpose(1, 2), labels, reduction="sum"), labels.numel()


def go(captured: Captured, size: int, begin: Path | None, end: Path | None, num: int, **settings: Any) -> list[float]:
    """Train for so many steps, from a checkpoint and to one."""
    ids = torch.randint(0, 80, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))

    def script(world: World) -> list[float]:
        trainer = make_trainer(captured, world, microbatches=2, **settings)
        optimizer = trainer.optimizer(lambda ps: torch.optim.AdamW(ps, lr=3e-3))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        loader = Loader(trainer, TensorDataset(ids), batch_size=8, shuffle=True)
        if begin is not None:
            load_checkpoint(trainer, begin, optimizer, scheduler, loader)
        losses: list[float] = []
        while len(losses) < num:
            for (rows,) in loader:
                losses.append(float(trainer.train_step({"input_ids": rows}, rows, loss)))
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if len(losses) == num:
                    break
        if end is not None:
            save_checkpoint(trainer, end, optimizer, scheduler, loader)
        trainer.close()
        return losses

    return list(in_threads(size, script)[0])


def test_the_curve_continues_with_other_stages_and_replicas(captured: Captured, tmp_path: Path) -> None:
    whole = go(captured, 1, None, None, 7)
    first = go(captured, 3, None, tmp_path / "a", 2, stages=3)
    second = go(captured, 4, tmp_path / "a", tmp_path / "b", 2, stages=2, replicas=2)
    third = go(captured, 1, tmp_path / "b", None, 3)
    assert [*first, *second, *third] == pytest.approx(whole, rel=1e-5)
    files = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {".json", ".safetensors"}, "nothing is pickled"
    assert sum("wte" in line for line in (tmp_path / "a" / "checkpoint.json").read_text().splitlines()) > 0
