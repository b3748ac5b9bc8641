"""Pickled checkpoints: reading without running code from the file, and what other files are."""

import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ModelError
from penstock.files import is_special
from penstock.text import one_line

SUFFIXES = (".bin.index.json", ".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle", ".pth.tar", ".pt.tar", ".tar")
_INDEX = "pytorch_model.bin.index.json"
_UNKNOWN = re.compile(r"GLOBAL (\S+) was not an allowed global")
_ITEMS = re.compile(r"Can only (SETITEM|append|extend).*<class '" + re.escape(__name__) + r"\.(.*)'>")
_ARCHIVES = {
    "constants.pkl": "TorchScript; save torch.jit.load(FILE).state_dict() with torch.save, and convert that",
    "archive_format": "an exported program; save torch.export.load(FILE).state_dict with torch.save, and convert that",
    "serialized_exported_program.json": "an exported program; save torch.export.load(FILE).state_dict with torch.save, "
    "and convert that",
}


class Inert:
    """Stand-in for an object of any class, without its state.

    No class of the file is imported and none of its functions is called. Objects with items, such as a defaultdict, are
    read as an OrderedDict or a list, their `kind`.
    """

    kind: Callable[[], Any] | None = None

    def __new__(cls, *_args: object, **_options: object) -> Any:
        """Create an empty stand-in."""
        return super().__new__(cls) if cls.kind is None else cls.kind()

    def __init__(self, *_args: object, **_options: object) -> None:
        pass

    def __setstate__(self, _state: object) -> None:
        """Ignore the object's state."""


def read_pickled(source: Path) -> object:
    """Return the contents of a checkpoint written by torch.save; objects other than tensors are `Inert`.

    Raises `ModelError` if the file is missing, damaged, or of another kind.
    """
    if not source.exists():
        raise ModelError(f"checkpoint {source} not found; check the path")
    if (other := what_it_is(source)) is not None:
        raise ModelError(f"{source} is {other}")
    kinds: dict[str, Callable[[], Any] | None] = {}  # of the classes that need a stand-in
    while True:
        stand_ins: list[Any] = [(type(name, (Inert,), {"kind": kind}), name) for name, kind in kinds.items()]
        try:
            with torch.serialization.safe_globals(stand_ins):
                return _load(source)
        except pickle.UnpicklingError as problem:
            if (found := _UNKNOWN.search(str(problem))) and found[1] not in kinds:
                kinds |= dict.fromkeys((found[1], f"builtins.{found[1]}"))  # the message omits the module builtins
                continue
            if (found := _ITEMS.search(str(problem))) and kinds.get(found[2], list) is None:
                kinds[found[2]] = OrderedDict if found[1] == "SETITEM" else list
                continue
            if "Weights only load failed" not in str(problem) or "GLOBAL" not in str(problem):
                raise ModelError(f"{source} is not a PyTorch checkpoint ({one_line(problem, 80)})") from problem
            raise ModelError(
                f"{source} holds pickled objects, not only tensors; where it was made, save "
                "model.state_dict() instead and convert that"
            ) from problem
        except Exception as problem:  # a damaged pickle may raise anything
            raise ModelError(
                f"{source} is damaged or not a PyTorch checkpoint ({one_line(problem, 80)}); copy it again"
            ) from problem


def _load(source: Path) -> object:
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as problem:
        if "mmap" not in str(problem):
            raise
        # files written before torch 1.6 are not zip archives and cannot be mapped
        return torch.load(source, map_location="cpu", weights_only=True)


def looks_pickled(path: Path) -> bool:
    """Return True for a file written by torch.save, by its name or its first bytes."""
    if path.name.lower().endswith(SUFFIXES):
        return True
    head = _head(path)
    # a safetensors file begins with the length of its header, in eight bytes of which the last four are zero
    return head.startswith((b"PK\x03\x04", b"\x80")) and head[4:8] != bytes(4)


def safetensors_name(path: Path) -> Path:
    """Return a checkpoint's path with the suffix of safetensors.

    >>> safetensors_name(Path("model_best.pth.tar"))
    PosixPath('model_best.safetensors')
    """
    suffix = next((known for known in sorted(SUFFIXES, key=len)[::-1] if path.name.lower().endswith(known)), "")
    return path.with_name(f"{path.name[: len(path.name) - len(suffix)]}.safetensors")


def what_it_is(path: Path) -> str | None:
    """Return what a path is that is neither safetensors nor a pickled checkpoint, with what to do; None if unknown."""
    if path.is_dir():
        if (path / ".metadata").is_file():
            return f"a distributed checkpoint; convert it first: penstock convert {path} -o {path.name}.safetensors"
        return "a folder; give the file in it" + (f" {_INDEX}" if (path / _INDEX).is_file() else "")
    if is_special(path):
        return "a pipe or device, not a file; copy its bytes into a file"
    if _head(path).startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS, not the file; run git lfs pull in its repository"
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            leaves = {name.rpartition("/")[2] for name in archive.namelist()}
        return next((text.replace("FILE", repr(str(path))) for leaf, text in _ARCHIVES.items() if leaf in leaves), None)
    return None


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError:  # reported where the file is read
        return b""
