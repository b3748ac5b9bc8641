"""The dtypes and shapes of a program's values at any sizes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.graph.ops import GETITEM, Op, is_factory, resolve_operator, settled
from penstock.graph.program import StageProgram
from penstock.runtime.onnx.writer import Seen

_KEPT = 2  # writing a model needs two
_META = torch.device("meta")


class Shapes:
    """The dtypes and shapes of a program's values, by name, at any sizes.

    Layers repeat operations, so each operation is computed once for the same argument shapes.
    """

    def __init__(self, program: StageProgram) -> None:
        self._program = program
        self._known: dict[tuple[Any, ...], Tensor | list[Tensor]] = {}
        self._found: dict[tuple[int, ...], Seen] = {}

    def at(self, sizes: Mapping[str, int]) -> Seen:
        """Return a tensor on the meta device, or a list of tensors, for each value."""
        program, key = self._program, tuple(sizes[symbol] for symbol in self._program.symbols)
        if key in self._found:
            return self._found[key]
        values: dict[str, Tensor | list[Tensor]] = {
            value.name: torch.empty(value.evaluate(sizes), dtype=value.dtype, device=_META)
            for value in (*(state.value for state in program.states), *program.inputs)
        }
        for op in (*program.prelude, *program.ops):
            values[op.name] = self._result(op, values, sizes)
        while len(self._found) >= _KEPT:
            self._found.pop(next(iter(self._found)))
        self._found[key] = values
        return values

    def _result(self, op: Op, values: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
        settle = partial(settled, sizes=sizes, device=_META, value_of=values.__getitem__)
        arguments = [settle(argument) for argument in op.arguments]
        if op.target == GETITEM:
            return arguments[0][arguments[1]]
        keywords = {name: settle(argument) for name, argument in op.keywords.items()}
        if is_factory(op):
            keywords["device"] = _META
        key = op.target, _described(arguments), _described([*keywords.items()])
        if key not in self._known:
            with torch.no_grad():
                made = resolve_operator(op.target)(*arguments, **keywords)
            like = [
                torch.empty(x.shape, dtype=x.dtype, device=_META)
                for x in ([made] if isinstance(made, Tensor) else made)
            ]
            self._known[key] = like[0] if isinstance(made, Tensor) else like
        return self._known[key]


def _described(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.shape
    return tuple(map(_described, argument)) if isinstance(argument, (list, tuple)) else (type(argument), argument)
