"""Properties of torch.export's nodes: calling modules, no-op detection, and sizes.

Sizes are sympy expressions; only a capture imports sympy, workers do not.
"""

from collections.abc import Mapping
from typing import Any

import sympy
from torch import fx

from penstock.graph.graph import Call
from penstock.values import Expression

# torch's sympy functions, by class name, since their module is private
_FUNCTIONS = {
    "Add": "+", "Mul": "*", "Pow": "**", "PowByNatural": "**", "FloorDiv": "//", "CleanDiv": "//", "IntTrueDiv": "/",
    "FloatTrueDiv": "/", "Mod": "%", "PythonMod": "%", "Max": "max", "Min": "min",
}  # fmt: skip


def is_idle(target: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Return True if a call returns its input unchanged, like dropout in evaluation."""
    if target.split(".")[1] not in {"dropout", "feature_dropout", "alpha_dropout"}:
        return False
    given = [*arguments, *keywords.values()]
    return len(given) == 3 and given[2] is False


def module_calls(node: fx.Node) -> tuple[Call, ...]:
    """Return the chain of modules in which a node was called, outermost first."""
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    calls = []
    for key, (path, kind) in stack.items():
        if not path or path.startswith("_empty_nn_module_stack"):
            continue
        _, _, repeat = key.partition("@")
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        calls.append(Call(path=f"{path}@{repeat}" if repeat else path, kind=name.rsplit(".", 1)[-1]))
    return tuple(calls)


def from_sympy(expression: sympy.Basic, symbols: Mapping[str, str]) -> Expression | None:
    """Convert a symbolic size to an expression over named symbols, or None if it depends on data.

    `symbols` maps torch's names, such as `s77`, to this graph's, such as `batch`.
    """
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, (sympy.Float, sympy.Rational)):
        return float(expression)
    if isinstance(expression, sympy.Symbol):
        return symbols.get(expression.name)
    name = _FUNCTIONS.get(type(expression).__name__)
    if type(expression).__name__ == "ToFloat":
        return from_sympy(expression.args[0], symbols)
    if name is None:
        return None
    operands = [from_sympy(argument, symbols) for argument in expression.args]
    if any(operand is None for operand in operands):
        return None
    return (name, *[operand for operand in operands if operand is not None])
