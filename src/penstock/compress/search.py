"""What a search for a faster model is asked, what it may find, and which of that is best: values and rules alone."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.errors import UsageError
from penstock.files import written_whole
from penstock.recipes.settings import PathText, Positive, WholePath

if TYPE_CHECKING:
    from penstock.compress.quantize import LayerLoss

BASELINE = "eager"
Importance = Literal["magnitude", "taylor", "hessian"]

Ratio = Annotated[float, Meta(ge=0.0, lt=1.0)]


class CompressSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trained model, its data, what is asked of it, and what may be tried.

    One of `accuracy_floor`, `max_drop` and `target_speedup` is given. `runtimes` are all that there are where none is
    named. In 8 bits models are also tried with as many of the layers that lose most in float32 as `keep` says. Nothing
    is learned from the images of `test`, or from every fifth of `data` where none are given. Rates are of
    `microbatch_size` images at a time and of `threads`; training takes all cores. A field with a description is an
    option of `penstock compress`.
    """

    model: str
    data: Annotated[str, Meta(description="Labelled images: a folder, a tar, CIFAR, or 'digits'.")]
    test: Annotated[
        str | None, Meta(description="Images to measure with alone; every fifth of --data if not given.")
    ] = None
    weights: WholePath | None = None
    pretrained: bool = False
    output: Annotated[
        PathText,
        Meta(description="The search's folder; a second run goes on.", extra={"flags": ["--output", "-o"]}),
    ] = "runs/compress"
    accuracy_floor: Annotated[Ratio | None, Meta(description="Keep this part of the test images right.")] = None
    max_drop: Annotated[Ratio | None, Meta(description="Lose at most this part, as in 0.01 for a point.")] = None
    target_speedup: Annotated[
        float | None, Meta(description="Be this many times as fast as eager, as accurately as can be.")
    ] = None
    ratios: tuple[Ratio, ...] = (0.0, 0.15, 0.3, 0.45, 0.6)
    runtimes: tuple[str, ...] = ()
    importance: Annotated[Importance, Meta(description="By which channels go: magnitude, taylor or hessian.")] = (
        "hessian"
    )
    everywhere: Annotated[
        bool,
        Meta(
            description="Compare channels of the whole model, or prune the same part of every layer.",
            extra={"flags": ["--everywhere/--per-layer"]},
        ),
    ] = True
    round_to: Annotated[Positive, Meta(description="Keep widths multiples of this.")] = 8
    epochs: Annotated[int, Meta(ge=0, description="To train on after pruning.")] = 3
    lr: Annotated[float, Meta(description="Learning rate of that.")] = 5e-4
    batch_size: Annotated[Positive, Meta(description="Rows of a step of that.")] = 16
    weight_decay: float = 1e-4
    optimizer: Annotated[Literal["sgd", "adamw"], Meta(description="sgd or adamw.")] = "sgd"
    keep: tuple[Annotated[int, Meta(ge=1)], ...] = (2, 4)
    num_rows: Annotated[Positive | None, Meta(description="Use only this many images of --data.")] = None
    num_test_rows: Annotated[Positive, Meta(description="Measure with at most this many images.")] = 1000
    microbatch_size: Positive = 1
    threads: int = 1
    seed: int = 0


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the model: how much was pruned, what computes it, how accurate and how fast that is."""

    ratio: float
    runtime: str
    accuracy: float
    rows_per_s: float
    num_parameters: int
    weights: str

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.runtime}, {self.ratio:.0%} pruned" if self.ratio else self.runtime


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a search has found; `best` is what was asked for, or the nearest to it where `met` is false.

    `model` is the name that goes with the weights of `best`.
    """

    settings: CompressSettings
    found: tuple[Found, ...]
    best: Found
    met: bool
    model: str


def check_asked(settings: CompressSettings) -> None:
    """Check what is asked for; raises `UsageError`."""
    asked = [settings.accuracy_floor, settings.max_drop, settings.target_speedup]
    if sum(each is not None for each in asked) != 1:
        raise UsageError("a search has one aim; give one of --accuracy-floor, --max-drop and --target-speedup")
    if settings.target_speedup is not None and not settings.target_speedup > 0:
        raise UsageError(f"a target speed-up is above 0, not {settings.target_speedup:g}")
    from penstock.compress.measure import names_of_runtimes  # which needs torch

    unknown = [name for name in settings.runtimes if name not in names_of_runtimes()]
    if unknown:
        raise UsageError(f"the runtime {unknown[0]!r} is not known; use some of {', '.join(names_of_runtimes())}")


def floor_of(settings: CompressSettings, found: Sequence[Found]) -> float:
    """Return the accuracy to hold; there is none where a speed-up is asked for.

    `found` begins with the model as it was given, computed eagerly.
    """
    if settings.max_drop is not None:
        return baseline(found).accuracy - settings.max_drop
    return settings.accuracy_floor if settings.accuracy_floor is not None else 0.0


def baseline(found: Sequence[Found]) -> Found:
    """Return the model as it was given, computed eagerly."""
    return next(each for each in found if not each.ratio and each.runtime == BASELINE)


def is_enough(settings: CompressSettings, found: Sequence[Found], ratio: float) -> bool:
    """Return whether pruning more cannot help: the speed-up is reached, or none of the last step holds the floor."""
    if settings.target_speedup is not None:
        return choose(settings, found)[1]
    return not any(each.accuracy >= floor_of(settings, found) for each in found if each.ratio == ratio)


def choose(settings: CompressSettings, found: Sequence[Found]) -> tuple[Found, bool]:
    """Return the fastest that holds the floor, or the most accurate that is fast enough; or the nearest and False."""
    if settings.target_speedup is not None:
        wanted = settings.target_speedup * baseline(found).rows_per_s
        fast = [each for each in found if each.rows_per_s >= wanted]
        if fast:
            return max(fast, key=lambda each: (each.accuracy, each.rows_per_s)), True
        return max(found, key=lambda each: each.rows_per_s), False
    holding = [each for each in found if each.accuracy >= floor_of(settings, found)]
    if holding:
        return max(holding, key=lambda each: each.rows_per_s), True
    return max(found, key=lambda each: (each.accuracy, each.rows_per_s)), False


def frontier(found: Sequence[Found]) -> list[Found]:
    """Return those that nothing else is both faster and at least as accurate than, fastest last.

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
    """Write what 8 bits do in each layer alone, worst first."""
    with written_whole(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(list(losses))) + b"\n")


class _Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A search as it is kept in a file: what was asked, but for its aim, and what was found."""

    settings: CompressSettings
    found: tuple[Found, ...]


def write_search(path: Path, settings: CompressSettings, found: Sequence[Found]) -> None:
    """Keep what was found, for a search that goes on."""
    with written_whole(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(_Kept(settings=settings, found=tuple(found)))) + b"\n")


def read_search(path: Path, settings: CompressSettings) -> list[Found]:
    """Read what an earlier search has found; nothing where there was none.

    Raises `UsageError` for a search of another model, other data or other training.
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
            f"{path} is of a search with {other[0]} {before[other[0]]!r}, not {now[other[0]]!r}; choose another "
            "--output"
        )
    return list(kept.found)
