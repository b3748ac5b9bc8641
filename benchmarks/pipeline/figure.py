"""The figure: efficiency of every row, and where the stages' time went."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw efficiency as bars, and compute, wait and send of each stage as parts of the whole.

    Of several rounds the one in the middle is drawn, with the range of all.
    """
    rounds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["efficiency"]:
            rounds.setdefault(f"{row['case']}: {row['label']}", []).append(row)
    labels = list(rounds)
    ordered = [sorted(group, key=lambda row: row["efficiency"]) for group in rounds.values()]
    shown = [group[(len(group) - 1) // 2] for group in ordered]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(15, 1.3 + 0.42 * len(shown)), sharey=True, gridspec_kw={"width_ratios": [1, 1]}
    )
    places = list(range(len(shown)))
    left.barh(places, [row["efficiency"] for row in shown], color="#3b6ea5")
    left.axvline(1.0, color="black", linewidth=0.8)
    for place, row, group in zip(places, shown, ordered, strict=True):
        low, high = group[0]["efficiency"], group[-1]["efficiency"]
        left.plot([low, high], [place, place], color="black", linewidth=1.2)
        left.text(high + 0.01, place, f"{row['efficiency']:.3f}", va="center", fontsize=8)
    left.set_yticks(places, labels, fontsize=8)
    left.invert_yaxis()
    left.set_xlim(0, max([1.12, *(group[-1]["efficiency"] + 0.08 for group in ordered)]))
    left.set_xlabel("steady throughput / what the devices do alone, all at once")
    colors = {"compute_s": "#3b6ea5", "wait_s": "#d9d9d9", "send_s": "#e08e45"}
    for place, row in zip(places, shown, strict=True):
        height = 0.8 / max(1, len(row["per_stage"]))
        for index, stage in enumerate(row["per_stage"]):
            total = sum(stage[name] for name in colors) or 1.0
            start = 0.0
            for name, color in colors.items():
                part = stage[name] / total
                right.barh(place - 0.4 + height * (index + 0.5), part, height * 0.9, left=start, color=color)
                start += part
    parts = [Patch(color=color, label=name.removesuffix("_s")) for name, color in colors.items()]
    right.legend(handles=parts, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8, frameon=False)
    right.set_xlim(0, 1)
    right.set_xlabel("share of each stage's time (one bar per stage)")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)
