"""Collect the operators that capture emits: `python -m benchmarks.coverage.operators --json FILE`.

Every architecture of the benchmark and the modules of torch.nn are captured in evaluation and in training.
`scripts/list_operators.py` makes the table of `penstock/graph/operators.py` from what is collected here.
"""

import argparse
import json
import logging
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from benchmarks.coverage import ours
from benchmarks.coverage.architectures import QUICK, architectures
from penstock.errors import CaptureError
from penstock.graph.capture import capture
from penstock.graph.operators import listed_operators
from penstock.graph.ops import GETITEM

Example = tuple[str, nn.Module, tuple[Tensor, ...], dict[str, Tensor]]


def main() -> None:
    """Capture everything and write which of it emits each operator, and what could not be captured."""
    parser = argparse.ArgumentParser(prog="benchmarks.coverage.operators", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the operators")
    parser.add_argument("--quick", action="store_true", help=f"torch.nn and {len(QUICK)} architectures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found: defaultdict[str, list[str]] = defaultdict(list)
    failed: dict[str, str] = {}
    console = Console(stderr=True)
    total = len(architectures()) + len(_MODULES)
    for name, model, args, kwargs in track(
        _examples(options.quick), "captures", total=total, console=console, disable=not sys.stderr.isatty()
    ):
        for mode in (False, True):
            try:
                graph = capture(model.train(mode), args, kwargs)
            except CaptureError as error:
                failed[f"{name} ({'train' if mode else 'eval'})"] = ours.one_line(error)
                continue
            for target in {op.target for op in (*graph.prelude, *graph.ops)}:
                found[target].append(name)
    unlisted = sorted(found.keys() - listed_operators() - {GETITEM})
    document = {
        "unlisted": unlisted,
        "operators": {key: sorted(set(found[key])) for key in sorted(found)},
        "failed": failed,
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({"operators": len(found), "failed": len(failed), "unlisted": unlisted}))


def _examples(quick: bool) -> Iterator[Example]:
    for text, inputs in _MODULES:
        # the modules are written out below, by us
        yield f"torch.nn:{text}", eval(f"nn.{text}", {"nn": nn}), inputs, {}  # noqa: S307
    for architecture in architectures():
        if not quick or architecture.name in QUICK:
            yield architecture.name, architecture.build(), (), architecture.inputs(2)


def _made(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.rand(shape) for shape in shapes)


_ROW, _SEQUENCE, _IMAGE, _VOLUME = _made((2, 8)), _made((2, 8, 16)), _made((2, 8, 16, 16)), _made((2, 8, 8, 8, 8))
_BY_RANK = {1: _SEQUENCE, 2: _IMAGE, 3: _VOLUME}
_TOKENS = (torch.randint(0, 10, (2, 6)),)
_CLASSES = (torch.rand(2, 8), torch.randint(0, 8, (2,)))

_MODULES: list[tuple[str, tuple[Tensor, ...]]] = [
    *((f"{name}()", _ROW) for name in (
        "ELU", "Hardshrink", "Hardsigmoid", "Hardtanh", "Hardswish", "LeakyReLU", "LogSigmoid", "PReLU", "ReLU",
        "ReLU6", "RReLU", "SELU", "CELU", "GELU", "Sigmoid", "SiLU", "Mish", "Softplus", "Softshrink", "Softsign",
        "Tanh", "Tanhshrink", "GLU", "Identity", "Flatten", "Dropout", "AlphaDropout", "FeatureAlphaDropout",
    )),
    *((f"{name}(inplace=True)", _ROW) for name in (
        "ELU", "Hardsigmoid", "Hardtanh", "Hardswish", "LeakyReLU", "ReLU", "ReLU6", "RReLU", "SELU", "CELU", "SiLU",
        "Mish", "Dropout", "AlphaDropout", "FeatureAlphaDropout",
    )),
    ("GELU('tanh')", _ROW), ("Threshold(0.1, 20.0)", _ROW), ("Threshold(0.1, 20.0, inplace=True)", _ROW),
    *((f"{name}(1)", _ROW) for name in ("Softmin", "Softmax", "LogSoftmax")), ("Softmax2d()", _IMAGE),
    ("AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10])", _CLASSES), ("MultiheadAttention(16, 2, batch_first=True)",
                                                               _SEQUENCE * 3),
    ("Linear(8, 4)", _ROW), ("Bilinear(8, 8, 4)", _ROW * 2), ("Embedding(10, 4)", _TOKENS),
    ("Embedding(10, 4, max_norm=1.0)", _TOKENS), ("EmbeddingBag(10, 4, mode='sum')", _TOKENS),
    ("EmbeddingBag(10, 4, mode='mean')", _TOKENS), ("EmbeddingBag(10, 4, mode='max')", _TOKENS),
    *((f"{name}(16, 8, {more})", _SEQUENCE) for name in ("RNN", "LSTM", "GRU")
      for more in ("batch_first=True", "2, batch_first=True, bidirectional=True, dropout=0.1")),
    *((f"{name}(8, 4)", _ROW) for name in ("RNNCell", "LSTMCell", "GRUCell")),
    ("TransformerEncoderLayer(16, 2, 32, batch_first=True)", _SEQUENCE),
    ("TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True, activation='gelu')", _SEQUENCE),
    ("TransformerDecoderLayer(16, 2, 32, batch_first=True)", _SEQUENCE * 2),
    ("Transformer(16, 2, 1, 1, 32, batch_first=True)", _SEQUENCE * 2),
    ("LayerNorm(8)", _ROW), ("RMSNorm(8)", _ROW), ("GroupNorm(2, 8)", _IMAGE), ("LocalResponseNorm(2)", _IMAGE),
    ("CrossMapLRN2d(2)", _IMAGE),
    *((f"{kind}{rank}d({more})", inputs) for rank, inputs in _BY_RANK.items() for kind, more in (
        ("Conv", "8, 4, 3"), ("Conv", "8, 8, 3, padding='same', groups=2, padding_mode='reflect'"
                              if rank < 3 else "8, 8, 3, padding='same'"),
        ("Conv", "8, 4, 3, padding=1, padding_mode='circular'"), ("ConvTranspose", "8, 4, 3, stride=2"),
        ("BatchNorm", "8"), ("InstanceNorm", "8, affine=True"), ("InstanceNorm", "8, track_running_stats=True"),
        ("MaxPool", "2"), ("MaxPool", "2, return_indices=True"), ("AvgPool", "2"), ("AdaptiveAvgPool", "3"),
        ("AdaptiveMaxPool", "3"), ("AdaptiveMaxPool", "3, return_indices=True"), ("LPPool", "2, 2"), ("Dropout", ""),
        ("ConstantPad", "1, 0.5"), ("ReflectionPad", "1"), ("ReplicationPad", "1"), ("ZeroPad", "1"),
        ("CircularPad", "1"),
    )),
    ("FractionalMaxPool2d(2, output_size=(5, 5))", _IMAGE), ("FractionalMaxPool3d(2, output_size=(3, 3, 3))", _VOLUME),
    ("PixelShuffle(2)", _IMAGE), ("PixelUnshuffle(2)", _IMAGE), ("ChannelShuffle(2)", _IMAGE),
    ("Unfold(3)", _IMAGE), ("Fold((4, 4), 2)", _made((2, 8, 9))), ("Unflatten(1, (2, 4))", _ROW),
    *((f"Upsample(scale_factor=2, mode='{mode}')", inputs) for mode, inputs in (
        ("nearest", _SEQUENCE), ("linear", _SEQUENCE), ("nearest", _IMAGE), ("nearest-exact", _IMAGE),
        ("bilinear", _IMAGE), ("bicubic", _IMAGE), ("nearest", _VOLUME), ("trilinear", _VOLUME),
    )),
    *((f"{name}()", _ROW * 2) for name in (
        "L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss", "KLDivLoss",
        "PoissonNLLLoss", "SoftMarginLoss", "CosineSimilarity", "PairwiseDistance", "MultiLabelSoftMarginLoss",
    )),
    ("CrossEntropyLoss()", _CLASSES), ("CrossEntropyLoss(label_smoothing=0.1)", _CLASSES), ("NLLLoss()", _CLASSES),
    ("MultiMarginLoss()", _CLASSES), ("TripletMarginLoss()", _ROW * 3),
    ("GaussianNLLLoss()", _ROW * 3), ("MarginRankingLoss()", (*_ROW, *_ROW, torch.ones(2, 8))),
    ("HingeEmbeddingLoss()", (*_ROW, torch.ones(2, 8))), ("CosineEmbeddingLoss()", (*_ROW, *_ROW, torch.ones(2))),
]  # fmt: skip


if __name__ == "__main__":
    main()
