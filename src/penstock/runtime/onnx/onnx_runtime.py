"""The runtime `onnxruntime`: a stage program as an ONNX model for each microbatch size, run by ONNX Runtime."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from penstock.runtime.onnx.exported import Engine, ExportedRuntime


class OnnxRuntime(ExportedRuntime):
    """A stage program run by ONNX Runtime.

    With the precision `int8`, weights of linear layers have 8 bits and a scale for each output channel, and inputs are
    quantized dynamically; with `int4`, weights have 4 bits and a scale for each block of 32 inputs, and inputs have 8
    bits. Layers in `keep` are unchanged.

    Example:
        runtime = OnnxRuntime(program, {"head.weight": weight, ...})
        outputs = runtime({"batch": 1}, [image])
    """

    name = "onnxruntime"

    def _compile(self, model: onnx.ModelProto) -> Engine:
        if self.precision == "int8":
            from penstock.runtime.onnx.quantize import quantize  # the package takes 12 MB

            model = quantize(model, self.kept)
        return compile_model(model)


def compile_model(model: onnx.ModelProto) -> Engine:
    """Return a function that runs a model with as many threads as torch has."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    # threads that spin while they wait would occupy the cores of a small host
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    used = {each.name for each in session.get_inputs()}

    def run(given: Mapping[str, np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        outputs: Sequence[np.ndarray[Any, Any]] = session.run(
            None, {name: array for name, array in given.items() if name in used}
        )
        return outputs

    return run
