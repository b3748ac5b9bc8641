"""From torch's symbolic sizes to our expressions; the only place that knows sympy, so that workers need not load it."""

from collections.abc import Mapping

import sympy

from penstock.graph.expressions import Expression

# torch's own sympy functions, by class name, since their module is private
_FUNCTIONS = {
    "Add": "+",
    "Mul": "*",
    "Pow": "**",
    "PowByNatural": "**",
    "FloorDiv": "//",
    "CleanDiv": "//",
    "IntTrueDiv": "/",
    "FloatTrueDiv": "/",
    "Mod": "%",
    "PythonMod": "%",
    "Max": "max",
    "Min": "min",
}


def from_sympy(expression: sympy.Basic, symbols: Mapping[str, str]) -> Expression | None:
    """Turn a symbolic size into an expression over named symbols, or None where it depends on data.

    `symbols` maps torch's names, such as `s77`, to ours, such as `batch`.
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
