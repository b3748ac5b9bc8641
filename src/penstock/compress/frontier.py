"""A figure of a search's results: accuracy against throughput."""

from collections.abc import Sequence
from pathlib import Path

from penstock.compress.search import Found, Outcome, baseline, floor_of, frontier
from penstock.zoo.optional import optional_import


def draw_frontier(outcome: Outcome, path: Path) -> None:
    """Draw all results, the frontier as a line, the floor and the chosen result.

    Example:
        draw_frontier(outcome, Path("frontier.png"))
    """
    optional_import("matplotlib", "plot")
    from matplotlib.figure import Figure

    found, base = outcome.found, baseline(outcome.found)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for kind in dict.fromkeys(_kind(each) for each in found):
        own = [each for each in found if _kind(each) == kind]
        axes.plot(_speedups(own, base), _percents(own), "o", ms=5, label=kind)
    best = frontier(found)
    axes.plot(_speedups(best, base), _percents(best), "-", color="#888888", lw=1, zorder=0, label="frontier")
    for each in best:
        axes.annotate(
            f"{each.ratio:.0%}", (each.rows_per_s / base.rows_per_s, 100 * each.accuracy), fontsize=7,
            textcoords="offset points", xytext=(4, 4),
        )  # fmt: skip
    chosen = outcome.best
    axes.plot(_speedups([chosen], base), _percents([chosen]), "o", ms=13, mfc="none", color="black", label="chosen")
    if floor_of(outcome.settings, found) > 0:
        axes.axhline(100 * floor_of(outcome.settings, found), color="#c0392b", lw=0.8, ls="--", label="floor")
    axes.set_xlabel("throughput relative to the whole model on eager, in one process; labels: fraction pruned")
    axes.set_ylabel("accuracy on held-out images, %")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)


def _kind(found: Found) -> str:
    runtime, *kept = found.runtime.split("+")
    return f"{runtime}, {len(kept)} layers in float32" if kept else runtime


def _speedups(found: Sequence[Found], base: Found) -> list[float]:
    return [each.rows_per_s / base.rows_per_s for each in found]


def _percents(found: Sequence[Found]) -> list[float]:
    return [100 * each.accuracy for each in found]
