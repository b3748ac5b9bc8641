"""The runtime `compiled`: a stage program as an FX graph for each microbatch size, through torch.compile.

    program ──bind──▶ calls ──▶ fx.GraphModule ──torch.compile──▶ inductor's kernels, with AOTAutograd's backward

Inductor reorders and fuses operations, so bits differ from eager. Its kernels are cached on disk between runs.
"""

import contextlib
import functools
import importlib
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from penstock.errors import OutOfMemory, PlanError, RunError
from penstock.graph.exporting import EXPORTING
from penstock.graph.ops import BATCH_NORM, Op, effect
from penstock.graph.program import StageProgram
from penstock.resources import is_out_of_memory
from penstock.runtime.bound_calls import BoundCall, Register, run_step
from penstock.runtime.eager import Runtime, compare_outputs
from penstock.runtime.training import TrainingRuntime, draws, seed_of, seeded_generator, with_several_values
from penstock.tensors import HOST
from penstock.text import first_line, note

_KEPT_SIZES = 8  # each size is compiled separately
_KEY_BYTES = 128
_WITHOUT = "use the runtime eager"


@torch.library.custom_op("penstock::keyed_bernoulli", mutates_args=())
def keyed_bernoulli(like: Tensor, p: float, key: Tensor, name: str) -> Tensor:
    """Draw ones with probability `p`, as the operation `name` of the runtime eager draws them for the same key."""
    text = bytes(key.tolist()).rstrip(b"\0").decode()
    with seeded_generator(like.device, seed_of(text, name)):
        drawn: Tensor = torch.empty_like(like).bernoulli_(p)
    return drawn


@keyed_bernoulli.register_fake
def _(like: Tensor, p: float, key: Tensor, name: str) -> Tensor:  # noqa: ARG001 (the operator's own names)
    return torch.empty_like(like)


@functools.cache
def _announce() -> None:
    note("compiling a stage for each microbatch size; bits of the runtime compiled differ from eager")


def check_compiler() -> None:
    """Raise `PlanError` if this machine lacks the C++ compiler or Python's headers, which inductor needs."""
    try:
        importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler()
    except RuntimeError:
        raise _missing("a C++ compiler", "g++") from None
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise _missing("Python's headers", "python3-dev")


def _missing(what: str, package: str) -> PlanError:
    return PlanError(
        f"the runtime compiled needs {what}, not found on this machine; install the system's package {package}, or "
        f"{_WITHOUT}"
    )


class CompiledRuntime(Runtime):
    """A stage program compiled by inductor, once for each microbatch size; last bits of outputs differ from eager.

    The first microbatch of each size also runs eagerly, and its float32 outputs are compared.

    Example:
        runtime = CompiledRuntime(program, {"head.weight": weight, ...})
        outputs = runtime({"batch": 1}, [image])

    Raises `PlanError` without a C++ compiler, for caches, and for operators that draw random numbers; see `Runtime` for
    other errors.
    """

    name = "compiled"

    def __init__(self, program: StageProgram, tensors: Mapping[str, Tensor], device: torch.device = HOST) -> None:
        check_compiler()
        self._refuse(program)
        super().__init__(program, tensors, device)
        self._compiled: dict[tuple[int, ...], _Compiled] = {}

    def __call__(self, sizes: Mapping[str, int], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on one microbatch; `sizes` has a value for every symbol of the program."""
        if self._key(sizes) in self._compiled:
            return self._run(sizes, inputs)
        # a program may write into its inputs
        expected = super().__call__(sizes, [tensor.clone() for tensor in inputs])
        outputs = self._run(sizes, inputs)
        compare_outputs(self.name, self.program.outputs, expected, outputs)
        return outputs

    def watched(
        self,
        sizes: Mapping[str, int],
        inputs: Sequence[Tensor],
        clock: Callable[[], float],  # noqa: ARG002
    ) -> tuple[list[Tensor], list[float]]:
        """Run on one microbatch; single operations cannot be timed."""
        return self(sizes, inputs), []

    def _key(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return *(sizes[symbol] for symbol in self.program.symbols), int(torch.is_grad_enabled())

    def _run(self, sizes: Mapping[str, int], inputs: Sequence[Tensor], *drawing: Tensor) -> list[Tensor]:
        bound, key = self.bind(sizes), self._key(sizes)
        known = self._compiled.get(key)
        compiled = known or self._compile(sizes)
        registers = bound.registers.copy()
        for index, tensor in zip(self._inputs, inputs, strict=True):
            registers[index] = tensor
        try:
            # an export in another thread would mix its tracing with that of the compiler
            with contextlib.nullcontext() if known else EXPORTING:
                made = compiled.function(*drawing, *(registers[index] for index in compiled.reads))
        # torch's compilers have no common base class for their errors
        except Exception as error:
            kind = OutOfMemory if is_out_of_memory(error) else RunError
            raise kind(f"the runtime compiled failed: {first_line(error)}; {_WITHOUT}") from error
        if not known and len(self._compiled) >= _KEPT_SIZES:
            self._compiled.pop(next(iter(self._compiled)))
        self._compiled[key] = compiled
        for index, tensor in zip(compiled.makes, made, strict=True):
            registers[index] = tensor
        for step in bound.steps[compiled.num_ops :]:
            run_step(step, registers)
        return [registers[index] for index in self._outputs]

    def _compile(self, sizes: Mapping[str, int]) -> "_Compiled":
        """Compile the operations, except the last ones that run eagerly."""
        _announce()
        ops, count = self.program.ops, self._num_compiled()
        first = len(self._state) + len(self.program.prelude)
        used = {self._indices[name] for op in ops[:count] for name in op.uses()}
        later = {self._indices[name] for op in ops[count:] for name in op.uses()} | set(self._outputs)
        reads = [index for index in (*range(first), *self._inputs) if index in used]
        makes = [index for index in sorted(later) if index >= first and index not in self._inputs]
        makes = [index for index in makes if index in {self._indices[op.name] for op in ops[:count]}]
        graph = fx.Graph()
        key = graph.placeholder("key") if self._keyed else None
        nodes = {index: graph.placeholder(f"value_{index}") for index in reads}

        def read(argument: Any) -> Any:
            if isinstance(argument, list):
                return [read(item) for item in argument]
            return nodes[argument.index] if isinstance(argument, Register) else argument

        for op in ops[:count]:
            step = Runtime._step(self, op, sizes, ())
            function, arguments = self._traced(op, step), [read(argument) for argument in step.arguments]
            if function in _KEYED.values():
                arguments = [*arguments[:2], key, op.name]
            nodes[step.result] = graph.call_function(function, tuple(arguments), step.keywords)
        graph.output([nodes[index] for index in makes])
        # the number of threads becomes part of the code, and so of the key of inductor's cache
        options: dict[str, Any] = {"cpp.threads": torch.get_num_threads(), "compile_threads": 1}
        options = options if self.device == HOST else {}
        function = torch.compile(fx.GraphModule({}, graph), fullgraph=True, dynamic=False, options=options)
        return _Compiled(function, reads, makes, count)

    _keyed = False  # whether operations may draw random numbers, by a key

    def _num_compiled(self) -> int:
        """Return the number of leading operations that are compiled."""
        return len(self.program.ops)

    def _traced(self, _op: Op, step: BoundCall) -> Callable[..., Any]:
        """Return the function that the compiler traces for an operation."""
        return step.function

    def _refuse(self, program: StageProgram) -> None:
        """Raise `PlanError` naming the first construct that cannot be compiled."""
        if program.caches:
            raise PlanError(f"the runtime compiled cannot write to a decoder's caches; {_WITHOUT} or onnxruntime")
        for op in (*program.prelude, *program.ops):
            if draws(op) and not (self._keyed and op.target in _KEYED and len(op.arguments) > 1):
                way = "set dropout in attention to 0" if "attention" in op.target else "change the model"
                raise PlanError(f"the runtime compiled cannot compile {op.name} ({op.target}); {way}, or {_WITHOUT}")


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled function with the registers that it reads and makes; later operations run eagerly."""

    function: Callable[..., Sequence[Tensor]]
    reads: Sequence[int]
    makes: Sequence[int]
    num_ops: int


def _dropout(x: Tensor, p: float, key: Tensor, name: str) -> Tensor:
    kept: Tensor = keyed_bernoulli(x.detach(), 1 - p, key, name)
    return x * kept.div(1 - p)


def _dropout_in_place(x: Tensor, p: float, key: Tensor, name: str) -> Tensor:
    return x.mul_(keyed_bernoulli(x.detach(), 1 - p, key, name).div(1 - p))


def _bernoulli_in_place(x: Tensor, p: float, key: Tensor, name: str) -> Tensor:
    return x.copy_(keyed_bernoulli(x.detach(), p, key, name))


# as torch computes them on the CPU
_KEYED: Mapping[str, Callable[..., Tensor]] = {
    "aten.dropout.default": _dropout,
    "aten.dropout_.default": _dropout_in_place,
    "aten.bernoulli_.float": _bernoulli_in_place,
}


class CompiledTrainingRuntime(TrainingRuntime, CompiledRuntime):
    """A stage program whose forward and backward AOTAutograd traces and inductor compiles, with reproducible dropout.

    Dropout draws the numbers of `TrainingRuntime` on the CPU.

    Example:
        runtime = CompiledTrainingRuntime(part, leaves)
        runtime.rng_key = "seed 0 step 3 microbatch 2"
        outputs = runtime({"batch": 4}, inputs)

    Raises `PlanError` also for attention with dropout, callbacks, and operations that write to parameters.
    """

    _keyed = True

    def __call__(self, sizes: Mapping[str, int], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on one microbatch; an input that the stage writes to is copied first."""
        text = bytearray(self.rng_key.encode().ljust(_KEY_BYTES, b"\0"))
        if len(text) > _KEY_BYTES:
            raise ValueError(f"rng_key must have at most {_KEY_BYTES} bytes; got {len(text)}")
        copied = [x.clone() if written else x for x, written in zip(inputs, self._written, strict=True)]
        return self._run(sizes, copied, torch.frombuffer(text, dtype=torch.uint8))

    def _num_compiled(self) -> int:
        ops = self.program.ops
        return next((number for number, op in enumerate(ops) if op.name in self.around), len(ops))

    def _traced(self, op: Op, step: BoundCall) -> Callable[..., Any]:
        function = step.function
        if op.target == BATCH_NORM and op.arguments[5] is True:
            function = with_several_values(function)
        drops = op.target in _KEYED and 0 < op.arguments[1] < 1 and all(op.arguments[2:])
        if drops:
            function = _KEYED[op.target]
        return torch.no_grad()(function) if op.no_grad else function

    def _refuse(self, program: StageProgram) -> None:
        super()._refuse(program)
        shared = {state.value.name for state in program.parameters}
        for op in (*program.prelude, *program.ops):
            changed = effect(op)
            if shared.intersection(changed.writes):
                raise PlanError(
                    f"the runtime compiled cannot compile {op.name} ({op.target}), which writes to a parameter; "
                    f"{_WITHOUT}"
                )
            if shared.intersection(changed.shares):
                shared.add(op.name)
