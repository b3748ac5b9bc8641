"""Train the ViT on the classes it is not fine-tuned on: `python -m benchmarks.elastic.pretrain ROWS.pt OUT.pt 40`."""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.elastic.subjects import load_rows, make_vit

_BATCH, _LEARNING_RATE, _ASIDE = 128, 1.5e-3, 1000
_SHIFT = 4  # pixels to each side


def pretrain(rows: Path, weights: Path, epochs: int) -> None:
    """Train from random weights on flipped and shifted images, and save the weights.

    Some rows are kept aside, to print how many of them are classified rightly.
    """
    model = make_vit()
    torch.manual_seed(0)
    images, labels = load_rows(rows).tensors
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    aside, order = order[:_ASIDE], order[_ASIDE:]
    steps = len(order) // _BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=epochs * steps, pct_start=0.1)
    for epoch in range(epochs):
        begin, total = time.perf_counter(), 0.0
        for batch in order[torch.randperm(len(order))][: steps * _BATCH].split(_BATCH):
            loss = functional.cross_entropy(model(augment(images[batch])), labels[batch], label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            total += float(loss.detach())
        with torch.no_grad():
            right = (model.eval()(images[aside]).argmax(1) == labels[aside]).double().mean()
        model.train()
        taken = time.perf_counter() - begin
        print(
            f"pretraining, epoch {epoch}: loss {total / steps:.3f}, {right:.1%} right, {taken:.0f} s", file=sys.stderr
        )
    torch.save(model.state_dict(), weights)


def augment(images: Tensor) -> Tensor:
    """Flip half of the images, and shift each by some pixels."""
    images = torch.where((torch.rand(len(images)) < 0.5)[:, None, None, None], images.flip(3), images)
    size = images.shape[-1]
    padded = functional.pad(images, (_SHIFT,) * 4, mode="reflect")
    windows = padded.unfold(2, size, 1).unfold(3, size, 1)
    columns, rows = (torch.randint(0, 2 * _SHIFT + 1, (len(images),)) for _ in range(2))
    return windows[torch.arange(len(images)), :, rows, columns].contiguous()


if __name__ == "__main__":
    torch.set_num_threads(2)
    pretrain(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
