"""The validation losses of all runs, one panel for each model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.learning.cases import ALONE


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw one process as lines and pipelines as crosses upon them."""
    subjects = list(dict.fromkeys(row["subject"] for row in rows))
    figure = Figure(figsize=(4.2 * len(subjects), 3.4), layout="constrained")
    for axes, subject in zip(figure.subplots(1, len(subjects), squeeze=False)[0], subjects, strict=True):
        for row in (row for row in rows if row["subject"] == subject):
            color = ("#3b6ea5", "#9aa5b1", "#c2a36b")[row["seed"]]
            style = {"color": color} if row["way"] == ALONE else {"color": "#b5432e", "marker": "x", "linestyle": ""}
            axes.plot(row["steps"], row["losses"], label=f"{row['way']}, seed {row['seed']}", **style)
        axes.set_title(subject, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel("validation loss", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=8, frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(file, dpi=120)
