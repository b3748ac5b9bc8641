"""Data and rules of a search for a faster model: settings, results, and the choice of the best result."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.errors import UsageError
from penstock.files import written_whole
from penstock.runtime.registry import parse_runtime
from penstock.spec.settings import PathText, Positive, WholePath
from penstock.zoo.optional import optional_import

if TYPE_CHECKING:
    from penstock.compress.measure import LayerLoss


BASELINE = "eager"
_CONTENDERS = 5
Importance = Literal["magnitude", "taylor", "hessian"]

Ratio = Annotated[float, Meta(ge=0.0, lt=1.0)]


class CompressSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trained model, its data, the aim, and the options to try.

    Exactly one of `accuracy_floor`, `max_drop` and `target_speedup` must be set. `runtimes` defaults to all installed
    runtimes. 8-bit models are also tried with the `keep` most sensitive layers in float32. The images of `test`, by
    default every fifth image of `data`, are never trained on. Rates are for `microbatch_size` images at a time and
    `threads`; training uses all cores. A field with a description is an option of `penstock compress`.
    """

    model: str
    data: Annotated[str, Meta(description="Labelled images: folder, tar, CIFAR, or 'digits'.")]
    test: Annotated[str | None, Meta(description="Images only for measuring. Default: every fifth of --data.")] = None
    weights: WholePath | None = None
    pretrained: bool = False
    output: Annotated[
        PathText,
        Meta(
            description="Folder of the search; a second run resumes it.",
            extra={"flags": ["--output", "-o"], "written": "folder"},
        ),
    ] = "runs/compress"
    accuracy_floor: Annotated[Ratio | None, Meta(description="Lowest accuracy on the test images.")] = None
    max_drop: Annotated[Ratio | None, Meta(description="Largest drop in accuracy, as in 0.01 for a point.")] = None
    target_speedup: Annotated[
        float | None, Meta(description="Speed-up over eager to reach with the best accuracy.")
    ] = None
    ratios: tuple[Ratio, ...] = (0.0, 0.15, 0.3, 0.45, 0.6)
    runtimes: tuple[str, ...] = ()
    importance: Annotated[Importance, Meta(description="Criterion for pruning: magnitude, taylor or hessian.")] = (
        "hessian"
    )
    everywhere: Annotated[
        bool,
        Meta(
            description="Compare channels of the whole model, or prune the same fraction of every layer.",
            extra={"flags": ["--everywhere/--per-layer"]},
        ),
    ] = True
    round_to: Annotated[Positive, Meta(description="Keep widths multiples of this.")] = 8
    epochs: Annotated[int, Meta(ge=0, description="Epochs of fine-tuning after pruning.")] = 3
    lr: Annotated[float, Meta(description="Learning rate of fine-tuning.")] = 5e-4
    batch_size: Annotated[Positive, Meta(description="Batch size of fine-tuning.")] = 16
    weight_decay: float = 1e-4
    optimizer: Annotated[Literal["sgd", "adamw"], Meta(description="sgd or adamw.")] = "sgd"
    keep: tuple[Annotated[int, Meta(ge=1)], ...] = (2, 4)
    num_rows: Annotated[Positive | None, Meta(description="Use only this many images of --data.")] = None
    num_test_rows: Annotated[Positive, Meta(description="Measure with at most this many images.")] = 1000
    microbatch_size: Positive = 1
    threads: int = 1
    seed: int = 0


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the model: pruned fraction, runtime, accuracy and speed.

    `rates` has the rates of each round of the last comparison, if this result took part; `rows_per_s` is then their
    median.
    """

    ratio: float
    runtime: str
    accuracy: float
    rows_per_s: float
    num_parameters: int
    weights: str
    rates: tuple[float, ...] = ()

    def ratios_to(self, other: "Found") -> list[float]:
        """Return the speed relative to another result, in each common round, or else of the single measurements."""
        if self.rates and other.rates:
            return [mine / its for mine, its in zip(self.rates, other.rates, strict=True)]
        return [self.rows_per_s / other.rows_per_s]

    @property
    def name(self) -> str:
        """Display name."""
        return f"{self.runtime}, {self.ratio:.0%} pruned" if self.ratio else self.runtime


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a search; `best` reaches the aim, or comes nearest to it if `met` is false.

    `model` is the model name to use with the weights of `best`.
    """

    settings: CompressSettings
    found: tuple[Found, ...]
    best: Found
    met: bool
    model: str


def check_asked(settings: CompressSettings) -> None:
    """Check the settings; raises `UsageError`."""
    asked = [settings.accuracy_floor, settings.max_drop, settings.target_speedup]
    if sum(each is not None for each in asked) != 1:
        raise UsageError(
            "a search needs exactly one aim; give one of --accuracy-floor, --max-drop and --target-speedup"
        )
    if settings.target_speedup is not None and not settings.target_speedup > 0:
        raise UsageError(f"a target speed-up must be above 0; got {settings.target_speedup:g}")
    from penstock.compress.measure import names_of_runtimes  # which needs torch

    unknown = [name for name in settings.runtimes if name not in names_of_runtimes()]
    if unknown:
        raise UsageError(f"runtimes must be among {', '.join(names_of_runtimes())}; got {unknown[0]!r}")
    for name in settings.runtimes:
        parse_runtime(name).check_machine()


def floor_of(settings: CompressSettings, found: Sequence[Found]) -> float:
    """Return the lowest allowed accuracy; 0 if the aim is a speed-up.

    `found` begins with the original model on the eager runtime.
    """
    if settings.max_drop is not None:
        return baseline(found).accuracy - settings.max_drop
    return settings.accuracy_floor if settings.accuracy_floor is not None else 0.0


def baseline(found: Sequence[Found]) -> Found:
    """Return the result of the original model on the eager runtime."""
    return next(each for each in found if not each.ratio and each.runtime == BASELINE)


def is_enough(settings: CompressSettings, found: Sequence[Found], ratio: float) -> bool:
    """Return True if pruning more cannot help: the speed-up is reached, or the last step is below the floor."""
    if settings.target_speedup is not None:
        return choose(settings, found)[1]
    return not any(each.accuracy >= floor_of(settings, found) for each in found if each.ratio == ratio)


def contenders(settings: CompressSettings, found: Sequence[Found]) -> list[Found]:
    """Return the original model and the best other results so far, to be compared in turns."""
    base = baseline(found)
    left, best = [each for each in found if each != base], list[Found]()
    while left and len(best) < _CONTENDERS:
        chosen, _ = choose(settings, [base, *left])
        best.append(chosen if chosen != base else max(left, key=lambda each: each.rows_per_s))
        left.remove(best[-1])
    return [base, *best]


def choose(settings: CompressSettings, found: Sequence[Found]) -> tuple[Found, bool]:
    """Return the fastest result above the floor, or the most accurate that is fast enough; else the nearest and False.

    A result that was at least as fast as the fastest in any round of the comparison counts as equally fast; among
    these, the most accurate or the original model is returned.
    """
    if settings.target_speedup is not None:
        wanted = settings.target_speedup * baseline(found).rows_per_s
        fast = [each for each in found if each.rows_per_s >= wanted]
        if fast:
            return max(fast, key=lambda each: (each.accuracy, each.rows_per_s)), True
        return max(found, key=lambda each: each.rows_per_s), False
    holding = [each for each in found if each.accuracy >= floor_of(settings, found)]
    if holding:
        fastest = max(holding, key=lambda each: each.rows_per_s)
        alike = [each for each in holding if max(each.ratios_to(fastest)) >= 1]
        return max(alike, key=lambda each: (each.accuracy, each == baseline(found), each.rows_per_s)), True
    return max(found, key=lambda each: (each.accuracy, each.rows_per_s)), False


def frontier(found: Sequence[Found]) -> list[Found]:
    """Return the Pareto-optimal results, the fastest last.

    Example:
        [each.name for each in frontier(outcome.found)]
    """
    kept: list[Found] = []
    most = -math.inf
    for each in sorted(found, key=lambda each: (-each.rows_per_s, -each.accuracy)):
        if each.accuracy > most:
            kept.append(each)
            most = each.accuracy
    return kept[::-1]


def write_losses(path: Path, losses: "Sequence[LayerLoss]") -> None:
    """Write the effect of 8 bits in each layer, the largest error first."""
    with written_whole(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(list(losses))) + b"\n")


class _Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A search in a file: its settings, without the aim, and its results."""

    settings: CompressSettings
    found: tuple[Found, ...]


def write_search(path: Path, settings: CompressSettings, found: Sequence[Found]) -> None:
    """Save the results so that the search can be continued."""
    with written_whole(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(_Kept(settings=settings, found=tuple(found)))) + b"\n")


def read_search(path: Path, settings: CompressSettings) -> list[Found]:
    """Read the results of an earlier search; empty if there was none.

    Raises `UsageError` if the search has another model, data or training settings.
    """
    if not path.exists():
        return []
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path} holds no search ({error}); choose another --output") from None
    free = {"accuracy_floor", "max_drop", "target_speedup", "ratios", "runtimes", "output"}
    before, now = (msgspec.structs.asdict(each) for each in (kept.settings, settings))
    other = [name for name in now if name not in free and before[name] != now[name]]
    if other:
        raise UsageError(
            f"{other[0]} must be that of the search in {path}, {before[other[0]]!r}; got {now[other[0]]!r}; choose "
            "another --output"
        )
    return list(kept.found)


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
            f"{each.ratio:.0%}",
            (each.rows_per_s / base.rows_per_s, 100 * each.accuracy),
            fontsize=7,
            textcoords="offset points",
            xytext=(4, 4),
        )
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
