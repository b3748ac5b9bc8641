"""Registry of runtimes, by the names that plans use."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

from penstock.errors import PlanError, UsageError
from penstock.spec.plan import runtime_name

if TYPE_CHECKING:  # the command line needs only the names, without importing torch
    import torch
    from torch import Tensor

    from penstock.graph.cuts import TrainingPart
    from penstock.graph.program import StageProgram
    from penstock.runtime.training import TrainingRuntime


class StageRuntime(Protocol):
    """The callable that the executor runs for one stage; inputs and outputs are on its device."""

    program: "StageProgram"
    device: "torch.device"

    def __call__(self, sizes: Mapping[str, int], inputs: Sequence["Tensor"]) -> list["Tensor"]:
        """Run on one microbatch; `sizes` has a value for every symbol of the program."""

    def watched(
        self, sizes: Mapping[str, int], inputs: Sequence["Tensor"], clock: Callable[[], float]
    ) -> tuple[list["Tensor"], list[float]]:
        """Run on one microbatch; return the outputs, and the seconds of every operation if they can be timed."""

    def own(self, outputs: Sequence["Tensor"], sizes: Mapping[str, int]) -> list["Tensor"]:
        """Return outputs that the caller may write to."""

    def copied(self) -> "StageRuntime | None":
        """Return a copy with separate tensors; None if it cannot be copied."""

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the runtime's tensors."""


LoadTraining: TypeAlias = Callable[["TrainingPart", Mapping[str, "Tensor"], "torch.device", bool], "TrainingRuntime"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeKind:
    """Constructor of a runtime from a program and its tensors by name, and its precisions, the default first.

    `load_training` makes a runtime with a backward; None if there is none. `extra` is the extra with the packages that
    the runtime needs. With the precisions in `single_rows`, a row of a product may have the same bits alone as among
    others. `device` is the kind of GPU that it computes on, instead of the stages' device. Imports inside functions are
    needed only by processes that compute.
    """

    load: Callable[["StageProgram", Mapping[str, "Tensor"], "torch.device", "RuntimeChoice"], StageRuntime]
    precisions: tuple[str, ...]
    load_training: "LoadTraining | None" = None
    extra: str | None = None
    single_rows: frozenset[str] = frozenset()
    device: str | None = None


def _eager(
    program: "StageProgram", tensors: Mapping[str, "Tensor"], device: "torch.device", choice: "RuntimeChoice"
) -> StageRuntime:
    from penstock.runtime.bfloat16 import Bfloat16Runtime
    from penstock.runtime.eager import Runtime
    from penstock.runtime.graphs import GraphRuntime, can_capture

    if choice.precision == "bfloat16":
        return Bfloat16Runtime(program, tensors, device)
    return (GraphRuntime if program.caches and can_capture(device) else Runtime)(program, tensors, device)


def _eager_training(
    part: "TrainingPart", tensors: Mapping[str, "Tensor"], device: "torch.device", again: bool
) -> "TrainingRuntime":
    from penstock.runtime.training import TrainingRuntime

    return TrainingRuntime(part, tensors, device, again=again)


def _onnxruntime(
    program: "StageProgram", tensors: Mapping[str, "Tensor"], device: "torch.device", choice: "RuntimeChoice"
) -> StageRuntime:
    from penstock.runtime.onnx.fused import JoinedRuntime
    from penstock.runtime.onnx.onnx_runtime import CachingEngine, OnnxRuntime, compile_model

    if program.caches or choice.is_stored:
        return JoinedRuntime(
            program,
            tensors,
            device,
            compile_model=compile_model,
            compile_caching=CachingEngine,
            precision=choice.precision,
            keep=choice.keep,
        )
    return OnnxRuntime(program, tensors, device, choice.precision, choice.keep)


def _openvino(
    program: "StageProgram", tensors: Mapping[str, "Tensor"], device: "torch.device", choice: "RuntimeChoice"
) -> StageRuntime:
    from penstock.runtime.onnx.fused import JoinedRuntime
    from penstock.runtime.onnx.openvino_runtime import OpenVinoRuntime, compile_model

    if program.caches:
        return JoinedRuntime(
            program,
            tensors,
            device,
            name=choice.name,
            precision=choice.precision,
            compile_model=partial(compile_model, precision=choice.precision),
        )
    return OpenVinoRuntime(program, tensors, device, choice.precision, choice.keep)


def _compiled(
    program: "StageProgram", tensors: Mapping[str, "Tensor"], device: "torch.device", _choice: "RuntimeChoice"
) -> StageRuntime:
    from penstock.runtime.compiled import CompiledRuntime

    return CompiledRuntime(program, tensors, device)


def _compiled_training(
    part: "TrainingPart", tensors: Mapping[str, "Tensor"], device: "torch.device", again: bool
) -> "TrainingRuntime":
    from penstock.runtime.compiled import CompiledTrainingRuntime

    return CompiledTrainingRuntime(part, tensors, device, again=again)


RUNTIMES: Mapping[str, RuntimeKind] = {
    "eager": RuntimeKind(load=_eager, load_training=_eager_training, precisions=("float32", "bfloat16")),
    "cuda": RuntimeKind(load=_eager, precisions=("float32",), device="cuda"),
    "compiled": RuntimeKind(load=_compiled, load_training=_compiled_training, precisions=("float32",)),
    "onnxruntime": RuntimeKind(
        load=_onnxruntime,
        precisions=("float32", "int8", "int4", "stored", "stored32"),
        extra="onnx",
        single_rows=frozenset({"int8", "int4", "stored"}),  # blocks of a row are summed as integers
    ),
    "openvino": RuntimeKind(load=_openvino, precisions=("float32", "bfloat16"), extra="openvino"),
}


@dataclass(frozen=True, slots=True)
class RuntimeChoice:
    """The runtime of a stage in a plan; with 8-bit weights the layers in `keep` stay in float32.

    Example:
        runtime = RuntimeChoice("eager").load(program, tensors)

    Raises `PlanError` for an unknown runtime, and for a precision that the runtime does not have.
    """

    name: str = "eager"
    precision: str = "float32"
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in RUNTIMES:
            raise PlanError(f"runtime must be one of {', '.join(RUNTIMES)}; got {self.name!r}")
        if self.precision not in RUNTIMES[self.name].precisions:
            raise PlanError(
                f"the precision of the runtime {self.name} must be {', '.join(RUNTIMES[self.name].precisions)}; got "
                f"{self.precision}; choose one of these"
            )
        if self.keep and self.precision not in {"int8", "int4"}:
            raise PlanError(
                f"only int8 and int4 can keep some layers in float32, but the precision is {self.precision}; choose "
                f"one of these, or remove +{'+'.join(self.keep)}"
            )

    def __str__(self) -> str:
        return runtime_name(self.name, self.precision, self.keep)

    @property
    def is_stored(self) -> bool:
        """True if weights stay in the blocks of their file."""
        return self.precision.startswith("stored")

    def check_training(self, *, splits_backward: bool = False) -> None:
        """Raise `UsageError` unless the runtime can train, with a schedule that may split backwards."""
        self._training_loader()
        if splits_backward and self.name == "compiled":
            raise UsageError("the runtime compiled computes a whole backward at once; use the schedule 1f1b, or eager")

    def check_machine(self) -> None:
        """Raise `PlanError` if this machine lacks the runtime's package, or instructions for its precision."""
        from penstock.runtime.bfloat16 import check_bfloat16

        if RUNTIMES[self.name].extra is not None and importlib.util.find_spec(self.name) is None:
            raise self._not_installed(f"no module named {self.name!r}")
        if self.name == "compiled":
            from penstock.runtime.compiled import check_compiler

            check_compiler()
        if self.precision == "bfloat16":
            check_bfloat16()
        self.place()

    def place(self, device: "torch.device | None" = None, position: int = 0) -> "torch.device":
        """Return the device that a stage computes on: the runtime's own, or one that is given for all stages.

        `position` is the process's local rank. Raises `PlanError` if this machine lacks the runtime's device.
        """
        from penstock.tensors import HOST, find_device

        own, device = RUNTIMES[self.name].device, device or HOST
        if own is None or device != HOST:
            return device
        try:
            return find_device(own, position)
        except UsageError as error:
            raise PlanError(f"the runtime {self.name} computes on a GPU: {error}") from None

    def _not_installed(self, reason: object) -> PlanError:
        return PlanError(
            f"the runtime {self.name} is not installed on this machine; install penstock[{RUNTIMES[self.name].extra}] "
            f"({reason})"
        )

    def load(
        self, program: "StageProgram", tensors: Mapping[str, "Tensor"], device: "torch.device | None" = None
    ) -> StageRuntime:
        """Make a runtime for a program."""
        kind = RUNTIMES[self.name]
        if not self.is_stored:
            program, tensors = _unpacked(program, tensors)
        elif not any(state.packing for state in program.states):
            raise PlanError(f"{self} is for weights in a file's blocks, and this stage has none; use {self.name}")
        try:
            return kind.load(program, tensors, self.place(device), self)
        except ImportError as error:
            if kind.extra is None:
                raise
            raise self._not_installed(error) from error

    def load_training(
        self,
        part: "TrainingPart",
        tensors: Mapping[str, "Tensor"],
        device: "torch.device | None" = None,
        *,
        again: bool = False,
    ) -> "TrainingRuntime":
        """Make a runtime for training; with `again`, a runtime that only recomputes microbatches."""
        from penstock.tensors import HOST

        return self._training_loader()(part, tensors, device or HOST, again)

    def _training_loader(self) -> "LoadTraining":
        load = RUNTIMES[self.name].load_training
        if load is None or self.precision != "float32":
            raise UsageError(f"the runtime {self} cannot train; use eager or compiled")
        return load


def _unpacked(program: "StageProgram", tensors: Mapping[str, "Tensor"]) -> "tuple[StageProgram, Mapping[str, Tensor]]":
    """Return a program whose weights are numbers, and these weights."""
    from penstock.packing import unpacked

    packed = {state.value.name: state.packing for state in program.states if state.packing}
    if not packed:
        return program, tensors
    plain = tuple(replace(state, packing="") for state in program.states)
    numbers = {name: unpacked(tensors[name], packing) for name, packing in packed.items() if name in tensors}
    return replace(program, states=plain), {**tensors, **numbers}


EAGER = RuntimeChoice()


def parse_runtime(text: str) -> RuntimeChoice:
    """Parse a runtime with its precision from the command line.

    >>> parse_runtime("onnxruntime:int8+blocks.0+head")
    RuntimeChoice(name='onnxruntime', precision='int8', keep=('blocks.0', 'head'))

    Raises `UsageError` for values that `RuntimeChoice` rejects.
    """
    text, *keep = text.split("+")
    name, colon, precision = text.partition(":")
    try:
        return RuntimeChoice(name, precision if colon else "float32", tuple(keep))
    except PlanError as error:
        raise UsageError(str(error)) from None
