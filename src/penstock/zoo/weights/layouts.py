"""Layouts of quantized checkpoints: the tensors that a layer has in each method, and how they make one weight.

    gptq                 qweight, qzeros, scales, g_idx                                  4 or 8 bits
    awq (gemm)           qweight, qzeros, scales                                         4 bits
    compressed-tensors   weight_packed, weight_scale, weight_zero_point, weight_shape    4 or 8 bits
                         weight, weight_scale, weight_zero_point                         int8 or float8_e4m3fn
    fp8                  weight, weight_scale_inv                                        float8_e4m3fn
    bitsandbytes         weight, SCB                                                     int8

A weight [O, I] is `(number - zero point) * scale` in float32, with a scale for each group of inputs or block of both.
Tensors for the quantization of activations and caches are not read: here these stay in floats.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.packing import PACKINGS, bytes_of
from penstock.zoo.weights.weights import Shape, Weights

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLayer:
    """A quantized weight: its shape, the outputs and inputs that share a scale, and how it is read.

    `read` returns numbers [O, I], and zero points and scales of the grid; `order` returns the group of each input.
    """

    shape: tuple[int, int]
    kind: str  # of a packing, without its block: U4, U8 or F8
    grid: tuple[int, int]
    read: Callable[[], tuple[Tensor, Tensor, Tensor]]
    order: Callable[[], Tensor] | None = None
    tensors: tuple[str, ...] = ()

    def groups(self) -> Tensor:
        """Return the group of each input."""
        return torch.arange(self.shape[1]) // self.grid[1] if self.order is None else self.order()

    def packing(self) -> str:
        """Return the format with the largest block of inputs with one scale; empty if there is none."""
        inputs, width = self.shape[1], self.grid[1]
        if self.order is not None and not torch.equal(self.groups(), torch.arange(inputs) // width):
            return ""
        fits = (block for block in (128, 64, 32) if inputs % block == 0 and (width % block == 0 or width == inputs))
        return next((name for name in (f"{self.kind}_{block}" for block in fits) if name in PACKINGS), "")

    def by_output(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return numbers [O, I], and zero points and scales [O, G]."""
        numbers, *of_grid = self.read()
        zeros, scales = (x.repeat_interleave(self.grid[0], 0)[: self.shape[0]] for x in of_grid)
        return numbers, zeros, scales.float()


class LayerTensors:
    """The tensors of one layer by the last part of their names, checked when they are used."""

    def __init__(self, source: Weights, layer: str, leaves: Collection[str], method: str) -> None:
        self._source, self._layer, self._leaves, self._method = source, layer, leaves, method
        self.used: dict[str, None] = {}

    def __contains__(self, leaf: str) -> bool:
        return leaf in self._leaves

    def shape(self, leaf: str, kinds: Sequence[torch.dtype], wanted: Shape | None = None) -> Shape:
        """Return a tensor's shape; raises `ModelError` if it is missing, or of another shape or dtype."""
        if leaf not in self._leaves:
            raise ModelError(
                f"{self._layer}.{leaf} not found, but a layer with {', '.join(sorted(self._leaves))} must have it in "
                f"{self._method}; download the weights again"
            )
        self.used[f"{self._layer}.{leaf}"] = None
        shape = self._source.shape(f"{self._layer}.{leaf}")
        if self.dtype(leaf) not in kinds or 0 in shape or wanted not in (None, shape):
            raise self.wrong(leaf, f"{' or '.join(map(str, kinds))} {'' if wanted is None else list(wanted)}".strip())
        return shape

    def matrix(self, leaf: str, *kinds: torch.dtype) -> tuple[int, int]:
        shape = self.shape(leaf, kinds)
        if len(shape) != 2:
            raise self.wrong(leaf, "a matrix")
        return shape[0], shape[1]

    def dtype(self, leaf: str) -> torch.dtype:
        return self._source.dtype(f"{self._layer}.{leaf}")

    def load(self, leaf: str) -> Tensor:
        return self._source.load(f"{self._layer}.{leaf}")

    def wrong(self, leaf: str, wanted: str) -> ModelError:
        name = f"{self._layer}.{leaf}"
        found = f"{self._source.dtype(name)} {list(self._source.shape(name))}"
        return ModelError(
            f"{name} is {found}, but must be {wanted} in {self._method}; give weights and config.json of one checkpoint"
        )

    def order(self, leaf: str, inputs: int, width: int) -> Callable[[], Tensor] | None:
        """Return a function for the group of each input, if the file has them."""
        if leaf not in self:
            return None
        self.shape(leaf, (torch.int32, torch.int64), (inputs,))

        def read() -> Tensor:
            found = self.load(leaf).long()
            if leaf == "weight_g_idx" and bool((found == -1).all()):  # written by older versions without an order
                return torch.arange(inputs) // width
            if bool((found < 0).any()) or int(found.max()) >= -(-inputs // width):
                raise self.wrong(leaf, f"of groups from 0 to {-(-inputs // width) - 1}")
            return found

        return read

    def grid(self, leaf: str, outputs: int, inputs: int, blocks: Collection[tuple[int, int]]) -> tuple[int, int]:
        """Return the outputs and inputs that share a scale: a block, a row, or all."""
        shape = self.shape(leaf, _FLOATS)
        flat = (1, 1) if shape in ((), (1,)) else (outputs, 1) if shape == (outputs,) else shape
        known = [(min(high, outputs), min(wide, inputs)) for high, wide in (*blocks, (1, inputs), (outputs, inputs))]
        for high, wide in known:
            if flat == (-(-outputs // high), -(-inputs // wide)):
                return high, wide
        raise self.wrong(leaf, f"a scale for each block of {known} in [{outputs}, {inputs}]")


Layout = Callable[[LayerTensors], QuantizedLayer]


def _numbers(words: Tensor, bits: int) -> Tensor:
    """Return the numbers in each word of 32 bits [..., 32 / bits], the lowest first."""
    raw = bytes_of(words)
    return raw if bits == 8 else torch.stack([raw & 15, raw >> 4], -1).flatten(-2)


def _whole(settings: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive number of the settings; -1, which means all inputs, as a large one."""
    value = settings.get(key, default)
    if type(value) is not int or value == 0 or value < -1:
        raise ValueError(f"{key} {value}")
    return 2**62 if value == -1 else value


def _gptq(settings: Mapping[str, Any]) -> Layout:
    bits, size = _whole(settings, "bits"), _whole(settings, "group_size", 128)
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if bits not in (4, 8) or form not in ("gptq", "gptq_v2"):
        raise ValueError(f"{bits} bits" if bits not in (4, 8) else form)
    # "gptq" stores one less than each zero point: transformers' library adds it to whole words, with carries
    one = np.int32(0 if form == "gptq_v2" else 0x11111111 if bits == 4 else 0x01010101)

    def layout(tensors: LayerTensors) -> QuantizedLayer:
        words, outputs = tensors.matrix("qweight", torch.int32)
        inputs = words * 32 // bits
        width = min(size, inputs)
        tensors.shape("qzeros", (torch.int32,), (-(-inputs // width), -(-outputs * bits // 32)))
        tensors.shape("scales", _FLOATS, (-(-inputs // width), outputs))

        def read() -> tuple[Tensor, Tensor, Tensor]:
            zeros = torch.from_numpy(tensors.load("qzeros").numpy() + one)
            numbers = _numbers(tensors.load("qweight"), bits).movedim(0, 1).flatten(1)
            return numbers, _numbers(zeros, bits).flatten(1)[:, :outputs].t(), tensors.load("scales").t()

        order = tensors.order("g_idx", inputs, width)
        return QuantizedLayer(shape=(outputs, inputs), kind=f"U{bits}", grid=(1, width), read=read, order=order)

    return layout


def _awq(settings: Mapping[str, Any]) -> Layout:
    bits, size = _whole(settings, "bits", 4), _whole(settings, "group_size", 128)
    form = str(next((settings[key] for key in ("version", "format", "checkpoint_format") if settings.get(key)), "gemm"))
    if bits != 4 or form.lower() != "gemm":
        raise ValueError(f"{bits} bits" if bits != 4 else form)

    def layout(tensors: LayerTensors) -> QuantizedLayer:
        inputs, words = tensors.matrix("qweight", torch.int32)
        outputs, width = words * 8, min(size, inputs)
        tensors.shape("qzeros", (torch.int32,), (-(-inputs // width), words))
        tensors.shape("scales", _FLOATS, (-(-inputs // width), outputs))

        def by_output(leaf: str) -> Tensor:  # words have outputs 0, 2, 4, 6, 1, 3, 5, 7
            return _numbers(tensors.load(leaf), 4)[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1).t()

        def read() -> tuple[Tensor, Tensor, Tensor]:
            return by_output("qweight"), by_output("qzeros"), tensors.load("scales").t()

        return QuantizedLayer(shape=(outputs, inputs), kind="U4", grid=(1, width), read=read)

    return layout


def _compressed(settings: Mapping[str, Any]) -> Layout:
    schemes = list(settings["config_groups"].values())
    args = [scheme["weights"] for scheme in schemes if scheme.get("weights") is not None]
    forms = {settings["format"], *(scheme.get("format") or settings["format"] for scheme in schemes)}
    odd = forms - {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"}
    odd |= {(settings.get("sparsity_config") or {}).get("format", "dense")} - {"dense"}
    odd |= {"transforms"} if settings.get("transform_config") else set()
    odd |= {
        f"{each['type']} of {each['num_bits']} bits"
        for each in args
        if each["num_bits"] not in ((4, 8) if each["type"] == "int" else (8,))
    }
    if odd or not args:
        raise ValueError(", ".join(sorted(odd)) or "no weights")
    blocks = {(1, _whole(each, "group_size")) for each in args if each.get("group_size") is not None}
    blocks |= {_block(each["block_structure"]) for each in args if each.get("block_structure") is not None}
    kinds = [torch.int8 if each["type"] == "int" else torch.float8_e4m3fn for each in args]
    is_shifted = not any(each.get("symmetric", True) for each in args)

    def of_words(tensors: LayerTensors) -> QuantizedLayer:
        rows, words = tensors.matrix("weight_packed", torch.int32)
        tensors.shape("weight_shape", (torch.int64, torch.int32), (2,))
        outputs, inputs = tensors.load("weight_shape").tolist()
        fits = {each["num_bits"] for each in args if words == -(-inputs * each["num_bits"] // 32)}
        if outputs != rows or inputs < 1 or len(fits) != 1:
            raise tensors.wrong("weight_packed", f"words of a weight [{outputs}, {inputs}]")
        (bits,) = fits
        grid = tensors.grid("weight_scale", outputs, inputs, blocks)
        num_groups = -(-inputs // grid[1])
        if has_zeros := is_shifted or "weight_zero_point" in tensors:
            tensors.shape("weight_zero_point", (torch.int32,), (-(-outputs * bits // 32), num_groups))

        def read() -> tuple[Tensor, Tensor, Tensor]:
            numbers = _numbers(tensors.load("weight_packed"), bits).flatten(1)[:, :inputs]
            scales = tensors.load("weight_scale").reshape(-1, num_groups)
            if not has_zeros:
                return numbers, torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.uint8), scales
            return numbers, _numbers(tensors.load("weight_zero_point").t(), bits).flatten(1)[:, :outputs].t(), scales

        order = tensors.order("weight_g_idx", inputs, grid[1])
        return QuantizedLayer(shape=(outputs, inputs), kind=f"U{bits}", grid=grid, read=read, order=order)

    def layout(tensors: LayerTensors) -> QuantizedLayer:
        if "weight_packed" in tensors:
            return of_words(tensors)
        has_zeros = is_shifted or "weight_zero_point" in tensors
        return _bytes(tensors, "weight_scale", kinds, blocks, has_zeros=has_zeros)

    return layout


def _block(given: Any) -> tuple[int, int]:
    high, wide = (_whole({"block": each}, "block") for each in given)
    return high, wide


def _bytes(
    tensors: LayerTensors,
    scale: str,
    kinds: Sequence[torch.dtype],
    blocks: Collection[tuple[int, int]] = (),
    *,
    has_zeros: bool = False,
    most: int = 1,
) -> QuantizedLayer:
    """Return a layer of signed bytes, or floats of 8 bits, with scales for numbers up to `most`."""
    outputs, inputs = shape = tensors.matrix("weight", *dict.fromkeys(kinds))
    is_float = tensors.dtype("weight") != torch.int8
    grid = tensors.grid(scale, outputs, inputs, blocks)
    count = -(-outputs // grid[0]), -(-inputs // grid[1])
    if has_zeros and not is_float:
        tensors.shape("weight_zero_point", (torch.int8,), tensors.shape(scale, _FLOATS))

    def read() -> tuple[Tensor, Tensor, Tensor]:
        numbers, scales = tensors.load("weight"), tensors.load(scale).float().reshape(count) / most
        if is_float:
            return numbers, torch.zeros(count, dtype=torch.uint8), scales
        shift = tensors.load("weight_zero_point") if has_zeros else torch.zeros(count, dtype=torch.int8)
        return numbers.view(torch.uint8) ^ 128, shift.reshape(count).view(torch.uint8) ^ 128, scales

    return QuantizedLayer(shape=shape, kind="F8" if is_float else "U8", grid=grid, read=read)


def _fp8(settings: Mapping[str, Any]) -> Layout:
    given = settings.get("weight_block_size")
    blocks = [] if given is None else [_block(given)]

    def layout(tensors: LayerTensors) -> QuantizedLayer:
        scale = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
        return _bytes(tensors, scale, [torch.float8_e4m3fn], blocks)

    return layout


def _bitsandbytes(settings: Mapping[str, Any]) -> Layout:
    if settings.get("load_in_8bit") is not True or settings.get("load_in_4bit"):
        raise ValueError(settings.get("bnb_4bit_quant_type", "4 bits"))

    def layout(tensors: LayerTensors) -> QuantizedLayer:
        if "weight_format" in tensors:
            tensors.shape("weight_format", (torch.uint8, torch.int8, torch.int32, torch.int64))
            if bool(tensors.load("weight_format").any()):
                raise tensors.wrong("weight_format", "0, rows of outputs,")
        return _bytes(tensors, "SCB", [torch.int8], most=127)

    return layout


METHODS: Mapping[str, tuple[Callable[[Mapping[str, Any]], Layout], set[str]]] = {
    "gptq": (_gptq, {"qweight", "qzeros", "scales", "g_idx"}),
    "awq": (_awq, {"qweight", "qzeros", "scales"}),
    "compressed-tensors": (
        _compressed,
        {"weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"},
    ),
    "fp8": (_fp8, {"weight_scale_inv", "weight_scale"}),
    "bitsandbytes": (_bitsandbytes, {"SCB", "weight_format"}),
}
