"""Find the one line of torch.export's error that tells a reader what to change."""

import re
import traceback
from pathlib import Path

import torch

_LONGEST = 240
_TORCH = str(Path(torch.__file__).parent)
# What torch says at length, and what a reader of the model needs to know instead
_KNOWN = (
    (r"Could not guard on data-dependent expression", "it decides by the values of a tensor"),
    (
        r"Could not extract specialized \w+ from data-dependent expression",
        "it takes a size from the values of a tensor",
    ),
)


def export_reason(error: BaseException) -> str:
    """Say in one line why a model does not export, with the line of the model's code where that is known.

    Example:
        "it decides by the values of a tensor (gate.py:12: if score.item() > 0.5:)"
    """
    return _shorten(_first_words(error)) + _place(error)


def _first_words(error: BaseException) -> str:
    text = str(error)
    for pattern, words in _KNOWN:
        if re.search(pattern, text):
            return words
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and lines[0].startswith("Constraints violated"):  # what is violated stands in the lines below
        lines = [line.removeprefix("- ") for line in lines if line.startswith("- ")] or lines
    if not lines:
        return type(error).__name__
    first = lines[0]
    return f"{first} {lines[1]}" if first[-1] in ",:" and len(lines) > 1 else first


def _shorten(text: str) -> str:
    """End at the end of a sentence where there is one, so that a long text stays one line."""
    if len(text) <= _LONGEST:
        return text
    sentence = text.rfind(". ", 0, _LONGEST)
    return text[:sentence] if sentence > 0 else text[:_LONGEST] + "..."


def _place(error: BaseException) -> str:
    """Return the deepest line outside of torch: that of the model, not that of the capture."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_TORCH, "<"))]
    inside = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    if not inside:
        return ""
    frame = inside[-1]
    code = f": {frame.line}" if frame.line else ""
    return f" ({Path(frame.filename).name}:{frame.lineno}{code})"
