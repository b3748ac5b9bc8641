"""The page's pictures for papers: the account, the timeline and the stages' loads as PNG and SVG."""

from pathlib import Path
from typing import Any

from penstock.errors import UsageError
from penstock.report.account import Account
from penstock.report.figures import KEPT, LOST, MOVE, PALETTE, WAIT
from penstock.report.measured import MeasuredStream


def draw_pictures(folder: Path, stream: MeasuredStream, account: Account) -> list[Path]:
    """Draw every picture into a folder, as PNG and SVG; gives the files.

    Raises `UsageError` where matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise UsageError("pictures need matplotlib; install penstock[report], or use --no-pictures") from None
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "penstock"  # the same run gives the same file
    import matplotlib.pyplot as plt

    written = []
    for name, draw in (("account", _account), ("timeline", _timeline), ("loads", _loads)):
        figure, axes = plt.subplots(figsize=(8, 3.6))
        draw(axes, stream, account)
        figure.tight_layout()
        for kind in ("png", "svg"):
            file = folder / f"{name}.{kind}"
            figure.savefig(file, dpi=120)
            written.append(file)
        plt.close(figure)
    return written


def _account(axes: Any, stream: MeasuredStream, account: Account) -> None:
    del stream
    level = account.num_times
    names = ["together", *(line.title for line in account.lines), "measured"]
    axes.bar(0, level, color=KEPT)
    axes.text(0, level, f"{level:.2f}", ha="center", va="bottom", fontsize=8)
    for place, line in enumerate(account.lines, 1):
        axes.bar(place, line.times, bottom=level - line.times, color=LOST)
        axes.text(place, max(level, level - line.times), f"{-line.times:+.2f}", ha="center", va="bottom", fontsize=8)
        level -= line.times
    axes.bar(len(names) - 1, level, color=KEPT)
    axes.text(len(names) - 1, level, f"{level:.2f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("times one device")
    axes.set_ylim(0, account.num_times * 1.12)


def _timeline(axes: Any, stream: MeasuredStream, account: Account) -> None:
    del account
    shown = min(stream.num_microbatches, 4 * len(stream.stages))
    for stage in stream.stages:
        for step in stage.steps[:shown]:
            begin = step.begin_s - stream.begin_s
            axes.barh(
                stage.index,
                step.compute_s,
                left=begin,
                color=PALETTE[step.microbatch % len(PALETTE)],
                edgecolor="white",
            )
            axes.text(begin + step.compute_s / 2, stage.index, f"F{step.microbatch}", ha="center", va="center",
                      fontsize=7, color="white", clip_on=True)  # fmt: skip
    axes.set_yticks([stage.index for stage in stream.stages], [f"stage {s.index}" for s in stream.stages])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")


def _loads(axes: Any, stream: MeasuredStream, account: Account) -> None:
    del account
    names = [f"stage {stage.index}" for stage in stream.stages]
    bottom = [0.0] * len(names)
    for label, color, values in (
        ("computing", KEPT, [s.mean("compute_s") for s in stream.stages]),
        ("messages", MOVE, [s.mean("message_s") for s in stream.stages]),
        ("waiting", WAIT, [s.mean("wait_s") for s in stream.stages]),
    ):
        axes.bar(names, [v * 1e3 for v in values], bottom=bottom, color=color, label=label)
        bottom = [b + v * 1e3 for b, v in zip(bottom, values, strict=True)]
    axes.set_ylabel("ms per microbatch")
    axes.legend(fontsize=8)
