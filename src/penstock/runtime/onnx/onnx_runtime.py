"""The runtime `onnxruntime`: a stage program as an ONNX model for each microbatch size, run by ONNX Runtime."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor

from penstock.resources import processor_features
from penstock.runtime.onnx.exported import Engine, ExportedRuntime
from penstock.runtime.onnx.onnx_nodes import Arrays, written_name

_ON_DISK = "/var/tmp"  # noqa: S108 -- folders in it have random names and this user's permissions
_HALVES = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
# these would widen all weights in 16 bits while an engine is made
_WIDENING = ["ConstantFolding", "FuseFp16InitializerToFp32NodeTransformer"]


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
            model = quantize(model, self.kept)
        return compile_model(model)


class CachingEngine:
    """A model run by ONNX Runtime that reads and writes caches in place, with as many threads as torch has.

    Example:
        engine = CachingEngine(model)
        engine(0, {"x": array}, lambda: {"keys0": keys}, [torch.empty(1, 1, 576)])  # writes to `keys` and the output
    """

    def __init__(self, model: onnx.ModelProto, apart: Arrays | None = None) -> None:
        self._session = _open(model, apart)
        self._used = {each.name for each in self._session.get_inputs()}
        self._bindings: dict[Hashable, Any] = {}
        self._nowhere = torch.zeros(1)

    def __call__(
        self,
        key: Hashable | None,
        given: Mapping[str, np.ndarray[Any, Any]],
        caches: Callable[[], Mapping[str, Tensor]],
        outputs: Sequence[Tensor],
    ) -> None:
        """Run on inputs and contiguous caches, and write the outputs.

        `key` stands for the caches in later calls, which then do not call `caches`.
        """
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._session.io_binding()
            for name, cache in caches().items():
                place = ("cpu", 0, np.float32, tuple(cache.shape), cache.data_ptr())
                binding.bind_input(name, *place)
                binding.bind_output(written_name(name), *place)
            if key is not None:
                self._bindings[key] = binding
        for name, array in given.items():
            if name in self._used:
                binding.bind_cpu_input(name, array)
        for index, output in enumerate(outputs):
            pointer = output.data_ptr() or self._nowhere.data_ptr()  # without elements it has no memory
            binding.bind_output(f"output_{index}", "cpu", 0, output.numpy().dtype, tuple(output.shape), pointer)
        self._session.run_with_iobinding(binding)


def compile_model(model: onnx.ModelProto, apart: Arrays | None = None) -> Engine:
    """Return a function that runs a model with as many threads as torch has; `apart` has constants that it lacks."""
    session = _open(model, apart)
    used = {each.name for each in session.get_inputs()}

    def run(given: Mapping[str, np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        outputs: Sequence[np.ndarray[Any, Any]] = session.run(
            None, {name: array for name, array in given.items() if name in used}
        )
        return outputs

    return run


def _open(model: onnx.ModelProto, apart: Arrays | None) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    # threads that spin while they wait would occupy the cores of a small host
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # weights that are stored in another order are given back, instead of kept in an arena for what may come
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    options.log_severity_level = 3
    # /tmp may be memory
    place = _ON_DISK if os.access(_ON_DISK, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="penstock-weights-", dir=place) as folder:
        if apart:
            options.enable_cpu_mem_arena = False
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
            _write_apart(model, apart, Path(folder))
        halves = {constant.name for constant in model.graph.initializer if constant.data_type in _HALVES}
        widens = any(node.op_type == "Cast" and node.input[0] in halves for node in model.graph.node)
        session = onnxruntime.InferenceSession(
            model.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=_WIDENING if widens else [],
        )
    session._model_bytes = None  # kept there for other providers: a second copy of all weights
    return session


def _write_apart(model: onnx.ModelProto, apart: Arrays, folder: Path) -> None:
    """Write constants to a file, which the session maps: it copies only what it stores in another order."""
    with open(folder / "weights", "wb") as file:
        for constant in model.graph.initializer:
            if constant.name in apart:
                array = apart.pop(constant.name)
                file.write(bytes(-file.tell() % 4096))
                del constant.external_data[:]
                for key, value in (("location", "weights"), ("offset", file.tell()), ("length", array.nbytes)):
                    constant.external_data.add(key=key, value=str(value))
                array.tofile(file)


def quantize(model: onnx.ModelProto, operations: Collection[str] = ()) -> onnx.ModelProto:
    """Return the model with constant matrices in 8 bits and a scale per output channel, except in `operations`.

    The method is ONNX Runtime's dynamic quantization. If the processor adds up 8-bit products in 16 bits, sums would
    saturate; weights then have 7 bits, as the runtime's documentation advises.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic  # the package takes 12 MB

    kept = [node.name for node in model.graph.node if node.name.partition("/")[0] in operations]
    with tempfile.TemporaryDirectory(prefix="penstock-int8-") as folder, _without_advice():
        path = Path(folder) / "int8.onnx"
        quantize_dynamic(
            model,
            path,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=kept,
            reduce_range=sums_are_cut_off(),
            extra_options={"MatMulConstBOnly": True},
        )
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
