"""Class names in the metadata of a weights file."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from penstock.errors import ModelError

_KEY = "penstock.classes"  # in the metadata of a safetensors file
_Names = list[Annotated[str, msgspec.Meta(max_length=1000)]]


def write_classes(names: Sequence[str] | None) -> dict[str, str]:
    """Return the metadata that stores class names in a weights file, in the order of the model's outputs.

    >>> write_classes(["cat", "dog"])
    {'penstock.classes': '["cat","dog"]'}
    """
    return {_KEY: msgspec.json.encode(list(names)).decode()} if names else {}


def read_classes(metadata: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the class names in a weights file's metadata, or None.

    Raises `ModelError` if they are not a list of names.
    """
    if _KEY not in metadata:
        return None
    try:
        names = tuple(msgspec.json.decode(metadata[_KEY], type=_Names))
    except msgspec.MsgspecError as error:
        raise ModelError(f"the file's {_KEY} cannot be read ({error}); train or compress the model again") from None
    return names or None
