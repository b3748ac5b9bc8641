"""Quantized checkpoints of transformers under the names of unquantized ones, in blocks if their layout allows it."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.packing import PACKINGS, packed_blocks
from penstock.zoo.weights.layouts import METHODS, LayerTensors, Layout, QuantizedLayer
from penstock.zoo.weights.weights import PackedWeights, Shape, Weights

# for the quantization of activations and caches, which stay in floats here
_UNUSED = {"input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale", "q_scale",
           "k_scale", "v_scale", "k_zero_point", "v_zero_point"}  # fmt: skip
_AT_ONCE = 2**22  # weights made at a time, to limit temporary memory
_BEGINNING = 4096  # bytes of all tensors of a layer together


def take_quantization(config: Any) -> dict[str, Any] | None:
    """Return the quantization of a configuration, and remove it, so that ordinary layers are built; None without one.

    >>> take_quantization(transformers.AutoConfig.from_pretrained("model-gptq"))["bits"]  # doctest: +SKIP
    4
    """
    found = None
    for part in (config, getattr(config, "text_config", None)):
        taken = getattr(part, "__dict__", {}).pop("quantization_config", None)
        found = taken if found is None else found
    return None if found is None else dict(found) if isinstance(found, Mapping) else getattr(found, "to_dict", dict)()


def read_quantized(name: str, source: Weights, settings: Mapping[str, Any] | None, *, own: bool = True) -> Weights:
    """Return a quantized checkpoint's tensors under the names of an unquantized one.

    >>> read_quantized("hf:model-gptq", FileWeights(path), settings).dtype("lm_head.weight")  # doctest: +SKIP
    torch.float32

    Without settings it returns `source`. Raises `ModelError` for tensors that do not fit the method; and for a method
    or a layout that is not read, unless the tensors are not the model's `own`: these may be plain.
    """
    if settings is None:
        return source
    given = settings.get("quant_method") or next((key for key in settings if key.startswith("load_in_")), "unknown")
    given = getattr(given, "value", given)
    method = "bitsandbytes" if str(given).startswith("load_in_") else str(given)
    reason, layout = "", None
    make, leaves = METHODS.get(method, (None, ()))
    try:
        layout = None if make is None else make(settings)
    except (TypeError, ValueError, LookupError, AttributeError) as problem:
        reason = f", {problem}"
    if layout is not None:
        return QuantizedWeights(source, method, layout, leaves)
    if not own:
        return source
    raise ModelError(
        f"the weights of {name} are quantized ({given}{reason}), which cannot be read; give a checkpoint in gptq, awq, "
        "compressed-tensors, fp8 or bitsandbytes in 8 bits, or a GGUF file as gguf:FILE"
    )


class QuantizedWeights(PackedWeights[QuantizedLayer | None]):
    """The tensors of a quantized checkpoint under the names of an unquantized one; see `read_quantized`."""

    _holder = "the checkpoint has"

    def __init__(self, source: Weights, method: str, layout: Layout, leaves: Collection[str]) -> None:
        self._source = source
        layers: dict[str, dict[str, str]] = {}
        for name in source.names():
            layer, _, leaf = name.rpartition(".")
            if leaf not in _UNUSED:
                layers.setdefault(layer, {})[leaf] = name
        known: dict[str, QuantizedLayer | None] = {}
        for layer, found in layers.items():
            if found.keys() & leaves:
                tensors = LayerTensors(source, layer, found, method)
                made = layout(tensors)
                lost = sorted(set(found.values()) - tensors.used.keys() - {f"{layer}.bias"})
                if lost:
                    raise ModelError(f"{lost[0]} of a layer in {method} is not read; give an unquantized checkpoint")
                known[f"{layer}.weight"] = replace(made, tensors=tuple(tensors.used))
                found = {leaf: name for leaf, name in found.items() if leaf == "bias"}
            for name in found.values():
                if source.dtype(name) in (torch.float8_e4m3fn, torch.float8_e5m2):
                    raise ModelError(f"{name} has floats of 8 bits without a scale; give an unquantized checkpoint")
                known[name] = None
        super().__init__(known)

    def shape(self, name: str) -> Shape:
        """Return a tensor's shape."""
        layer = self._find(name)
        return self._source.shape(name) if layer is None else layer.shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype, float32 if it is quantized."""
        return self._source.dtype(name) if self._find(name) is None else torch.float32

    def packing(self, name: str) -> str:
        """Return the block format of a tensor; empty if it is not quantized, or inputs of a block differ in scale."""
        layer = self._find(name)
        return "" if layer is None else layer.packing()

    def load(self, name: str) -> Tensor:
        """Return one tensor, a quantized one in float32."""
        layer = self._find(name)
        if layer is None:
            return self._source.load(name)
        groups, made = layer.groups(), torch.empty(layer.shape)
        numbers, zeros, scales = layer.by_output()
        rows = max(1, _AT_ONCE // layer.shape[1])
        for part, number, zero, scale in zip(*(x.split(rows) for x in (made, numbers, zeros, scales)), strict=True):
            part.copy_(number).sub_(zero[:, groups]).mul_(scale[:, groups])
        return made

    def load_packed(self, name: str) -> Tensor:
        """Return the bytes of one tensor [O, bytes]."""
        layer, packing = self._find(name), self.packing(name)
        if layer is None or not packing:
            raise ModelError(f"{name} is not in blocks")
        block = PACKINGS[packing].block
        numbers, zeros, scales = layer.by_output()
        first = layer.groups()[::block]
        return packed_blocks(numbers.unflatten(1, (-1, block)), zeros[:, first], scales[:, first], packing)

    def beginning(self, name: str) -> Tensor:
        """Return the first stored bytes of a tensor, or of each of its layer's."""
        layer = self._find(name)
        if layer is None:
            return self._source.load(name)
        each = _BEGINNING // len(layer.tensors)
        parts = (self._source.load(tensor).reshape(-1)[:each].view(torch.uint8)[:each] for tensor in layer.tensors)
        return torch.cat(list(parts))
