"""The runtime `openvino`: a stage program as an ONNX model for each microbatch size, run by OpenVINO."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import openvino
import torch

from penstock.runtime.onnx.exported import Engine, ExportedRuntime

_HINTS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVinoRuntime(ExportedRuntime):
    """A stage program run by OpenVINO.

    The precision `bfloat16` lets it compute in 16 bits wherever it can; outputs stay float32.

    Example:
        runtime = OpenVinoRuntime(program, {"head.weight": weight, ...}, precision="bfloat16")
        outputs = runtime({"batch": 1}, [image])
    """

    name = "openvino"
    integers_of_32_bits = True

    def _compile(self, model: onnx.ModelProto) -> Engine:
        core = openvino.Core()
        settings = {
            "INFERENCE_PRECISION_HINT": _HINTS[self.precision], "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False,
        }  # fmt: skip
        compiled = core.compile_model(core.read_model(model.SerializeToString(), b""), "CPU", settings)
        request = compiled.create_infer_request()
        # what only changes an input's shape may be gone, and have left its name there
        inputs = {each.name for each in model.graph.input}
        names = [next(iter(port.get_names() & inputs)) for port in compiled.inputs]

        def run(given: Mapping[str, np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
            found = request.infer([given[name] for name in names], share_inputs=True)
            return [found[port] for port in compiled.outputs]

        return run
