"""How a model is written on the command line, and what to say when a name is not known."""

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType

from penstock.errors import ModelError, PenstockError
from penstock.text import one_line


def nearest(name: str, candidates: Iterable[str], num_names: int = 3) -> str:
    """Write the names most like a wrong one, as the end of an error message.

    Nothing is raised; without a similar name the text is empty.

    >>> nearest("vit_tiny_patch16", ["vit_tiny_patch16_224", "resnet18"])
    '; did you mean vit_tiny_patch16_224?'
    """
    found = difflib.get_close_matches(name, list(candidates), n=num_names, cutoff=0.5)
    return f"; did you mean {', '.join(found)}?" if found else ""


def parse_name(text: str) -> tuple[str, dict[str, object]]:
    """Split `NAME,key=value,...` into the name and its options.

    Raises `ModelError` when an option has no key, no `=` or is given twice.

    >>> parse_name("vit_tiny_patch16_224,num_classes=10,drop_rate=0.1")
    ('vit_tiny_patch16_224', {'num_classes': 10, 'drop_rate': 0.1})
    """
    name, *parts = text.split(",")
    options: dict[str, object] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier() or key in options:
            raise ModelError(f"an option of a model is key=value, each key once, not {part!r} in {text!r}")
        options[key] = parse_value(value.strip())
    return name.strip(), options


def parse_value(text: str) -> object:
    """Read an option's value: an integer, a number, true, false, none, or else the text itself.

    Nothing is raised.

    >>> [parse_value(text) for text in ("12", "1e-5", "true", "none", "gelu")]
    [12, 1e-05, True, None, 'gelu']
    """
    words: dict[str, object] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def optional_import(name: str, extra: str, error: type[PenstockError] = ModelError) -> ModuleType:
    """Import a library that is not part of the core, or say what to install.

    Raises `error` when the library is missing.

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
