"""One process of a training in double precision, which outlives losses: run on each host by `training.py`."""

import json
import os
import sys
import time
from pathlib import Path

import timm
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import penstock

NUM_IMAGES, SIDE, NUM_CLASSES = 256, 32, 10


class Images(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images of noise, each with a label; one seed, so the same everywhere."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._images = torch.randn(NUM_IMAGES, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
        self._labels = torch.randint(0, NUM_CLASSES, (NUM_IMAGES,), generator=generator)

    def __len__(self) -> int:
        return NUM_IMAGES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index], int(self._labels[index])


def main() -> None:
    """Train for so many steps; the first process writes a line for each."""
    given = json.loads(Path(sys.argv[1]).read_text())
    rows, folder = Path(given["rows"]), Path(given["folder"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=SIDE, patch_size=8, depth=6, num_classes=NUM_CLASSES, drop_rate=0.1
    )
    model = model.double().train()
    example = torch.zeros(2, 3, SIDE, SIDE, dtype=torch.float64)
    with penstock.Pipeline(
        model, example, stages=2, replicas=2, microbatches=2, on_loss=given["on_loss"], threads=1
    ) as pipe:
        optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=3e-4))
        loader = pipe.loader(Images(), batch_size=16, shuffle=True)
        first = "PENSTOCK_JOIN" not in os.environ and os.environ["RANK"] == "0"
        if first:
            rows.write_text("step,loss,seconds\n")
        begin_s = time.monotonic()
        while pipe.trainer.step < given["steps"]:
            for images, labels in loader:
                loss = float(pipe.train_step(images, labels, F.cross_entropy))
                optimizer.step()
                optimizer.zero_grad()
                if first:
                    with rows.open("a") as file:
                        file.write(f"{pipe.trainer.step},{loss!r},{time.monotonic() - begin_s:.3f}\n")
                if pipe.trainer.step % given["checkpoint_every"] == 0 and given["on_loss"] != "stop":
                    pipe.save_checkpoint(folder / "checkpoint", optimizer)
                if pipe.trainer.step >= given["steps"]:
                    break
        pipe.save(folder / "model.safetensors")
        if first:
            changes = [[change.step, change.why, change.took_s, change.went_back] for change in pipe.changes]
            (folder / "changes.json").write_text(json.dumps(changes))


if __name__ == "__main__":
    main()
