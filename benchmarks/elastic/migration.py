"""What runs on every host: DeiT-S with AdamW's state goes from one arrangement to the next."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import timm
import torch

import penstock
from penstock.engine.placement import Grid, Replica
from penstock.graph.cuts import Cuts
from penstock.train.held_tensors import holding
from penstock.train.migration import fix_microbatches, migrate
from penstock.train.trainer import Trainer

_COPIES = 3  # of each weight: itself and AdamW's two moments


def main() -> None:
    """Take a step, then migrate as the file says; write seconds and bytes of each move."""
    file = Path(sys.argv[1])
    moves: list[list[int]] = json.loads(file.read_text())["moves"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = timm.create_model("deit_small_patch16_224", num_classes=10).train()
    images, labels = torch.randn(4, 3, 224, 224), torch.randint(0, 10, (4,))
    found: list[dict[str, Any]] = []
    with penstock.Pipeline(model, (images[:1],), stages=4, microbatches=4, threads=1) as pipe:
        optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-4))
        trainer = pipe.trainer
        fix_microbatches(trainer)
        step(pipe, trainer, images, labels, optimizer)
        for stages in moves:
            grid, cuts = arrangement(trainer, *stages)
            before = needs(trainer)
            moved = migrate(trainer, trainer.now.placed.moved(grid, cuts))
            least = sum(size for key, size in needs(trainer).items() if key not in before)
            begin = time.perf_counter()
            step(pipe, trainer, images, labels, optimizer)
            found.append({
                "stages": stages[0], "replicas": stages[1], "seconds": moved.seconds, "moved_bytes": moved.moved_bytes,
                "least_bytes": least, "first_step_s": time.perf_counter() - begin,
            })  # fmt: skip
    file.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(found))


def step(pipe: Any, trainer: Trainer, images: torch.Tensor, labels: torch.Tensor, optimizer: Any) -> None:
    """Take one step on this replica's rows."""
    rows = trainer.now.placed.grid.rows(len(images))[trainer.now.placed.replica_index]
    pipe.train_step(images[rows.start : rows.stop], labels[rows.start : rows.stop], torch.nn.functional.cross_entropy)
    optimizer.step()
    optimizer.zero_grad()


def arrangement(trainer: Trainer, stages: int, replicas: int) -> tuple[Grid, list[Any]]:
    """Cut after as many blocks in each stage; replicas share four microbatches."""
    cuts = Cuts(trainer.now.captured.graph)
    chosen = [cuts.find(f"blocks.{12 * stage // stages - 1}:after") for stage in range(1, stages)]
    ranks = [tuple(range(stages * index, stages * (index + 1))) for index in range(replicas)]
    return Grid(tuple(Replica(own, own, 4 // replicas) for own in ranks)), chosen


def needs(trainer: Trainer) -> dict[tuple[int, str], int]:
    """Return the bytes of each tensor, with its optimizer's state, on each rank that needs it."""
    found = {}
    for part in trainer.now.parts:
        for state in part.program.states:
            copies = _COPIES if state.kind == "parameter" else int(state.kind == "buffer")
            for stage in holding(trainer.now.parts, state.source):
                for rank in trainer.now.placed.grid.holders(stage):
                    found[rank, state.source] = copies * state.value.num_bytes({})
    return found


if __name__ == "__main__":
    main()
