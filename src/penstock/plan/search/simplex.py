"""A small linear program by the simplex method, from a vertex that is known."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_Vector: TypeAlias = NDArray[np.float64]
_EPSILON = 1e-9
# Dantzig's rule is quick but may circle where vertices coincide; after this many steps without gain Bland's takes over
_PATIENCE = 20


def minimize(costs: _Vector, matrix: _Vector, limits: _Vector, basis: Sequence[int]) -> tuple[_Vector, list[int]]:
    """Minimize `costs @ x` where `matrix @ x == limits` and `x >= 0`; return x and its basis.

    `basis` are as many columns as there are rows, and the vertex they stand for must be possible. Numbers
    should be near 1: differences below 1e-9 are taken as none.

    >>> minimize(np.array([-1.0, 0.0]), np.array([[2.0, 1.0]]), np.array([3.0]), [1])[0].tolist()
    [1.5, 0.0]

    Dantzig's simplex method with Bland's rule against cycles; each step solves the basis anew, so errors
    do not add up. The program must be bounded.
    """
    basis = list(basis)
    best, waited = np.inf, 0
    while True:
        columns = matrix[:, basis]
        values = np.linalg.solve(columns, limits)
        reached = float(costs[basis] @ values)
        waited = 0 if reached < best - _EPSILON else waited + 1
        best = min(best, reached)
        reduced = costs - np.linalg.solve(columns.T, costs[basis]) @ matrix
        reduced[basis] = 0.0
        entering = int(reduced.argmin()) if waited < _PATIENCE else int((reduced < -_EPSILON).argmax())
        if reduced[entering] >= -_EPSILON:
            break
        direction = np.linalg.solve(columns, matrix[:, entering])
        rising = direction > _EPSILON
        if not rising.any():
            raise ArithmeticError("a linear program without a minimum; this is a mistake in penstock")
        steps = np.full(len(basis), np.inf)
        steps[rising] = np.maximum(values[rising], 0.0) / direction[rising]
        least = steps.min()
        # among ties the lowest column leaves, as Bland's rule wants
        basis[min(np.flatnonzero(steps <= least + 1e-12), key=lambda row: basis[row])] = entering
    solution = np.zeros(matrix.shape[1])
    solution[basis] = np.maximum(values, 0.0)
    return solution, basis
