"""Read and write specs as files, and name them by their content."""

import hashlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.errors import PenstockError, UsageError

_Spec = TypeVar("_Spec", bound=msgspec.Struct)
_FINGERPRINT_LENGTH = 16


def fingerprint(value: msgspec.Struct) -> str:
    """Name a spec by its content: equal specs have equal fingerprints, others differ.

    Example:
        plan.profile == fingerprint(profile)

    The first 16 hexadecimal digits of the SHA-256 of its JSON.
    """
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:_FINGERPRINT_LENGTH]


def decode_json(data: bytes, kind: type[_Spec], what: str, error: type[PenstockError]) -> _Spec:
    """Read a spec from JSON; raises `error` with the field and the reason in one line."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as wrong:
        reason, _, field = str(wrong).partition(" - at ")
        place = field.strip("`").removeprefix("$.") or "its top level"
        raise error(f"{what} does not hold what it should at {place}: {reason}; correct it or make it again") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise error(f"{what} is JSON, but this one is not ({wrong}); make it again") from None


def read_bytes(path: str | os.PathLike[str], what: str, error: type[PenstockError]) -> bytes:
    """Read a file; raises `error` where it cannot be."""
    try:
        return Path(path).read_bytes()
    except OSError as wrong:
        raise error(f"{what} must be readable, but {path} is not ({wrong.strerror}); give another path") from None


def write_json(path: str | os.PathLike[str], value: msgspec.Struct) -> None:
    """Write a spec as JSON for people and machines; raises `UsageError` where the file cannot be written."""
    data = msgspec.json.format(msgspec.json.encode(value), indent=1)
    write_text(path, data.decode() + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file; raises `UsageError` where it cannot be."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as wrong:
        raise UsageError(f"{path} cannot be written ({wrong.strerror}); choose another path") from None
