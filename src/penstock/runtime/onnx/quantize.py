"""Linear layers in 8 bits: weights are quantized beforehand, inputs dynamically."""

import contextlib
import logging
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic

from penstock.cores import processor_features


def quantize(model: onnx.ModelProto, operations: Collection[str] = ()) -> onnx.ModelProto:
    """Return the model with constant matrices in 8 bits and a scale per output channel, except in `operations`.

    The method is ONNX Runtime's dynamic quantization. If the processor adds up 8-bit products in 16 bits, sums would
    saturate; weights then have 7 bits, as the runtime's documentation advises.
    """
    kept = [node.name for node in model.graph.node if node.name.partition("/")[0] in operations]
    with tempfile.TemporaryDirectory(prefix="penstock-int8-") as folder, _without_advice():
        path = Path(folder) / "int8.onnx"
        quantize_dynamic(
            model, path, op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QInt8,
            nodes_to_exclude=kept, reduce_range=sums_are_cut_off(), extra_options={"MatMulConstBOnly": True},
        )  # fmt: skip
        return onnx.load(path)


def sums_are_cut_off(features: Collection[str] | None = None) -> bool:
    """Return True if a processor with these features (default: this one's) adds up 8-bit products in 16 bits.

    >>> sums_are_cut_off({"avx2"}), sums_are_cut_off({"avx2", "avx_vnni"}), sums_are_cut_off({"asimd"})
    (True, False, False)
    """
    known = processor_features() if features is None else features
    return "avx2" in known and not {"avx_vnni", "avx512_vnni", "amx_int8"} & set(known)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Suppress the package's advice to preprocess a model, which is meant for models with unknown shapes."""

    def wanted(record: logging.LogRecord) -> bool:
        return "run pre-processing before quantization" not in record.getMessage()

    logging.getLogger().addFilter(wanted)
    try:
        yield
    finally:
        logging.getLogger().removeFilter(wanted)
