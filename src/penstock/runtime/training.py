"""Run a stage program so that gradients can flow back through it."""

import contextlib
import dataclasses
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.graph.ops import GETITEM, Op, effect, is_random
from penstock.graph.training_parts import TrainingPart, written_inputs
from penstock.runtime.eager import Runtime, _Bound, _Step
from penstock.tensors import HOST

# operators draw from torch's default generator, which the threads of a process share
_DRAWING = threading.Lock()


class TrainingRuntime(Runtime):
    """A stage program whose parameters are autograd's leaves, with dropout that can be drawn again.

    What an operation draws depends on `rng_key`, a text that names seed, step and microbatch, and on the
    operation alone: not on the stage it is in, nor on what was drawn before.

    Example:
        runtime = TrainingRuntime(part, leaves)
        runtime.rng_key = "seed 0 step 3 microbatch 2"
        outputs = runtime({"batch": 4}, inputs)
    """

    def __init__(self, part: TrainingPart, tensors: Mapping[str, Tensor], device: torch.device = HOST) -> None:
        self.rng_key = ""
        self._parted = branches_used_again(part)
        self._written = [value.name in written_inputs(part) for value in part.program.inputs]
        super().__init__(part.program, tensors, device)

    def __call__(self, sizes: Mapping[str, int], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on one microbatch; an input that the stage writes to is copied first."""
        copied = [x.clone() if written else x for x, written in zip(inputs, self._written, strict=True)]
        return super().__call__(sizes, copied)

    def bind(self, sizes: Mapping[str, int]) -> _Bound:
        """Decide what depends on sizes alone; no gradient flows into it."""
        with torch.no_grad():
            return super().bind(sizes)

    def _step(self, op: Op, sizes: Mapping[str, int], ends: tuple[int, ...]) -> _Step:
        step = super()._step(op, sizes, ends)
        function = step.function
        if _draws(op):
            function = self._seeded(function, op.name)
        if op.name in self._parted:
            registers = {self._indices[name] for name in self._parted[op.name]}
            places = {position for position, register in step.slots if register in registers}
            function = _apart(function, places | {position for position, _ in step.lists})
        return step if function is step.function else dataclasses.replace(step, function=function)

    def _seeded(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            digest = hashlib.blake2b(f"{self.rng_key} {name}".encode(), digest_size=8).digest()
            with _seeded_generator(self.device, int.from_bytes(digest, "little") >> 1):
                return function(*arguments, **keywords)

        return call


@contextlib.contextmanager
def _seeded_generator(device: torch.device, seed: int) -> Iterator[None]:
    """Seed a device's default generator, and leave it afterwards as it was."""
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    with _DRAWING:
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)


def _draws(op: Op) -> bool:
    if op.target == GETITEM or not is_random(op):
        return False
    if op.target == "aten.scaled_dot_product_attention.default":
        dropout = op.arguments[4] if len(op.arguments) > 4 else op.keywords.get("dropout_p", 0.0)
        return bool(dropout != 0.0)
    return True


def branches_used_again(part: TrainingPart) -> dict[str, list[str]]:
    """Find the places where what depends on weights alone joins the chain from the inputs, but has other uses too.

    Gives for an operation the names of such values. Each use gets a node of its own in autograd's graph,
    so that a backward in halves can tell them apart.
    """
    ops = part.program.ops
    uses = Counter(name for op in ops for name in op.uses())
    chain = {part.crossing[position].name for position in part.backward_inputs}
    found: dict[str, list[str]] = {}
    for op in ops:
        names, written = set(op.uses()), effect(op).writes
        if not chain.isdisjoint(names):
            chain.add(op.name)
            chain.update(written)
            again = [name for name in sorted(names - chain) if uses[name] > 1]
            if again and not written:
                found[op.name] = again
    return found


def _apart(function: Callable[..., Any], places: set[int]) -> Callable[..., Any]:
    def part(item: Any) -> Any:
        return item.view_as(item) if isinstance(item, Tensor) and item.requires_grad else item

    def call(*arguments: Any, **keywords: Any) -> Any:
        parted = [
            ([part(x) for x in item] if isinstance(item, list) else part(item)) if place in places else item
            for place, item in enumerate(arguments)
        ]
        return function(*parted, **keywords)

    return call
