"""The runtime `onnxruntime`: a stage program as an ONNX model for each microbatch size, run by ONNX Runtime."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor

from penstock.errors import PlanError, RunError
from penstock.graph.program import StageProgram
from penstock.runtime.eager import Runtime
from penstock.runtime.onnx.quantize import quantize
from penstock.runtime.onnx.writer import check_supported, write_model
from penstock.tensors import HOST
from penstock.text import first_line

_KEPT_SIZES = 4  # sessions have their own copies of the weights
_FURTHEST = 1e-3  # from what eager gives, of its largest number
_MOST_BYTES = 2**31 - 2**20  # of a model, as protobuf has it


class OnnxRuntime:
    """A stage program with its weights, run by ONNX Runtime on the CPU; outputs are contiguous.

    The first microbatch of a size is run eagerly too: that shows every shape, and that the outputs are the same. The
    precision `int8` has weights of linear layers in 8 bits, a scale for each output channel, and quantizes what they
    are multiplied with as it comes.

    Example:
        runtime = OnnxRuntime(program, {"head.weight": weight, ...})
        outputs = runtime({"batch": 1}, [image])

    Raises `PlanError` for an operator that it has no ONNX for, and elsewhere than on the CPU.
    """

    def __init__(
        self, program: StageProgram, tensors: Mapping[str, Tensor], device: torch.device = HOST,
        precision: str = "float32",
    ) -> None:  # fmt: skip
        if device != HOST:
            raise PlanError(f"the runtime onnxruntime computes on the CPU, not on {device}; plan with eager")
        check_supported(program)
        self.program, self.device = program, device
        self._precision = precision
        self._eager = Runtime(program, tensors, device)
        self._sessions: dict[tuple[int, ...], Any] = {}

    def __call__(self, sizes: Mapping[str, int], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on one microbatch; `sizes` gives every symbol of the program its value."""
        key = tuple(sizes[symbol] for symbol in self.program.symbols)
        session = self._sessions.get(key)
        if session is None:
            if len(self._sessions) >= _KEPT_SIZES:
                self._sessions.pop(next(iter(self._sessions)))
            session = self._sessions[key] = self._open(sizes, inputs)
        return self._run(session, inputs)

    @torch.no_grad()
    def _open(self, sizes: Mapping[str, int], inputs: Sequence[Tensor]) -> Any:
        # a program may write into its inputs
        expected, seen = self._eager.likes(sizes, [tensor.detach().clone() for tensor in inputs])
        model = write_model(self.program, self._eager.constants(sizes), seen, sizes)
        if self._precision == "int8":
            model = quantize(model)
        if model.ByteSize() > _MOST_BYTES:
            raise PlanError("a stage of the runtime onnxruntime has at most 2 GiB; plan with more stages, or eager")
        session = _make_session(model)
        if self._precision == "float32":
            self._compare(expected, self._run(session, inputs))
        return session

    def _compare(self, expected: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for value, wanted, found in zip(self.program.outputs, expected, outputs, strict=True):
            if not wanted.is_floating_point() or not wanted.numel():
                continue
            finite = wanted.isfinite()
            largest = float(wanted[finite].abs().max()) if finite.any() else 0.0
            error = float((found - wanted)[finite].abs().max()) if finite.any() else 0.0
            # a NaN is no number that is small enough
            if not error <= _FURTHEST * max(1e-6, largest) or not torch.equal(found.isfinite(), finite):
                raise RunError(
                    f"the runtime onnxruntime gives another {value.name} than eager, by {error:.3g}; plan this "
                    "stage with the runtime eager"
                )

    def _run(self, session: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
        given = {
            value.name: tensor.detach().contiguous().numpy()
            for value, tensor in zip(self.program.inputs, inputs, strict=True)
        }
        used = {each.name for each in session.get_inputs()}
        try:
            outputs = session.run(None, {name: array for name, array in given.items() if name in used})
        # the package's errors have no class of their own above Exception
        except Exception as error:
            raise RunError(f"the runtime onnxruntime failed: {first_line(error)}") from error
        return [torch.from_numpy(array) for array in outputs]

    def watched(
        self, sizes: Mapping[str, int], inputs: Sequence[Tensor], _clock: Callable[[], float]
    ) -> tuple[list[Tensor], list[float]]:
        """Run on one microbatch; the seconds of single operations cannot be told."""
        return self(sizes, inputs), []

    def own(self, outputs: Sequence[Tensor], _sizes: Mapping[str, int]) -> list[Tensor]:
        """Return outputs that the caller may write to: each run makes its own."""
        return list(outputs)

    def copied(self) -> None:
        """Return None: it cannot be copied."""
        return

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of its tensors."""
        return self._eager.weight_bytes


def _make_session(model: onnx.ModelProto) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    # threads that wait by spinning take what a small host computes with
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise RunError(f"the runtime onnxruntime refuses the stage: {first_line(error)}") from error
