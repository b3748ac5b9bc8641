"""The operators that a stage program may call: an allowlist of overloads, since a program may be untrusted.

`operators.txt` has PyTorch's core ATen operators, those that captures of the covered architectures emit, and related
ones; `scripts/list_operators.py` generates it and has the reasons. Other operators are rejected by name. To allow
another operator that you trust, set the environment of a process:

    PENSTOCK_ALLOW_OPERATORS=aten.nonzero.default,aten.bincount.default penstock infer ...

Operators of other libraries, such as those of `torch.library.custom_op`, also need the module that defines them; each
process imports what its own environment names:

    PENSTOCK_OPERATORS_FROM=mylib.ops PENSTOCK_ALLOW_OPERATORS=mylib.scale.default python train.py

A file or message cannot allow operators or name modules.
"""

import importlib
import os
import re
from functools import cache
from pathlib import Path

from penstock.errors import ProgramError, UsageError

ALLOW = "PENSTOCK_ALLOW_OPERATORS"
FROM = "PENSTOCK_OPERATORS_FROM"
_LIST = Path(__file__).with_name("operators.txt")
_TARGET = re.compile(r"[A-Za-z0-9_]+\.[A-Za-z0-9_]+\.[A-Za-z0-9_]+", re.ASCII)


@cache
def listed_operators() -> frozenset[str]:
    """Return the overloads on the list.

    >>> "aten.linear.default" in listed_operators(), "aten.from_file.default" in listed_operators()
    (True, False)
    """
    rows = [line.split() for line in _LIST.read_text(encoding="ascii").splitlines() if not line.startswith("#")]
    return frozenset(f"{packet}.{overload}" for packet, *overloads in filter(None, rows) for overload in overloads)


def check_operator(target: object) -> None:
    """Reject an operator that is neither on the list nor allowed in this process.

    Raises `ProgramError`, or `UsageError` if the environment allows a name that is not an operator.
    """
    if isinstance(target, str) and (target in listed_operators() or is_allowed_here(target)):
        return
    if isinstance(target, str) and _TARGET.fullmatch(target):
        raise ProgramError(
            f"the operator {target[:80]!r} is not allowed in a stage program; if you trust it and the program's "
            f"origin, start the process that runs it with {ALLOW}={target[:80]}{how_imported(target)}"
        )
    raise ProgramError(
        f"the operator {repr(target)[:80]} is not allowed in a stage program; "
        "the program file is damaged or forged; split the model again"
    )


def how_imported(target: str) -> str:
    """Return how a process imports an operator that is not PyTorch's own."""
    return "" if target.startswith("aten.") else f" and {FROM}=the module that defines it"


def is_allowed_here(target: str) -> bool:
    """Return True if this process's environment allows an operator that is not on the list."""
    names = [name.strip() for name in os.environ.get(ALLOW, "").split(",")]
    for name in filter(None, names):
        if not _TARGET.fullmatch(name):
            raise UsageError(
                f"{ALLOW} must have names of operators such as aten.nonzero.default; got {name[:80]!r}; correct it"
            )
    if target not in filter(None, names):
        return False
    if not target.startswith("aten."):
        _import_modules(os.environ.get(FROM, ""))
    return True


@cache
def _import_modules(names: str) -> None:
    """Import the modules that this process's environment names, which define operators."""
    for name in filter(None, (name.strip() for name in names.split(","))):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UsageError(
                f"{FROM} must name modules that this process can import; got {name[:80]!r} ({error}); install it here, "
                "or correct the name"
            ) from error
