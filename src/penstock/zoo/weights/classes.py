"""Class names in the metadata of a weights file, or in the config.json next to it."""

from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.errors import ModelError

_KEY = "penstock.classes"  # in the metadata of a safetensors file
_Name = Annotated[str, msgspec.Meta(max_length=1000)]
_Names = list[_Name]


class _Config(msgspec.Struct):
    """Class names in a config.json: `id2label` of transformers, `label_names` of timm."""

    id2label: dict[int, _Name] = {}
    label_names: _Names = []


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
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"the file's {_KEY} cannot be read ({error}); train or compress the model again") from None
    return names or None


def names_of_labels(id2label: Mapping[int, str]) -> tuple[str, ...] | None:
    """Return the names in a configuration's `id2label`, or None for the default ones.

    >>> names_of_labels({0: "cat", 1: "dog"}), names_of_labels({0: "LABEL_0", 1: "LABEL_1"})
    (('cat', 'dog'), None)
    """
    if all(name == f"LABEL_{index}" for index, name in id2label.items()):
        return None
    return tuple(id2label[index] for index in sorted(id2label))


def names_beside(weights: Path) -> tuple[str, ...] | None:
    """Return the class names in the config.json next to a weights file, as transformers and timm write it, or None."""
    folder = weights if weights.is_dir() else weights.parent
    with suppress(OSError, msgspec.MsgspecError, RecursionError):  # the file may belong to something else
        config = msgspec.json.decode((folder / "config.json").read_bytes().removeprefix(BOM_UTF8), type=_Config)
        return tuple(config.label_names) or names_of_labels(config.id2label)
    return None
