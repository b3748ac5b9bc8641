"""Draw how long the epochs of each way take, one on top of the other, and what accuracy each alpha ends at."""

import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a picture of the rows of a lab and of the accuracies."""
    rows, accuracy = result["lab"], result["accuracy"].get("vit", {})
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2.4, 1])
    for place, row in enumerate(rows.values()):
        begin = 0.0
        for epoch, seconds in enumerate(row["seconds"]):
            left.barh(place, seconds, left=begin, color="#3b6ea5" if epoch % 2 else "#8fb3d6", height=0.7)
            begin += seconds
        left.annotate(f" {begin:.0f} s", (begin, place), va="center", fontsize=8)
    left.set_yticks(range(len(rows)), list(rows), fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("seconds, epoch after epoch", fontsize=8)
    left.margins(x=0.1)
    for place, values in enumerate(accuracy.values()):
        right.plot([place] * len(values), [100 * value for value in values], "o", color="#8fb3d6")
        right.plot([place - 0.3, place + 0.3], [100 * statistics.mean(values)] * 2, color="#3b6ea5")
    right.set_xticks(range(len(accuracy)), [name.replace(", ", ",\n") for name in accuracy], fontsize=8, rotation=60)
    right.set_ylabel("accuracy after the last epoch, %; each seed and the mean", fontsize=8)
    for axes in (left, right):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)
