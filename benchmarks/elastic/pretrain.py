"""Train the ViT on the classes that it is not fine-tuned on: `python -m benchmarks.elastic.pretrain ROWS.pt OUT.pt`."""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from benchmarks.elastic.subjects import load_rows, loss_fn, make_vit


def pretrain(rows: Path, weights: Path, epochs: int) -> None:
    """Train from random weights with flipped images, and save the weights."""
    torch.manual_seed(0)
    model = make_vit()
    loader = DataLoader(load_rows(rows), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=epochs * len(loader))
    for epoch in range(epochs):
        begin, total = time.perf_counter(), 0.0
        for images, labels in loader:
            loss = loss_fn(model(images.flip(3) if torch.rand(()) < 0.5 else images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            total += float(loss.detach())
        taken = time.perf_counter() - begin
        print(f"pretraining, epoch {epoch}: loss {total / len(loader):.3f}, {taken:.0f} s", file=sys.stderr)
    torch.save(model.state_dict(), weights)


if __name__ == "__main__":
    pretrain(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
