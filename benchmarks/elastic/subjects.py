"""What is fine-tuned: a ViT on half of CIFAR-10's classes after the other half, a BERT on SST-2; as plain tensors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from penstock.recipes.data_tasks import encode
from penstock.zoo.data.image_names import open_images
from penstock.zoo.data.texts import read_trees, train_tokenizer

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 12, "num_heads": 3, "num_classes": 5}
LENGTH, VOCABULARY = 32, 4096
_MEAN, _DEVIATION = 120.0, 64.0


class Residual(nn.Module):
    """Two convolutions beside what they are given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.layers(x)
        return result


class Stem(nn.Module):
    """Convolutions in place of a patch's projection: a ViT learns sooner from few images.

    The source is Xiao et al. 2021, https://arxiv.org/abs/2106.14881. This one is wider at the start, so that at 16 x 16
    and 8 x 8 places it has more numbers than the image.
    """

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int, **_: Any) -> None:
        super().__init__()
        half = embed_dim // 2
        self.layers = nn.Sequential(
            nn.Conv2d(in_chans, half, 3, stride=2, padding=1), nn.GELU(), Residual(half),
            nn.Conv2d(half, embed_dim, 3, stride=2, padding=1), nn.GELU(), Residual(embed_dim),
            nn.Conv2d(embed_dim, embed_dim, 3, stride=2, padding=1),
        )  # fmt: skip
        self.num_patches = (img_size // patch_size) ** 2

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.layers(images).flatten(2).transpose(1, 2)
        return tokens


def make_vit(weights: Path | None = None) -> VisionTransformer:
    """Make the ViT of 12 blocks, with weights where they are given."""
    torch.manual_seed(0)
    model = VisionTransformer(**VIT, embed_layer=Stem)
    if weights is not None:
        model.load_state_dict(torch.load(weights, weights_only=True))
    model.train()
    return model


class Sentiment(nn.Module):
    """BERT of 12 layers from token ids, 0 where a sentence is over, to two logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bert = BertForSequenceClassification(BertConfig(
            vocab_size=VOCABULARY, hidden_size=96, num_hidden_layers=12, num_attention_heads=3, intermediate_size=384,
            max_position_embeddings=LENGTH, num_labels=2,
        ))  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.bert(input_ids=ids, attention_mask=(ids != 0).long()).logits
        return logits


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    return functional.cross_entropy(logits, labels)


def right(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Count the rows that are classified rightly."""
    return (logits.argmax(-1) == labels).sum().double(), len(labels)


def prepare_images(data: Path, folder: Path, classes: Sequence[int], num_rows: int, name: str) -> Path:
    """Decode images of some classes, evenly many of each, into a file of two tensors."""
    file = folder / f"{name}-{num_rows}.pt"
    if file.exists():
        return file
    images = open_images(data)
    labels = torch.tensor([images.label(index) for index in range(len(images))])
    each = num_rows // len(classes)
    chosen = torch.cat([torch.where(labels == number)[0][:each] for number in classes])
    if len(chosen) < each * len(classes):
        raise SystemExit(f"{data} has fewer than {each} images of a class; choose fewer rows")
    pixels = torch.stack(
        [
            torch.frombuffer(bytearray(images.read(int(i)).convert("RGB").tobytes()), dtype=torch.uint8).view(32, 32, 3)
            for i in chosen
        ]
    )
    renumbered = torch.tensor([list(classes).index(int(label)) for label in labels[chosen]])
    torch.save((pixels.permute(0, 3, 1, 2).contiguous(), renumbered), file)
    return file


def prepare_sentences(data: Path, folder: Path, num_rows: int, name: str) -> Path:
    """Encode sentences, drawn at random since files are sorted by label, into rows of one length."""
    file = folder / f"{name}-{num_rows}.pt"
    if file.exists():
        return file
    known = read_trees(data / "train.txt")
    sentences = read_trees(data / ("train.txt" if name == "sst2-train" else "dev.txt"))
    tokenizer = train_tokenizer(known.texts, VOCABULARY)
    chosen = torch.randperm(len(sentences.texts), generator=torch.Generator().manual_seed(0))[:num_rows].tolist()
    rows = [encode(tokenizer, sentences.texts[number], LENGTH) for number in chosen]
    ids = torch.zeros(len(rows), LENGTH, dtype=torch.int64)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    torch.save((ids, torch.tensor([sentences.labels[number] for number in chosen])), file)
    return file


def load_rows(file: Path) -> TensorDataset:
    """Read prepared rows; pixels become floats around 0."""
    inputs, labels = torch.load(file, weights_only=True)
    if inputs.dtype == torch.uint8:
        inputs = (inputs.float() - _MEAN) / _DEVIATION
    return TensorDataset(inputs, labels)


def make_subject(given: dict[str, Any]) -> tuple[nn.Module, TensorDataset, TensorDataset]:
    """Make the model, the training rows and the validation rows that settings name."""
    weights = Path(given["weights"]) if given.get("weights") else None
    model = make_vit(weights) if given["subject"] == "vit" else Sentiment().train()
    return model, load_rows(Path(given["training"])), load_rows(Path(given["validation"]))
