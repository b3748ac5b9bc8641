"""Linear layers in 8 bits: weights beforehand, what they are multiplied with as it comes."""

import contextlib
import logging
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic


def quantize(model: onnx.ModelProto, operations: Collection[str] = ()) -> onnx.ModelProto:
    """Return the model with constant matrices in 8 bits, a scale for each output channel; not those of `operations`.

    The method is ONNX Runtime's dynamic quantization.
    """
    kept = [node.name for node in model.graph.node if node.name.partition("/")[0] in operations]
    with tempfile.TemporaryDirectory(prefix="penstock-int8-") as folder, _without_advice():
        path = Path(folder) / "int8.onnx"
        quantize_dynamic(
            model, path, op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QInt8,
            nodes_to_exclude=kept, extra_options={"MatMulConstBOnly": True},
        )  # fmt: skip
        return onnx.load(path)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Leave out the package's advice to prepare a model, which is for models of unknown shapes."""

    def wanted(record: logging.LogRecord) -> bool:
        return "run pre-processing before quantization" not in record.getMessage()

    logging.getLogger().addFilter(wanted)
    try:
        yield
    finally:
        logging.getLogger().removeFilter(wanted)
