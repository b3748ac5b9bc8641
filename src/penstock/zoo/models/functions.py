"""The user's own models: a function named on the command line."""

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from penstock.errors import ModelError
from penstock.text import nearest, one_line

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def find_function(name: str) -> Callable[[], object]:
    """Import the function that `package.module:function` names, from the current directory first.

    >>> find_function("collections:Counter")()
    Counter()

    Raises `ModelError` if the module cannot be imported or has no such function.
    """
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    try:
        module = _import_from(here, module_name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{module_name}.".startswith(f"{problem.name}."):
            raise ModelError(f"{module_name} cannot be imported ({one_line(problem)})") from problem
        raise ModelError(
            f"module {problem.name} not found in {here} or the installed packages; a model must be timm:NAME, "
            "hf:NAME_OR_PATH or package.module:function"
        ) from problem
    except Exception as problem:  # the user's module can fail in any way
        raise ModelError(
            f"{module_name} cannot be imported ({type(problem).__name__}: {one_line(problem)})"
        ) from problem
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ModelError(f"function {attribute} not found in {module_name}{nearest(attribute, vars(module))}")
    found: Callable[[], object] = function
    return found


def _import_from(folder: str, module_name: str) -> ModuleType:
    """Import a module, from this folder if the folder has it.

    Only the named module is preferably imported from the folder. That module may import others next to it, even at a
    later call, so the folder stays on the path, but as the last entry: a `torch.py` or `json.py` in it never shadows
    another module.
    """
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    package = module_name.partition(".")[0]
    spec = PathFinder.find_spec(package, [folder])
    if package not in sys.modules and spec is not None and spec.loader is not None:
        module = sys.modules[package] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[package]
            raise
    return importlib.import_module(module_name)


def call_function(name: str, function: Callable[[], object]) -> Made:
    """Call a model function and return the module, its positional and its keyword example arguments.

    >>> call_function("m:f", lambda: (nn.Identity(), (1,)))
    (Identity(), (1,), {})

    Raises `ModelError` when the function fails or returns something else. Errors that mention the meta device pass
    through.
    """
    try:
        made = function()
    except (RuntimeError, NotImplementedError) as problem:
        if "meta" in str(problem).lower():
            raise
        raise _failed(name, problem) from problem
    except Exception as problem:  # the user's function can fail in any way
        raise _failed(name, problem) from problem
    parts = made if isinstance(made, tuple) else (made,)
    module, args, kwargs = (*parts, *((), {})[len(parts) - 1 :]) if 1 <= len(parts) <= 3 else (None, (), {})
    if not isinstance(module, nn.Module) or not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise ModelError(
            f"{name} returned {_describe(made)}; it must return a module, (module, example_args) or "
            "(module, example_args, example_kwargs) with a tuple and a dict"
        )
    return module, tuple(args), dict(kwargs)


def _failed(name: str, problem: Exception) -> ModelError:
    return ModelError(f"{name} failed ({type(problem).__name__}: {one_line(problem)}); call it in Python to see where")


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__
