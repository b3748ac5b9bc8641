"""Optional libraries, imported when they are needed."""

import importlib
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
        importlib.import_module(library)
        return importlib.import_module(name)
    except ImportError as problem:
        if problem.name is None or problem.name.partition(".")[0] != library:
            raise error(f"{library} cannot be imported ({one_line(problem)}); install it again") from problem
        raise error(f"{library} is not installed; pip install 'penstock[{extra}]'") from problem
