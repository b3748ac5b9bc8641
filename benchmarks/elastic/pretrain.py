"""Train the ViT on the classes it is not fine-tuned on: `python -m benchmarks.elastic.pretrain ROWS.pt OUT.pt 32`."""

import math
import sys
import time
from pathlib import Path

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.elastic.subjects import VIT, load_rows, make_vit
from benchmarks.pretraining import run_epoch

_BATCH, _ASIDE = 128, 1000
_LEARNING_RATE, _MATRICES, _DECAY = 1.5e-3, 3e-3, 0.05  # of AdamW, and of Muon for the blocks' matrices
_SHIFT, _HOLE = 4, 12  # pixels to each side, and of the square that is not shown
_HEAD_EPOCHS, _HEAD_RATE = 20, 1e-2
PATCH = int(VIT["patch_size"])


class Pretraining(nn.Module):
    """Classes and, from what the last block puts out, each patch's pixels: what no class needs is not forgotten."""

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.vit = vit
        self.decoder = nn.Linear(vit.embed_dim, 3 * PATCH * PATCH)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.vit.forward_features(images)
        return self.vit.forward_head(tokens), self.decoder(tokens[:, 1:])


def pretrain(rows: Path, weights: Path, epochs: int) -> None:
    """Train from random weights on flipped and shifted images with a hole in each, and save the weights.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) needs half of AdamW's epochs. Some rows are
    kept aside, to print how many of them are classified rightly.
    """
    torch.manual_seed(0)
    model = Pretraining(make_vit())
    images, labels = load_rows(rows).tensors
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    aside, order = order[:_ASIDE], order[_ASIDE:]
    steps = len(order) // _BATCH
    optimizers = _optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer, optimizer.param_groups[0]["lr"], total_steps=epochs * steps, pct_start=0.1, cycle_momentum=False
        )
        for optimizer in optimizers
    ]

    def loss_of(batch: Tensor) -> Tensor:
        whole = augment(images[batch])
        logits, pixels = model(whole * _holes(whole))
        return functional.cross_entropy(logits, labels[batch]) + functional.mse_loss(pixels, _patches(whole))

    for epoch in range(epochs):
        begin = time.perf_counter()
        loss = run_epoch(order, _BATCH, loss_of, optimizers, schedules)
        with torch.no_grad():
            right = (model.vit.eval()(images[aside]).argmax(1) == labels[aside]).double().mean()
        model.train()
        print(
            f"pretraining, epoch {epoch}: loss {loss:.3f}, {right:.1%} right, {time.perf_counter() - begin:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    torch.save(model.vit.state_dict(), weights)


def train_head(weights: Path, rows: Path, out: Path) -> None:
    """Train a new head on what the pretrained layers put out for other classes, and save all weights.

    Fine-tuning that begins with a random head spoils the layers below it first (Kumar et al. 2022,
    https://arxiv.org/abs/2202.10054).
    """
    model = make_vit(weights).eval()
    images, labels = load_rows(rows).tensors
    with torch.no_grad():
        features = torch.cat(
            [model.forward_head(model.forward_features(part), pre_logits=True) for part in images.split(500)]
        )
    torch.manual_seed(0)
    model.head.reset_parameters()
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=_HEAD_RATE, fused=True)
    for epoch in range(_HEAD_EPOCHS):
        optimizer.param_groups[0]["lr"] = _HEAD_RATE * (1 + math.cos(math.pi * epoch / _HEAD_EPOCHS)) / 2
        for batch in torch.randperm(len(features)).split(_BATCH):
            functional.cross_entropy(model.head(features[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    right = (model.head(features).argmax(1) == labels).double().mean()
    print(f"the head alone: {right:.1%} of its training rows right", file=sys.stderr, flush=True)
    torch.save(model.state_dict(), out)


def vary(rows: Path, copies: int) -> Path:
    """Write a file of prepared images as they are, and flipped and shifted `copies - 1` times, and return it."""
    file = rows.with_name(f"{rows.stem}x{copies}.pt")
    if not file.exists():
        torch.manual_seed(0)
        pixels, labels = torch.load(rows, weights_only=True)
        varied = [augment(pixels.float()).to(pixels.dtype) for _ in range(copies - 1)]
        torch.save((torch.cat([pixels, *varied]), labels.repeat(copies)), file)
    return file


def augment(images: Tensor) -> Tensor:
    """Flip half of the images, and shift each by some pixels."""
    images = torch.where((torch.rand(len(images)) < 0.5)[:, None, None, None], images.flip(3), images)
    size = images.shape[-1]
    padded = functional.pad(images, (_SHIFT,) * 4, mode="reflect")
    windows = padded.unfold(2, size, 1).unfold(3, size, 1)
    columns, rows = (torch.randint(0, 2 * _SHIFT + 1, (len(images),)) for _ in range(2))
    return windows[torch.arange(len(images)), :, rows, columns].contiguous()


def _optimizers(model: Pretraining) -> list[torch.optim.Optimizer]:
    matrices = [parameter for parameter in model.vit.blocks.parameters() if parameter.dim() == 2]
    known = set(map(id, matrices))
    others = [parameter for parameter in model.parameters() if id(parameter) not in known]
    return [
        torch.optim.AdamW(others, lr=_LEARNING_RATE, weight_decay=_DECAY, fused=True),
        torch.optim.Muon(matrices, lr=_MATRICES, weight_decay=_DECAY, adjust_lr_fn="match_rms_adamw"),
    ]


def _holes(images: Tensor) -> Tensor:
    """Return 0 in a square of each image, at a random place, and 1 elsewhere."""
    size = images.shape[-1]
    first = torch.randint(1 - _HOLE, size, (2, len(images), 1))
    places = torch.arange(size)
    inside = (places >= first) & (places < first + _HOLE)
    return (~(inside[0][:, :, None] & inside[1][:, None, :])).float()[:, None]


def _patches(images: Tensor) -> Tensor:
    return functional.unfold(images, PATCH, stride=PATCH).transpose(1, 2)


if __name__ == "__main__":
    torch.set_num_threads(2)
    pretrain(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
