"""Trains in processes of which one is killed, and a process without a rank joins those that are left."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.recipes import loop
from penstock.recipes.launch import fit
from penstock.recipes.metrics import FitResult
from penstock.recipes.settings import FitSettings
from penstock.train.training_pipeline import TrainingPipeline

os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
folder, port, case, rank = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(os.environ.get("RANK", "-1"))
os.environ["MASTER_PORT"] = port
MODEL = "timm:vit_tiny_patch16_224,img_size=8,patch_size=2,depth=2,embed_dim=24,num_heads=3"


def train(joins_after: str = "", **changes: Any) -> FitResult:
    settings = FitSettings(model=MODEL, data="digits", threads=1, num_rows=600, output=str(folder / "run"), **changes)
    if rank < 0:
        while not (folder / joins_after).exists():
            time.sleep(0.05)
        settings = settings.replace(join=f"127.0.0.1:{port}")
    return fit(settings)


def wait() -> None:
    """The last of four processes is killed, and the others wait for another."""
    steps, step = list[int](), TrainingPipeline.train_step

    def dies(pipe: TrainingPipeline, *given: Any) -> Any:
        loss = step(pipe, *given)
        steps.append(0)
        if rank == 3 and len(steps) == 7:
            (folder / "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    TrainingPipeline.train_step = dies  # type: ignore[assignment, method-assign]
    result = train("lost", stages=2, replicas=2, batch_size=64, steps=24, lr=1e-2, checkpoint_every=5, on_loss="wait")
    assert result.last is not None
    if rank <= 0:
        (folder / f"rank{rank}").write_text(f"{result.num_processes} {result.last.step}")


def end(moment: str) -> None:
    """The second of two processes is killed at the end of an epoch, and the first goes on alone.

    It dies before it clips gradients, validates or writes a checkpoint.
    """
    kind: Any = {"evaluate_all": loop}.get(moment, TrainingPipeline)
    function = getattr(kind, moment)

    def dies(trains: Any, *given: Any, **named: Any) -> Any:
        if rank == 1 and getattr(trains, "trainer", trains).step == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(trains, *given, **named)

    setattr(kind, moment, dies)
    result = train(
        stages=2, batch_size=64, steps=24, checkpoint_every=4, on_loss="continue", clip=1.0, lr_schedule="cosine"
    )
    (folder / "epochs").write_text(str([(each.epoch, each.step) for each in result.epochs]))


def join() -> None:
    """The second of two processes is killed, the first goes on alone, and another joins in the same epoch."""
    step = TrainingPipeline.train_step

    def dies(pipe: TrainingPipeline, *given: Any) -> Any:
        loss = step(pipe, *given)
        if rank == 1 and pipe.trainer.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and len(pipe.trainer.changes) == 1:
            (folder / "alone").touch()
            time.sleep(0.4)
        return loss

    TrainingPipeline.train_step = dies  # type: ignore[assignment, method-assign]
    result = train("alone", stages=1, replicas=2, batch_size=8, steps=67, on_loss="continue")
    assert result.last is not None
    (folder / f"rank{rank}").write_text(f"{result.last.batch_rows} {result.last.train_loss:.6f}")


CASES: dict[str, Callable[..., None]] = {"wait": wait, "end": end, "join": join}
CASES[case](*sys.argv[4:])
