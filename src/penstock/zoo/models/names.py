"""Names of models with options, as on the command line."""

import re
from pathlib import Path

from torch import nn

from penstock.errors import ModelError
from penstock.zoo.models.functions import find_function, takes_num_classes

# models by name, with their option for the number of classes; others are functions
LIBRARIES = {"timm": "num_classes", "hf": "num_labels", "gguf": None}


def with_classes(name: str, num_classes: int) -> str:
    """Add the number of classes to a model's name, unless it has one.

    >>> with_classes("timm:resnet18", 10), with_classes("hf:vit,num_labels=4", 10)
    ('timm:resnet18,num_classes=10', 'hf:vit,num_labels=4')
    """
    option = _option_of_classes(name)
    return name if option is None or classes_in(name) is not None else f"{name},{option}={num_classes}"


def count_classes(module: nn.Module) -> int:
    """Return the number of classes of a timm or transformers model, or 0 if it does not have one."""
    return int(getattr(module, "num_classes", getattr(getattr(module, "config", None), "num_labels", 0)) or 0)


def classes_in(name: str) -> int | None:
    """Return the number of classes in a model's name, or None.

    >>> classes_in("timm:resnet18,num_classes=10"), classes_in("timm:resnet18")
    (10, None)
    """
    option = _option_of_classes(name)
    found = parse_hf(name.partition(":")[2])[1].get(option) if option is not None else None
    return found if isinstance(found, int) else None


def _option_of_classes(name: str) -> str | None:
    """Return the option for the number of classes of a model, or None if it has none."""
    source = name.partition(":")[0]
    if source in LIBRARIES:
        return LIBRARIES[source]
    return "num_classes" if takes_num_classes(find_function(parse_name(name)[0])) else None


def parse_hf(text: str) -> tuple[str, dict[str, object]]:
    """Split a model of transformers into its name and options; a directory may have a comma in its name."""
    return (text, {}) if Path(text).expanduser().is_dir() else parse_name(text)


def parse_name(text: str) -> tuple[str, dict[str, object]]:
    """Split `NAME,key=value,...` into the name and its options.

    Raises `ModelError` if an option has no key, no `=` or is given twice.

    >>> parse_name("vit_tiny_patch16_224,num_classes=10,drop_rate=0.1")
    ('vit_tiny_patch16_224', {'num_classes': 10, 'drop_rate': 0.1})
    """
    name, *parts = text.split(",")
    options: dict[str, object] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier() or key in options:
            raise ModelError(f"an option of a model must be key=value, each key once; got {part!r} in {text!r}")
        options[key] = parse_value(value.strip())
    return name.strip(), options


def parse_value(text: str) -> object:
    """Read an option's value: an integer, a number, true, false, none, a size such as 224x320, or the text itself.

    >>> [parse_value(text) for text in ("12", "1e-5", "true", "none", "224x320", "gelu")]
    [12, 1e-05, True, None, (224, 320), 'gelu']
    """
    if re.fullmatch(r"[0-9]+x[0-9]+", text):
        return tuple(map(int, text.split("x")))
    words: dict[str, object] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text
