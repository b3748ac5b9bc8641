"""Sensitivity of layers to 8 bits: error and time saved if a single layer is quantized."""

import statistics
import time
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from penstock.compress.measure import OnRuntimes
from penstock.measure.runtime_columns import relative_error
from penstock.runtime.registry import RuntimeChoice, StageRuntime

INT8 = RuntimeChoice("onnxruntime", "int8")
_PASSES = 9


class LayerLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of quantizing a single linear layer to 8 bits.

    `error` is the norm of the change of the outputs, relative to the norm of the outputs; `saved_s` the seconds saved
    per row.
    """

    layer: str
    error: float
    saved_s: float


def layer_losses(model: OnRuntimes, inputs: Sequence[Tensor]) -> list[LayerLoss]:
    """Quantize each linear layer alone, and return the effects, largest error first.

    Example:
        for loss in layer_losses(OnRuntimes(model, (image,)), images):
            print(loss.layer, f"{loss.error:.2%}")

    Times are measured in one process; for single layers of small models they are within noise.
    """
    layers = model.linear_layers()
    exact = model.load(str(RuntimeChoice("onnxruntime")))
    wanted, exact_s = _run(model, exact, inputs)
    found = []
    for layer in layers:
        keep = tuple(other for other in layers if other != layer)
        outputs, seconds = _run(model, model.load(str(RuntimeChoice(INT8.name, INT8.precision, keep))), inputs)
        found.append(LayerLoss(layer=layer, error=relative_error(wanted, outputs), saved_s=exact_s - seconds))
    return sorted(found, key=lambda loss: -loss.error)


def keeping(losses: Sequence[LayerLoss], count: int) -> str:
    """Return the name of the 8-bit runtime that keeps the `count` most sensitive layers in float32.

    Example:
        keeping(losses, 2)      # 'onnxruntime:int8+blocks.11.mlp.fc2+blocks.0.attn.qkv'
    """
    return str(RuntimeChoice(INT8.name, INT8.precision, tuple(loss.layer for loss in losses[:count])))


def _run(model: OnRuntimes, runtime: StageRuntime, inputs: Sequence[Tensor]) -> tuple[Tensor, float]:
    with torch.no_grad():
        outputs = torch.cat([runtime(model.sizes, [image[None].clone()])[0] for image in inputs])
        seconds = []
        for _ in range(_PASSES):
            begin = time.perf_counter()
            runtime(model.sizes, [inputs[0][None].clone()])
            seconds.append(time.perf_counter() - begin)
    return outputs, statistics.median(seconds)
