"""How a model is written on the command line, and what to say when a name is not known."""

from penstock.errors import ModelError


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
