"""Tokens of a prompt per second: the first token of an answer to 1,000 tokens, from one host and from four."""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.serving.in_lab import ask, served
from penstock.zoo.models.language import load_tokenizer

_TOKENS = 1000
_TURNS = 3
_TEXT = "water flows through a pipe to the turbine of a small power station below the dam and drives its wheel"


def prompt_speed(model: str, counts: tuple[int, ...], runtime: str, cut: str) -> list[dict[str, Any]]:
    """Ask servers of so many hosts for the first token after prompts of 1,000 tokens, one at a time."""
    tokenizer, given = load_tokenizer(model), _TEXT.split()
    rows = []
    for count in counts:
        seconds = []
        with tempfile.TemporaryDirectory() as place:
            options = ["--set", "slots=1", "--max-length", _TOKENS + 64, "--runtime", runtime]
            options += ["--cut", cut] if count > 1 else []
            with served(model, count, Path(place), *options) as (_, within):
                for turn in range(_TURNS + 1):  # the first makes engines; no two begin alike, so none is reused
                    words = [given[(turn + number * (turn + 3)) % len(given)] for number in range(_TOKENS)]
                    ids = tokenizer(" ".join(words))["input_ids"][:_TOKENS]
                    said = ask(within, [{"prompt": ids, "max_tokens": 1, "temperature": 0}], 1)
                    seconds.append(said["answers"][0]["came_s"][0])
        rows.append({"hosts": count, "runtime": runtime, "cut": cut, "first_token_s": seconds[1:],
                     "prompt_tokens_per_s": round(_TOKENS / statistics.median(seconds[1:]), 1)})  # fmt: skip
    return rows
