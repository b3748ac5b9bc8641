"""Tensors by name, dtype and shape, with sizes as small expressions over the symbols of a capture, such as `197*batch`.

Sizes are never sent between stages: every stage has the symbols' values for its microbatch and computes the sizes. The
JSON form is an integer, a symbol's name, or a list `[operator, operand, ...]`.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from penstock.errors import ProgramError

# an integer, a symbol, or (operator, operand, ...) nested at will
Expression: TypeAlias = int | float | str | tuple[Any, ...]
Number: TypeAlias = int | float

BATCH = "batch"  # the symbol of a microbatch's rows
# Larger than any tensor dimension of a real model; a forged program must not make us allocate more.
LARGEST_SIZE = 2**40
_DEEPEST = 32
_MOST_OPERANDS = 64


def _power(base: Number, exponent: Number) -> Number:
    if not 0 <= exponent <= 8:
        raise ProgramError(f"the exponent in a size must be from 0 to 8; got {exponent}; capture the model again")
    if base < 0 and exponent != int(exponent):
        raise ProgramError(f"a size takes a root of the negative number {base}; capture the model again")
    return base**exponent


_OPERATORS: dict[str, Callable[..., Number]] = {
    "+": lambda *operands: sum(operands),
    "*": lambda *operands: math.prod(operands),
    "**": _power,
    "//": operator.floordiv,
    "/": operator.truediv,
    "%": operator.mod,
    "max": max,
    "min": min,
}


@dataclass(frozen=True, slots=True)
class Size:
    """A number that depends on the sizes of the microbatch, evaluated when used.

    >>> Size(("*", 197, "batch")).evaluate({"batch": 2})
    394
    """

    expression: Expression

    def evaluate(self, sizes: Mapping[str, int]) -> Number:
        """Return the number for these sizes; raises `ProgramError` for unknown symbols and absurd results."""
        return _evaluate(self.expression, sizes)

    def mentions(self, symbol: str) -> bool:
        """Return True if the number depends on a symbol."""

        def found(expression: Expression) -> bool:
            return any(map(found, expression[1:])) if isinstance(expression, tuple) else expression == symbol

        return found(self.expression)


def check_expression(expression: object, symbols: frozenset[str], depth: int = 0) -> Expression:
    """Read an expression's JSON form; raises `ProgramError` unless all of it is known."""
    if depth > _DEEPEST:
        raise ProgramError("a size expression is nested too deeply; the program file is damaged or forged")
    if isinstance(expression, (int, float)) and not isinstance(expression, bool):
        return _within_limit(expression)
    if isinstance(expression, str):
        if expression not in symbols:
            raise ProgramError(f"a size uses the unknown symbol {expression!r}; known: {', '.join(sorted(symbols))}")
        return expression
    if isinstance(expression, (list, tuple)) and 2 <= len(expression) <= _MOST_OPERANDS and expression[0] in _OPERATORS:
        return (expression[0], *[check_expression(item, symbols, depth + 1) for item in expression[1:]])
    raise ProgramError(f"{repr(expression)[:80]} is not a size expression; the program file is damaged or forged")


def write_expression(expression: Expression) -> str:
    """Write an expression for people, as in `197*batch`."""
    if not isinstance(expression, tuple):
        return str(expression)
    name, *operands = expression
    if name in {"max", "min"}:
        return f"{name}({', '.join(map(write_expression, operands))})"
    written = [
        f"({write_expression(operand)})"
        if isinstance(operand, tuple) and (name, operand[0]) != ("+", "*")
        else write_expression(operand)
        for operand in operands
    ]
    return str(name).join(written)


def _evaluate(expression: Expression, sizes: Mapping[str, int]) -> Number:
    if isinstance(expression, (int, float)):
        return _within_limit(expression)
    if isinstance(expression, str):
        try:
            return _within_limit(sizes[expression])
        except KeyError:
            raise ProgramError(f"no value was given for the size {expression!r}") from None
    name, *operands = expression
    values = [_evaluate(operand, sizes) for operand in operands]
    try:
        return _within_limit(_OPERATORS[str(name)](*values))
    except (ZeroDivisionError, OverflowError, TypeError) as error:
        raise ProgramError(f"the size {write_expression(expression)} cannot be computed: {error}") from None


def _within_limit(number: Number) -> Number:
    """Check every intermediate number: a power of a power would exhaust the machine before the result."""
    if not abs(number) <= LARGEST_SIZE:  # negated so that nan fails
        raise ProgramError(f"a size is beyond the limit of {LARGEST_SIZE}; the program file is damaged or forged")
    return number


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor's name, dtype and shape; dimensions are integers or sizes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | Size, ...]

    def evaluate(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape for the sizes of one microbatch."""
        return tuple(int(d.evaluate(sizes)) if isinstance(d, Size) else d for d in self.shape)

    def num_bytes(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes of the elements for the sizes of one microbatch."""
        return math.prod(self.evaluate(sizes)) * self.dtype.itemsize
