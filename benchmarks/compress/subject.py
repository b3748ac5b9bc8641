"""The model that is compressed: a compact ViT of CIFAR-10 with a convolutional stem, and its data as plain tensors."""

from pathlib import Path
from typing import Any

import torch
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from benchmarks.elastic.subjects import prepare_images

NAME = "timm:penstock_cifar_vit"
CLASSES = 10
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)


class Stem(nn.Module):
    """Four convolutions to 8 x 8 tokens in place of one per patch: a small ViT learns sooner."""

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int, **_: Any) -> None:
        super().__init__()
        half = embed_dim // 2
        layers: list[nn.Module] = []
        for before, after, stride in ((in_chans, half, 2), (half, half, 1), (half, embed_dim, 2),
                                      (embed_dim, embed_dim, 1)):  # fmt: skip
            layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.num_patches = (img_size // patch_size) ** 2

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.layers(images).flatten(2).transpose(1, 2)
        return tokens


@register_model  # type: ignore[untyped-decorator]
def penstock_cifar_vit(pretrained: bool = False, **options: Any) -> nn.Module:
    """Make the model by its name in timm, `penstock_cifar_vit`: 8 x 8 tokens, 4 blocks of width 128."""
    del pretrained  # there is no published checkpoint
    for name in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        options.pop(name, None)
    model: nn.Module = VisionTransformer(**{
        "img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 4, "num_heads": 4, "mlp_ratio": 3.0,
        "num_classes": CLASSES, "class_token": False, "global_pool": "avg", "embed_layer": Stem, **options,
    })  # fmt: skip
    model.pretrained_cfg = {  # type: ignore[assignment]
        "input_size": (3, 32, 32), "mean": MEAN, "std": DEVIATION, "crop_pct": 1.0, "interpolation": "bicubic",
        "num_classes": CLASSES,
    }  # fmt: skip
    return model


def make() -> nn.Module:
    """Make the model with random weights."""
    torch.manual_seed(0)
    model: nn.Module = penstock_cifar_vit()
    return model


def prepare(data: Path, folder: Path, name: str, num_rows: int) -> tuple[Tensor, Tensor]:
    """Decode images of all classes, evenly many of each, or find them in the folder; returns pixels and labels."""
    file = prepare_images(data / f"cifar10-{name}.tar", folder, range(CLASSES), num_rows, f"compress-{name}")
    pixels, labels = torch.load(file, weights_only=True)
    mean, deviation = (torch.tensor(each).view(1, 3, 1, 1) for each in (MEAN, DEVIATION))
    return (pixels.float() / 255 - mean) / deviation, labels
