"""Sentences with labels out of sentiment trees, as the Stanford Sentiment Treebank has them.

(3 (2 It) (4 (2 's) (4 lovely)))      one tree on each line; the first number is the sentence's
"""

import re
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import DataError

_LEAF = re.compile(r"\(\d ([^()]+)\)")
_BRACKETS = {"-LRB-": "(", "-RRB-": ")", "\\/": "/", "\\*": "*"}
NEUTRAL = 2


@dataclass(frozen=True, slots=True)
class Sentences:
    """Sentences and what they are labelled with: 0 for negative, 1 for positive."""

    texts: list[str]
    labels: list[int]


def is_trees(path: Path) -> bool:
    """Return whether a file's first line is a tree.

    >>> is_trees(Path("sst2/train.txt"))  # doctest: +SKIP
    True
    """
    try:
        with path.open(encoding="utf-8") as file:
            return re.match(r"\(\d [(\S]", file.readline()) is not None
    except (OSError, UnicodeDecodeError):
        return False


def read_trees(path: Path) -> Sentences:
    """Read a file of trees; sentences that are neither positive nor negative are left out, as in SST-2.

    >>> read_trees(Path("sst2/dev.txt")).texts[0]  # doctest: +SKIP
    "It 's a lovely film with lovely performances by Buy and Accorsi ."

    Raises `DataError` for a file that cannot be read, and for a line that is no tree.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); give a file of trees") from None
    texts, labels = [], []
    for number, line in enumerate(lines, 1):
        words = _LEAF.findall(line)
        if not line.strip():
            continue
        if not words or not line.startswith("(") or not line[1:2].isdigit():
            raise DataError(f"line {number} of {path} is no tree; a line is like (3 (2 It) (4 works))")
        label = int(line[1])
        if label != NEUTRAL:
            texts.append(_plain(" ".join(words)))
            labels.append(int(label > NEUTRAL))
    return Sentences(texts, labels)


def _plain(text: str) -> str:
    for written, meant in _BRACKETS.items():
        text = text.replace(written, meant)
    return text
