"""Run a stage program eagerly, one operator after the other: the reference runtime."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import OutOfMemory, ProgramError, RunError
from penstock.graph.ops import CALLBACK, GETITEM, Op, State, is_factory, references, resolve_operator, settled
from penstock.graph.program import StageProgram, check_amounts
from penstock.resources import allowed_bytes
from penstock.runtime.bound_calls import Bound, BoundCall, Register, is_same, may_keep, positional, run_step, shortened
from penstock.tensors import HOST, copy_exactly, moved
from penstock.values import Value

# Number of microbatch sizes for which bound programs are kept; a stream has two, as the last microbatch may be smaller.
_KEPT_SIZES = 8
# A decoder has a step and three chunk sizes for each size of the caches.
_KEPT_SIZES_OF_DECODER = 64
_FURTHEST = 1e-3  # largest deviation from eager, relative to the largest number


def _zeros(size: Sequence[int], *, memory_format: torch.memory_format | None = None, **keywords: Any) -> Tensor:
    made: Tensor = torch.ops.aten.zeros.default(size, **keywords)
    return made if memory_format is None else made.contiguous(memory_format=memory_format)


# A program may be untrusted: it must not read what this process left in freed memory.
_FILLED: Mapping[str, Callable[..., Tensor]] = {
    "aten.empty.memory_format": _zeros,
    "aten.empty_like.default": torch.ops.aten.zeros_like.default,
    "aten.new_empty.default": torch.ops.aten.new_zeros.default,
}


class Runtime:
    """A callable stage program with its weights on a device.

    Example:
        runtime = Runtime(program, {"head.weight": weight, ...})
        outputs = runtime({"batch": 1}, [image])

    Raises `ProgramError` if a tensor of the program's state is missing or has another shape, and `RunError` naming a
    failed operation.
    """

    _shortens = True  # leaves out operations that return their argument; autograd may need them, as detach

    def __init__(self, program: StageProgram, tensors: Mapping[str, Tensor], device: torch.device = HOST) -> None:
        self.program = program
        self.device = device
        self._indices = self._number()
        _check_caches(program, tensors)
        self._state = [self._check(state, tensors) for state in program.states]
        self._inputs = [self._indices[value.name] for value in program.inputs]
        self._outputs = [self._indices[value.name] for value in program.outputs]
        self._bound: dict[tuple[int, ...], Bound] = {}
        self._kept_sizes = _KEPT_SIZES_OF_DECODER if program.caches else _KEPT_SIZES

    def __call__(self, sizes: Mapping[str, int], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on one microbatch; `sizes` has a value for every symbol of the program."""
        bound = self.bind(sizes)
        registers = bound.registers.copy()
        for index, tensor in zip(self._inputs, inputs, strict=True):
            registers[index] = tensor
        if bound.short is None:
            for _ in self._run_each(bound, registers):
                pass
            return [registers[index] for index in self._outputs]
        for step in bound.short:
            run_step(step, registers)
        return [registers[index] for index in self._outputs]

    def own(self, outputs: Sequence[Tensor], sizes: Mapping[str, int]) -> list[Tensor]:
        """Copy outputs that share memory with values kept for many microbatches, so that all may be modified."""
        first = len(self._state)
        computed_once = self.bind(sizes).registers[first : first + len(self.program.prelude)]
        shared = {item.untyped_storage().data_ptr() for item in computed_once if isinstance(item, Tensor)}
        return [copy_exactly(output) if output.untyped_storage().data_ptr() in shared else output for output in outputs]

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the runtime's tensors."""
        return sum(tensor.nbytes for tensor in self._state)

    def copied(self) -> "Runtime":
        """Return a copy with separate tensors."""
        pairs = zip(self.program.states, self._state, strict=True)
        return Runtime(self.program, {state.value.name: tensor.clone() for state, tensor in pairs}, self.device)

    def watched(
        self, sizes: Mapping[str, int], inputs: Sequence[Tensor], clock: Callable[[], float]
    ) -> tuple[list[Tensor], list[float]]:
        """Run on one microbatch; return the outputs, and the seconds of every operation of the program."""
        bound = self.bind(sizes)
        registers = bound.registers.copy()
        for index, tensor in zip(self._inputs, inputs, strict=True):
            registers[index] = tensor
        seconds = []
        before = clock()
        for _ in self._run_each(bound, registers):
            after = clock()
            seconds.append(after - before)
            before = after
        return [registers[index] for index in self._outputs], seconds

    def likes(
        self, sizes: Mapping[str, int], inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor | list[Tensor]]]:
        """Run on one microbatch; return the outputs, and meta tensors of the inputs and of all operations' results."""
        bound = self.bind(sizes)
        registers = bound.registers.copy()
        found: dict[str, Tensor | list[Tensor]] = {}
        for index, value, tensor in zip(self._inputs, self.program.inputs, inputs, strict=True):
            registers[index], found[value.name] = tensor, _like(tensor)
        for op, made in self._run_each(bound, registers):
            found[op.name] = _like(made) if isinstance(made, Tensor) else [_like(each) for each in made]
        return [registers[index] for index in self._outputs], found

    def constants(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the tensors of the state, and the prelude's results at these sizes, by name."""
        names = [state.value.name for state in self.program.states] + [op.name for op in self.program.prelude]
        values = self.bind(sizes).registers
        return {name: value for name, value in zip(names, values, strict=False) if isinstance(value, Tensor)}

    def bind(self, sizes: Mapping[str, int]) -> Bound:
        """Compute everything that depends only on sizes, and keep it for further microbatches of the same size."""
        key = tuple(sizes[symbol] for symbol in self.program.symbols)
        bound = self._bound.get(key)
        if bound is None:
            if len(self._bound) >= self._kept_sizes:
                self._bound.pop(next(iter(self._bound)))
            bound = self._bound[key] = self._bind(sizes)
        return bound

    def _number(self) -> dict[str, int]:
        program = self.program
        names = [state.value.name for state in program.states]
        names += [op.name for op in program.prelude]
        names += [value.name for value in program.inputs]
        names += [op.name for op in program.ops]
        return {name: index for index, name in enumerate(names)}

    def _check(self, state: State, tensors: Mapping[str, Tensor]) -> Tensor:
        value = state.value
        name, tensor = value.name, tensors.get(value.name)
        if tensor is None and state.kind == "cache":
            tensor = torch.zeros(value.evaluate({}), dtype=value.dtype, device=self.device)
        if tensor is None:
            raise ProgramError(
                f"the weights of the stage lack the tensor {name!r}, which its program reads; make the bundle again"
            )
        if tuple(tensor.shape) != value.evaluate({}) or tensor.dtype != value.dtype:
            raise ProgramError(
                f"{name!r} is {tensor.dtype} {tuple(tensor.shape)} but the program wants "
                f"{value.dtype} {value.evaluate({})}; use the weights of this model"
            )
        return self._as_captured(state, moved(tensor, self.device))

    def _as_captured(self, state: State, tensor: Tensor) -> Tensor:
        """Return a tensor with the model's `requires_grad`, by which `torch.matmul` chooses a kernel.

        No gradients are computed, since a stage runs without them.
        """
        return tensor.detach().requires_grad_() if state.requires_grad and not tensor.is_inference() else tensor

    def _bind(self, sizes: Mapping[str, int]) -> Bound:
        registers: list[Any] = [None] * len(self._indices)
        registers[: len(self._state)] = self._state
        for op in self.program.prelude:
            run_step(self._step(op, sizes, ()), registers)
        # an unread result, such as that of an in-place operation, is released immediately
        last = {op.name: index for index, op in enumerate(self.program.ops)}
        last |= {name: index for index, op in enumerate(self.program.ops) for name in op.uses()}
        kept = {state.value.name for state in self.program.states}
        kept |= {op.name for op in self.program.prelude} | {value.name for value in self.program.outputs}
        ends: dict[int, list[int]] = {}
        for name, index in last.items():
            if name not in kept:
                ends.setdefault(index, []).append(self._indices[name])
        steps = [self._step(op, sizes, tuple(ends.get(i, ()))) for i, op in enumerate(self.program.ops)]
        return Bound(registers=registers, steps=steps)

    def _step(self, op: Op, sizes: Mapping[str, int], ends: tuple[int, ...]) -> BoundCall:
        arguments = [self._settle(argument, sizes) for argument in op.arguments]
        function = self._function(op)
        keywords = {key: self._settle(argument, sizes) for key, argument in op.keywords.items()}
        if self.device != HOST and keywords.get("device") is None and is_factory(op):
            keywords["device"] = self.device  # operators that create tensors would create them on the CPU
        check_amounts(op, arguments, keywords)
        if any(True for argument in op.keywords.values() for _ in references(argument)):
            function, arguments, keywords = positional(function, arguments, keywords)
        slots = tuple((i, a.index) for i, a in enumerate(arguments) if isinstance(a, Register))
        lists = tuple(
            (i, a) for i, a in enumerate(arguments) if isinstance(a, list) and any(isinstance(x, Register) for x in a)
        )
        return BoundCall(op.name, function, arguments, slots, lists, keywords, self._indices[op.name], ends)

    def _function(self, op: Op) -> Callable[..., Any]:
        if op.target == GETITEM:
            return operator.getitem
        if op.target == CALLBACK:
            return self._callback
        return _FILLED.get(op.target) or resolve_operator(op.target)

    def _callback(self, tensors: list[Tensor], sizes: list[int], number: int) -> list[Tensor]:
        return self.program.callbacks[number].run(tensors, sizes)

    def _run_each(self, bound: Bound, registers: list[Any]) -> Iterator[tuple[Op, Any]]:
        """Run, and yield each operation with its result."""
        looks = bound.short is None and self._shortens
        kept: dict[int, int] = {}
        for op, step in zip(self.program.ops, bound.steps, strict=True):
            source = step.slots[0][1] if looks and may_keep(op, step) else None
            given = registers[source] if source is not None else None  # the step may release it
            made = run_step(step, registers)
            if source is not None and is_same(made, given) and step.result not in self._outputs:
                kept[step.result] = kept.get(source, source)
            yield op, made
        if bound.short is None:
            bound.short = (
                shortened(bound.steps, kept, len(self._state) + len(self.program.prelude), self._outputs)
                if looks
                else bound.steps
            )

    def _settle(self, argument: Any, sizes: Mapping[str, int]) -> Any:
        return settled(argument, sizes, self.device, lambda name: Register(self._indices[name]))


def _check_caches(program: StageProgram, tensors: Mapping[str, Tensor]) -> None:
    """Raise `OutOfMemory` if a program's caches do not fit; no received tensor limits their size."""
    wanted = sum(state.value.num_bytes({}) for state in program.caches if state.value.name not in tensors)
    if wanted and wanted > (allowed := allowed_bytes()):
        raise OutOfMemory(
            f"the caches of this stage need {wanted / 1e6:.0f} MB, and {allowed / 1e6:.0f} MB are free; use fewer "
            "slots or a shorter max_length"
        )


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@torch.no_grad()
def compare_outputs(
    runtime: str, values: Sequence[Value], expected: Sequence[Tensor], outputs: Sequence[Tensor]
) -> None:
    """Raise `RunError` naming the first output that differs from eager by more than rounding.

    Example:
        compare_outputs("openvino", program.outputs, eager(sizes, inputs), outputs)
    """
    for value, wanted, found in zip(values, expected, outputs, strict=True):
        if not wanted.is_floating_point():
            if not torch.equal(found, wanted):
                count = int((found != wanted).sum())
                raise RunError(
                    f"{value.name} of the runtime {runtime} differs from eager in {count} of {wanted.numel()} "
                    "elements; plan this stage with the runtime eager"
                )
            continue
        if not wanted.numel():
            continue
        finite = wanted.isfinite()
        largest = float(wanted[finite].abs().max()) if finite.any() else 0.0
        error = float((found - wanted)[finite].abs().max()) if finite.any() else 0.0
        # negated so that NaN fails
        if not error <= _FURTHEST * max(1e-6, largest) or not torch.equal(found.isfinite(), finite):
            raise RunError(
                f"{value.name} of the runtime {runtime} differs from eager by {error:.3g}; plan this stage with the "
                "runtime eager"
            )
