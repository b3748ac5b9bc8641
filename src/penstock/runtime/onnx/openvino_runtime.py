"""The runtime `openvino`: a stage program as an ONNX model for each microbatch size, run by OpenVINO."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from penstock.runtime.onnx.exported import Engine, ExportedRuntime
from penstock.runtime.onnx.onnx_nodes import Arrays

# with this package, the import of openvino reports itself over the internet and writes into the home folder
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
import openvino  # noqa: E402

_HINTS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVinoRuntime(ExportedRuntime):
    """A stage program run by OpenVINO.

    With the precision `bfloat16` it computes in 16 bits where possible; outputs stay float32.

    Example:
        runtime = OpenVinoRuntime(program, {"head.weight": weight, ...}, precision="bfloat16")
        outputs = runtime({"batch": 1}, [image])
    """

    name = "openvino"
    integers_of_32_bits = True

    def _compile(self, model: onnx.ModelProto) -> Engine:
        return compile_model(model, precision=self.precision)


def compile_model(model: onnx.ModelProto, apart: Arrays | None = None, *, precision: str) -> Engine:
    """Return a function that runs a model with as many threads as torch has; `apart` has constants that it lacks."""
    for constant in model.graph.initializer:
        if apart and constant.name in apart:
            constant.CopyFrom(numpy_helper.from_array(apart.pop(constant.name), constant.name))
    core = openvino.Core()
    settings = {
        "INFERENCE_PRECISION_HINT": _HINTS[precision],
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }
    compiled = core.compile_model(core.read_model(model.SerializeToString(), b""), "CPU", settings)
    request = compiled.create_infer_request()
    # an operation that only reshapes an input may be optimized away, leaving its name on the port
    inputs = {each.name for each in model.graph.input}
    names = [next(iter(port.get_names() & inputs)) for port in compiled.inputs]

    def run(given: Mapping[str, np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        found = request.infer([given[name] for name in names], share_inputs=True)
        return [found[port] for port in compiled.outputs]

    return run
