"""Pictures for papers: the account, the timeline and the loads of stages, as PNG and SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import UsageError
from penstock.report.page.figures import KEPT, LOST, MOVE, PALETTE, WAIT
from penstock.report.stream.account import Account
from penstock.report.stream.measured import MeasuredStream
from penstock.text import plain


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of the timeline, for a computation: its row, begin and end, and label; backwards are striped."""

    row: int
    begin_s: float
    seconds: float
    text: str
    color: str
    striped: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """Content of the pictures: a timeline by rows, and loads by name with each part's label, colour and values."""

    rows: Sequence[str]
    bars: Sequence[Bar]
    names: Sequence[str]
    parts: Sequence[tuple[str, str, Sequence[float]]]
    unit: str


def stream_picture(stream: MeasuredStream) -> Picture:
    """Return the content of a stream's pictures: the pipeline filling, and the stages' loads."""
    shown = min(stream.num_microbatches, 4 * len(stream.stages))
    bars = [
        Bar(stage.index, step.begin_s - stream.begin_s, step.compute_s, f"F{step.microbatch}",
            PALETTE[step.microbatch % len(PALETTE)])
        for stage in stream.stages for step in stage.steps if step.microbatch < shown
    ]  # fmt: skip
    names = [f"stage {stage.index}" for stage in stream.stages]
    parts = [
        ("computing", KEPT, [s.mean("compute_s") for s in stream.stages]),
        ("messages", MOVE, [s.mean("message_s") for s in stream.stages]),
        ("waiting", WAIT, [s.mean("wait_s") for s in stream.stages]),
    ]
    return Picture(names, bars, names, parts, "ms per microbatch")


def draw_pictures(folder: Path, account: Account, picture: Picture) -> list[Path]:
    """Draw every picture into a folder, as PNG and SVG; return the files.

    Raises `UsageError` if matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise UsageError("pictures need matplotlib; install penstock[report], or use --no-pictures") from None
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "penstock"  # the same run always produces the same file
    mpl.rcParams["text.parse_math"] = False  # a name with dollar signs is not a formula
    import matplotlib.pyplot as plt

    written = []
    for name in ("account", "timeline", "loads"):
        figure, axes = plt.subplots(figsize=(8, 3.6))
        if name == "account":
            _account(axes, account)
        elif name == "timeline":
            _timeline(axes, picture)
        else:
            _loads(axes, picture)
        figure.tight_layout()
        for kind in ("png", "svg"):
            file = folder / f"{name}.{kind}"
            figure.savefig(file, dpi=120)
            written.append(file)
        plt.close(figure)
    return written


def _account(axes: Any, account: Account) -> None:
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


def _timeline(axes: Any, picture: Picture) -> None:
    for bar in picture.bars:
        axes.barh(
            bar.row, bar.seconds, left=bar.begin_s, color=bar.color, edgecolor="white", hatch="//" * bar.striped
        )  # fmt: skip
        axes.text(bar.begin_s + bar.seconds / 2, bar.row, bar.text, ha="center", va="center",
                  fontsize=7, color="white", clip_on=True)  # fmt: skip
    axes.set_yticks(range(len(picture.rows)), [plain(row) for row in picture.rows])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")


def _loads(axes: Any, picture: Picture) -> None:
    bottom = [0.0] * len(picture.names)
    names = [plain(name) for name in picture.names]
    for label, color, values in picture.parts:
        axes.bar(names, [v * 1e3 for v in values], bottom=bottom, color=color, label=label)
        bottom = [b + v * 1e3 for b, v in zip(bottom, values, strict=True)]
    axes.set_ylabel(picture.unit)
    axes.legend(fontsize=8)
