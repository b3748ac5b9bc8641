"""Train the model: `python -m benchmarks.compress.pretrain OUT.safetensors --epochs 20 --resume`."""

import argparse
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from benchmarks.compress.subject import make, prepare
from benchmarks.elastic.pretrain import augment
from benchmarks.labs import ROOT
from benchmarks.pretraining import run_epoch

BATCH, LEARNING_RATE = 128, 2e-3


def train(data: Path, folder: Path, out: Path, epochs: int, threads: int, *, resume: bool) -> None:
    """Train from random weights on flipped and shifted images in bfloat16, and save the weights.

    What it needs to go on is written after every epoch. Test images are looked at only to print how many are right.
    """
    torch.set_num_threads(threads)
    images, labels = prepare(data, folder, "train", 50_000)
    kept, kept_labels = prepare(data, folder, "test", 10_000)
    model = make().train()
    steps = len(images) // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=epochs * steps, pct_start=0.15)
    state = out.with_suffix(".state")
    begin_epoch = 0
    if resume and state.exists():
        found = torch.load(state, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        schedule.load_state_dict(found["schedule"])
        begin_epoch = found["epoch"]

    def loss_of(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(augment(images[batch]))
        return functional.cross_entropy(logits.float(), labels[batch], label_smoothing=0.1)

    for epoch in range(begin_epoch, epochs):
        torch.manual_seed(epoch)
        begin = time.perf_counter()
        loss = run_epoch(torch.arange(len(images)), BATCH, loss_of, [optimizer], [schedule])
        with torch.no_grad():
            model.eval()
            right = torch.cat([model(part).argmax(1) for part in kept.split(500)]) == kept_labels
            model.train()
        taken = time.perf_counter() - begin
        print(
            f"epoch {epoch}: loss {loss:.3f}, {right.double().mean():.2%} right, {taken:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
             "epoch": epoch + 1}, state,
        )  # fmt: skip
    save_file(model.state_dict(), out)


def main() -> None:
    """Read what is asked for and train."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compress.pretrain")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="CIFAR-10 tars")
    parser.add_argument("--folder", type=Path, default=Path("runs/compress-benchmark"), help="prepared rows")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on after the last whole epoch")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    train(given.data, given.folder, given.out, given.epochs, given.threads, resume=given.resume)


if __name__ == "__main__":
    main()
