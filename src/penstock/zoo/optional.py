"""Optional libraries, imported when they are needed."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

from penstock.errors import ModelError, PenstockError
from penstock.text import one_line


def optional_import(name: str, extra: str, error: type[PenstockError] = ModelError) -> ModuleType:
    """Import an optional library; the error names the package to install.

    Raises `error` if the library is missing.

    >>> optional_import("math", "vision").sqrt(4.0)
    2.0
    """
    library = name.partition(".")[0]
    try:
        with _without_wandb() if library == "timm" else contextlib.nullcontext():
            importlib.import_module(library)
        return importlib.import_module(name)
    except ImportError as problem:
        if problem.name is None or problem.name.partition(".")[0] != library:
            raise error(f"{library} cannot be imported ({one_line(problem)}); install it again") from problem
        raise error(f"{library} is not installed; pip install 'penstock[{extra}]'") from problem


@contextlib.contextmanager
def _without_wandb() -> Iterator[None]:
    """Keep timm from importing wandb, which leaves folders for media in that for temporary files if it is killed."""
    hidden = "wandb" not in sys.modules
    if hidden:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["wandb"]


@contextlib.contextmanager
def without_panics() -> Iterator[None]:
    """Raise `ValueError` for a panic of a library in Rust, which is no `Exception`."""
    try:
        yield
    except BaseException as problem:
        if type(problem).__name__ == "PanicException":
            raise ValueError(one_line(problem)) from problem
        raise
