"""Tables of a generation run: kinds of microbatches, latencies of requests, and caches."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from penstock.report.page.tables import Cell, Table
from penstock.tracing.trace import GenerationFacts, Run
from penstock.units import format_bytes, format_seconds


def generation_tables(run: Run) -> list[Table]:
    """Return the tables of a generation run; empty for other streams."""
    facts = run.facts.generation
    if facts is None:
        return []
    return [_requests(facts), _work(facts, run.facts.total_s)]


def _requests(facts: GenerationFacts) -> Table:
    first = sorted(each.came_s[0] - each.asked_s for each in facts.requests if each.came_s)
    gaps = sorted(b - a for each in facts.requests for a, b in pairwise(each.came_s))
    rows: list[tuple[Cell, ...]] = [
        ("tokens of an answer", *_three([len(each.came_s) for each in facts.requests], str)),
        ("tokens of a prompt", *_three([each.num_prompt for each in facts.requests], str)),
        ("time to the first token", *_three(first, format_seconds)),
        ("time between tokens", *_three(gaps, format_seconds)),
    ]
    return Table("requests", "Each request", ("what", "median", "99 of 100", "most"), tuple(rows))


def _three(values: Sequence[float], show: Callable[[float], str]) -> tuple[Cell, Cell, Cell]:
    """Return the median, the 99th percentile and the maximum of values."""
    if not values:
        return None, None, None
    ordered = sorted(values)
    at = min(len(ordered) - 1, int(0.99 * len(ordered)))
    return show(statistics.median_high(ordered)), show(ordered[at]), show(ordered[-1])


def _work(facts: GenerationFacts, total_s: float) -> Table:
    kinds = Counter(kind for kind, _ in facts.microbatches)
    right = f"{facts.num_right} of {facts.num_guesses} guessed tokens were right"
    tokens = sum(len(each.came_s) for each in facts.requests)
    held_s = sum(each.came_s[-1] - each.came_s[0] for each in facts.requests if each.came_s)
    reused = sum(each.num_reused for each in facts.requests)
    rows: list[tuple[Cell, ...]] = [
        ("requests", str(len(facts.requests)), None),
        ("tokens per second", f"{tokens / total_s:.4g}", None),
        ("slots in use, on average", f"{held_s / total_s:.1f}", f"of {facts.num_slots}"),
        ("tokens of prompts found in a cache", str(reused), None),
        ("chunks of prompts", str(kinds["prompt"]), None),
        ("steps", str(kinds["step"]), None),
        ("steps with guesses", str(kinds["guess"]), right),
    ]
    for index, num_bytes in enumerate(facts.cache_bytes):
        rows.append((f"caches of stage {index}", format_bytes(num_bytes), f"{facts.num_slots} sequences"))
    return Table("generation", "Requests, microbatches and caches", ("what", "amount", "note"), tuple(rows))
