"""Text for people: escaped, counted, shortened and printed."""

import difflib
import re
import sys
from collections.abc import Iterable

# controls of both sets, and the marks that change the direction of text
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}
# text that a spreadsheet evaluates; numbers and quantities, such as -3.2% or +12 ms, are excluded
_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
_QUANTITY = re.compile(r"[+-]?\d[\d.,]*([eE][+-]?\d+)?( ?[A-Za-z%/µ]{1,8})?")
_SURROGATES = range(0xD800, 0xE000)


def plain(text: str, *, lines: bool = False) -> str:
    """Return text with every control character written out, such as \\x1b for an escape; `lines` keeps line ends.

    >>> plain("cat\\x1b[2J.jpg")
    'cat\\\\x1b[2J.jpg'
    """
    if lines:
        return "\n".join(plain(line) for line in text.split("\n"))
    shown = text.translate(_SHOWN)
    # bytes of a file name that are not text: most streams refuse to write them
    return "".join(f"\\x{ord(c) & 0xFF:02x}" if ord(c) in _SURROGATES else c for c in shown)


def plain_cell(text: str) -> str:
    """Return text for a cell of a CSV file that a spreadsheet does not take for a formula; numbers stay as they are.

    >>> plain_cell("=cmd|' /C calc'!A0")
    "'=cmd|' /C calc'!A0"
    """
    return text if _QUANTITY.fullmatch(text) else guard_cell(text)


def guard_cell(text: str) -> str:
    """Put an apostrophe before text that a spreadsheet would treat as a formula; `unguard_cell` removes it."""
    return f"'{text}" if _FORMULA.match(text) else text


def unguard_cell(text: str) -> str:
    """Undo `guard_cell`.

    >>> unguard_cell(guard_cell("'=1+1")), unguard_cell(guard_cell("=1+1"))
    ("'=1+1", '=1+1')
    """
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    >>> counted(1, "stage"), counted(2, "epoch"), counted(0, "process")
    ('1 stage', '2 epochs', '0 processes')
    """
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith(('ss', 'tch')) else 's'}"


def one_line(problem: BaseException, max_length: int = 200) -> str:
    """Return the message of an exception as one line of bounded length.

    >>> one_line(ValueError("first\\n   second"))
    'first second'
    """
    text = " ".join(str(problem).split()) or type(problem).__name__
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def first_line(error: BaseException) -> str:
    """Return the first line of a torch error, without its source location.

    >>> first_line(RuntimeError("[enforce fail at pair.cc:534] connection closed\\nmore"))
    'connection closed'
    """
    return next(iter(str(error).splitlines()), type(error).__name__).rpartition("] ")[2]


def nearest(name: str, candidates: Iterable[str], num_names: int = 3, otherwise: str = "") -> str:
    """Return the names most like a wrong name, as the end of an error message; `otherwise` if no name is similar.

    >>> nearest("vit_tiny_patch16", ["vit_tiny_patch16_224", "resnet18"])
    '; did you mean vit_tiny_patch16_224?'
    """
    found = difflib.get_close_matches(name, list(candidates), n=num_names, cutoff=0.5)
    return f"; did you mean {', '.join(found)}?" if found else otherwise


def say(text: str, *, err: bool = False) -> None:
    """Print text, in one or more lines."""
    print(plain(text, lines=True), file=sys.stderr if err else sys.stdout, flush=True)


def note(text: str) -> None:
    """Print an informational line to standard error."""
    say(f"note: {plain(text)}", err=True)
