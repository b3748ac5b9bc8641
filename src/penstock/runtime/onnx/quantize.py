"""Linear layers in 8 bits: weights beforehand, what they are multiplied with as it comes."""

import tempfile
from pathlib import Path

import onnx


def quantize(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with constant matrices in 8 bits, a scale for each output channel.

    The method is ONNX Runtime's dynamic quantization.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory(prefix="penstock-int8-") as folder:
        path = Path(folder) / "int8.onnx"
        quantize_dynamic(
            model, path, op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )  # fmt: skip
        return onnx.load(path)
