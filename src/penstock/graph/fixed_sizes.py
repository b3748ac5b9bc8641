"""The line of a model's code that fixes its batch size, found while torch.export traces it."""

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_TRIED = (3, 4, 5, 7, 16, 33, 1000)  # batch sizes that a guard must allow
_CODE = 80  # characters of a line in a message


@contextmanager
def watched_sizes(inputs: Any) -> Iterator[list[str]]:
    """Collect the lines, inside the context, that allow only some batch sizes; `inputs` are those of the export.

    Example:
        with watched_sizes((args, kwargs)) as lines:
            model(*args, **kwargs)
        lines       # ["net.py:12: for row in x"]
    """
    lines: list[str] = []
    sizes: list[Any] = [n for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) for n in leaf.shape[:1]]
    size = next((n for n in sizes if isinstance(n, torch.SymInt)), None)
    if size is None:
        yield lines
        return
    env: Any = size.node.shape_env
    symbol = size.node.expr
    # torch before 2.11 has only the first
    names = [name for name in ("evaluate_expr", "evaluate_sym_node") if hasattr(env, name)]

    def watch(evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            known = len(env.guards)
            made = evaluate(*args, **kwargs)
            if any(_excludes(guard.expr, symbol) for guard in env.guards[known:]):
                lines.append(_line(sys._getframe(1)))
            return made

        return call

    for name in names:
        setattr(env, name, watch(getattr(env, name)))
    try:
        yield lines
    finally:
        for name in names:
            delattr(env, name)


def _excludes(guard: Any, symbol: Any) -> bool:
    import sympy  # workers, which capture nothing, must not load it

    return guard.free_symbols == {symbol} and any(guard.subs(symbol, number) == sympy.false for number in _TRIED)


def _line(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()[:_CODE]}"
