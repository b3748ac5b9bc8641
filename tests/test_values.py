from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ProgramError
from penstock.graph.ops import decode, encode
from penstock.values import LARGEST_SIZE, Expression, Size, check_expression, write_expression

SYMBOLS = frozenset({"batch", "sequence"})
LEAVES = st.one_of(st.integers(-9, 400), st.sampled_from(sorted(SYMBOLS)))
OPERATORS = ("+", "*", "max", "min", "//", "%", "/", "**")


def _extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    many = st.tuples(st.sampled_from(("+", "*", "max", "min")), inner, inner, inner)
    return many | st.tuples(st.sampled_from(OPERATORS), inner, inner)


EXPRESSIONS = st.recursive(LEAVES, _extend, max_leaves=8)
PYTHON = {"max": max, "min": min}


def by_python(expression: Expression, sizes: dict[str, int]) -> Any:
    if isinstance(expression, str):
        return sizes[expression]
    if not isinstance(expression, tuple):
        return expression
    name, *operands = expression
    values = [by_python(operand, sizes) for operand in operands]
    if name in PYTHON:
        return PYTHON[name](values)
    total = values[0]
    for value in values[1:]:
        total = {
            "+": lambda a, b: a + b, "*": lambda a, b: a * b, "//": lambda a, b: a // b,
            "%": lambda a, b: a % b, "/": lambda a, b: a / b, "**": lambda a, b: a**b,
        }[name](total, value)  # fmt: skip
    return total


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (7, 7),
        ("batch", 3),
        (("*", 197, "batch"), 591),
        (("+", 1, ("//", ("+", "sequence", -1), 2)), 8),
        (("max", 1, ("min", "batch", 2)), 2),
        (("**", "batch", 2), 9),
        (("%", "sequence", 4), 0),
        (("/", "sequence", 32), 0.5),
    ],
)
def test_sizes_evaluate_to_numbers(expression: Expression, value: float) -> None:
    assert Size(expression).evaluate({"batch": 3, "sequence": 16}) == value


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (("*", 197, "batch"), "197*batch"),
        (("*", 2, ("+", "batch", 1)), "2*(batch+1)"),
        (("+", 1, ("*", 2, "batch")), "1+2*batch"),
        (("//", ("*", 3, "batch"), 2), "(3*batch)//2"),
        (("max", 1, "batch"), "max(1, batch)"),
    ],
)
def test_expressions_are_written_readably(expression: Expression, text: str) -> None:
    assert write_expression(expression) == text


@given(EXPRESSIONS, st.integers(1, 50), st.integers(1, 50))
def test_expressions_evaluate_like_python_or_are_refused(expression: Expression, batch: int, sequence: int) -> None:
    sizes = {"batch": batch, "sequence": sequence}
    try:
        value = Size(expression).evaluate(sizes)
    except ProgramError:
        return
    assert value == by_python(expression, sizes)
    assert abs(value) <= LARGEST_SIZE


@given(EXPRESSIONS)
def test_sizes_round_trip_as_json(expression: Expression) -> None:
    assert check_expression(expression, SYMBOLS) == expression
    assert decode(encode(Size(expression)), SYMBOLS) == Size(expression)


@pytest.mark.parametrize(
    "expression",
    [
        ("**", 10**12, 8),
        ("**", ("**", 2**39, 8), 8),
        ("**", 2, 9),
        ("**", 2, -1),
        ("**", -8, 0.5),
        ("*", 2**39, 2**39),
        ("//", "batch", 0),
        ("/", 1, 0),
        ("//", 1, 2, 3),
        ("max", 1),
        ("+", "batch", "unknown"),
    ],
)
def test_absurd_sizes_are_refused_quickly(expression: Expression) -> None:
    with pytest.raises(ProgramError) as caught:
        Size(expression).evaluate({"batch": 3})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        None, True, "unknown", 2**41, -(2**41), float("inf"), float("nan"), [], ["+"], ["batch", 2], ["import", 1],
        {"batch": 1}, ["+", 1, None], ["+", *[1] * 64], [["+"], 1],
    ],
)  # fmt: skip
def test_invalid_expressions_are_refused(content: object) -> None:
    with pytest.raises((ProgramError, TypeError)):
        check_expression(content, SYMBOLS)


def test_deeply_nested_expressions_are_refused() -> None:
    content: Any = 1
    for _ in range(40):
        content = ["+", content, 1]
    with pytest.raises(ProgramError, match="nested too deeply"):
        check_expression(content, SYMBOLS)
