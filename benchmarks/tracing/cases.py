"""Six ways to lose speed, each provoked on purpose, with the size that it should have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

MODEL = "timm:deit_small_patch16_224"
TINY = "timm:vit_tiny_patch16_224,depth=4,img_size=32,patch_size=8"
TRAINED = "timm:vit_tiny_patch16_224,img_size=32,patch_size=4,depth=6"
HOSTS = 4
SHARE = 0.35


@dataclass(frozen=True, kw_only=True)
class Case:
    """One lab, one stream, and the cause that should be named first."""

    name: str
    cause: str | None = None
    shares: tuple[float, ...] = (SHARE,) * HOSTS
    bandwidth: str = "1 Gbit/s"
    model: str = MODEL
    num_images: int = 40
    cuts: tuple[str, ...] = ()
    busy: int | None = None  # the rank on whose host another process computes all the time


@dataclass(frozen=True, kw_only=True)
class Toggled:
    """One run in which recording goes on and off, block by block; of a training, a block is a step.

    With `profile` recording stays on, and torch's profiler goes on and off.
    """

    name: str
    kind: str
    model: str
    num_blocks: int
    rows: int = 0
    profile: bool = False


_UNEVEN = ("blocks.5:after", "blocks.7:after", "blocks.9:after")
CASES = (
    Case(name="nothing provoked"),
    Case(name="uneven stages", cause="imbalance", cuts=_UNEVEN),
    Case(name="few microbatches", cause="bubble", num_images=6),
    Case(name="slow link", cause="communication", bandwidth="10 Mbit/s"),
    Case(name="slow host", cause="imbalance", shares=(SHARE, SHARE, SHARE / 2, SHARE)),
    Case(name="busy machine", cause="slower", busy=2),
    Case(name="tiny model", cause="overhead", model=TINY, num_images=400),
)

TOGGLED = (
    Toggled(name="tracing on and off", kind="stream", model=MODEL, num_blocks=60),
    Toggled(name="training traced on and off", kind="training", model=TRAINED, num_blocks=80, rows=16),
    Toggled(name="profiler on and off", kind="stream", model=MODEL, num_blocks=24, profile=True),
)


def expected(case: Case, base: Mapping[str, float], known: Mapping[str, float]) -> float | None:
    """Return the size that the provoked cause should have, from the settings and what was known before the run.

    `base` is the account of the run in which nothing was provoked: `speedup`, `alone_s` and its lines. `known` has
    `share` (of the work in the largest stage, by floating-point operations), `message_bytes`, `bandwidth` in bytes
    per second, and for the tiny model `alone_s`, `share` by seconds, and `overhead_s` of the host that feeds, all three
    measured before.
    """
    if case.name == "uneven stages":
        return HOSTS - 1 / known["share"]
    if case.name == "few microbatches":
        even = HOSTS - base["imbalance"]
        return even - even * case.num_images / (case.num_images + HOSTS - 1)
    if case.name == "slow link":
        # a message takes longer than a stage: the pace is the link's, and filling takes the messages and the stages
        message_s = known["message_bytes"] / known["bandwidth"]
        total_s = case.num_images * message_s + (HOSTS - 2) * message_s + base["alone_s"]
        before = base["speedup"] + base["communication"] + base["remainder"]
        return before - case.num_images * base["alone_s"] / total_s
    if case.name == "slow host":
        mean = sum(case.shares) / HOSTS
        return HOSTS - HOSTS * min(case.shares) / mean
    if case.name == "busy machine":
        # two processes share the host's quota: the stage on it takes twice as long
        pace = base["imbalance"]
        even = HOSTS - pace
        fill = case.num_images / (case.num_images + HOSTS - 1)
        return even * fill - even * case.num_images / (2 * case.num_images + HOSTS - 1)
    if case.name == "tiny model":
        stage_s = known["alone_s"] * known["share"]
        return known["alone_s"] / stage_s - known["alone_s"] / (stage_s + known["overhead_s"])
    return None


def within(size: float, wanted: float, part: float = 0.2) -> bool:
    """Return whether a size is what it should be, up to a part of it."""
    return abs(size - wanted) <= part * abs(wanted)


def shares_of_work(units: Sequence[float], bounds: Sequence[int]) -> list[float]:
    """Return each stage's part of the work.

    >>> shares_of_work([1.0, 1.0, 2.0], [0, 2, 3])
    [0.5, 0.5]
    """
    whole = sum(units)
    return [sum(units[a:b]) / whole for a, b in pairwise(bounds)]
