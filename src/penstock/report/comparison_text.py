"""Description of a bench's results in sentences; all numbers are computed from its rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from penstock.report.stream.account import TITLES, Account
from penstock.report.stream.measured import MeasuredStream
from penstock.text import counted
from penstock.units import format_bytes, format_seconds

# causes that cost less than this are not mentioned
_WORTH = 0.02


@dataclass(frozen=True, slots=True)
class Compared:
    """A row of the bench, with the recording of its last pass, its measurements and its account."""

    row: Mapping[str, Any]
    stream: MeasuredStream
    account: Account

    @property
    def name(self) -> str:
        """Display name of the row."""
        return name_of(self.row)


def name_of(row: Mapping[str, Any]) -> str:
    """Return the display name of a row.

    >>> name_of({"mode": "pipeline", "stages": 2, "policy": "balanced"})
    '2 stages, balanced'
    """
    if row["mode"] == "serial":
        return "one process"
    policy = "torch.distributed.pipelining" if row["mode"] == "peer" else row["policy"]
    if policy == "by hand":
        policy = f"cut by hand at {', '.join(row['cuts'])}"
    return f"{counted(row['stages'], 'stage')}, {policy}"


def compare_counts(pipelines: Sequence[Compared]) -> list[str]:
    """Describe for each stage count the losses of its fastest pipeline, and the gain of further stages."""
    best = _best_of_counts(pipelines)
    lines = []
    for item in best:
        account = item.account
        lost = sorted((line for line in account.lines if line.times >= _WORTH * account.num_times),
                      key=lambda line: -line.times)  # fmt: skip
        causes = "; ".join(f"{line.times:.2f} to {line.title} ({line.why})" for line in lost)
        lines.append(
            f"{item.name}: {item.row['speedup']:.2f} times one process. By the account "
            f"{account.speedup:.2f} of {account.num_times:.2f} are reached"
            + (f" and {account.num_times - account.speedup:.2f} are lost: {causes}." if lost else ".")
        )
    for before, after in pairwise(best):
        gained = after.row["speedup"] - before.row["speedup"]
        more = after.row["stages"] - before.row["stages"]
        grown = max(after.account.lines, key=lambda line: line.times - before.account.times(line.key))
        grew = grown.times - before.account.times(grown.key)
        lines.append(
            f"From {before.row['stages']} to {after.row['stages']} stages the speed-up changes by {gained:+.2f} for "
            f"{counted(more, 'more device')}"
            + (f"; what grows most is {grown.title}, by {grew:.2f}." if grew >= _WORTH else ".")
        )
    if best:
        top = max(best, key=lambda item: item.row["speedup"])
        lines.append(
            f"Of these counts {top.row['stages']} is the quickest; per device, "
            + ", ".join(f"{item.row['stages']} give {item.row['speedup'] / item.row['stages']:.2f}" for item in best)
            + "."
        )
    return lines


def compare_policies(pipelines: Sequence[Compared]) -> list[str]:
    """Describe the split points of each policy, and for each stage count the advantage of its best policy."""
    lines = []
    for count in _counts(pipelines):
        found = sorted((p for p in pipelines if p.row["stages"] == count), key=lambda p: -p.row["speedup"])
        for item in found:
            lines.append(f"{item.name}, {_where(item)}")
        if len(found) > 1 and found[0].row["cuts"]:
            lines += [_why(_like(other, found) or found[0], other) for other in found[1:]]
    return lines


def _where(item: Compared) -> str:
    """Describe a pipeline's split points."""
    cuts, shares = item.row["cuts"], item.row.get("shares", [])
    if not cuts:
        return "is not split."
    crossing = sum(item.row.get("crossing_bytes", []))
    text = f"splits at {', '.join(cuts)}"
    if shares:
        text += f"; the stages have {', '.join(f'{share:.1%}' for share in shares)} of the counted work"
    return f"{text}; {format_bytes(crossing)} cross per microbatch; {item.row['speedup']:.2f} times one process."


def _why(best: Compared, other: Compared) -> str:
    """Explain why one pipeline is faster than another: the other's largest additional loss, and its figures."""
    slower = 1 - other.row["speedup"] / best.row["speedup"]
    better, worse = best.row["policy"], other.row["policy"]
    if best.row["cuts"] == other.row["cuts"]:
        return f"{worse} has the same cuts as {better}: the {slower:.1%} between them is how unsteady the machine is."
    longer = _alone_s(other) / _alone_s(best) - 1
    line = max(other.account.lines, key=lambda line: line.times - best.account.times(line.key))
    more = line.times - best.account.times(line.key)
    text = f"{worse} is {slower:.1%} slower than {better}"
    if more < _WORTH:
        return f"{text}, with no cause that costs it {_WORTH:g} times more{_unsteady(longer)}."
    text += f": it loses {more:.2f} times more to {TITLES[line.key]}"
    if line.key == "imbalance":
        text += f", its slowest stage takes {_slowest(other)} alone, that of {better} {_slowest(best)}"
    elif line.key in {"communication", "communication_cpu"}:
        text += f", {_crossing(other)} cross per microbatch instead of {_crossing(best)}"
    else:
        text += f" ({line.why})"
    return f"{text}{_unsteady(longer)}."


def _like(other: Compared, found: Sequence[Compared]) -> Compared | None:
    """Return a faster pipeline with the same cuts, or None."""
    quicker = found[: found.index(other)]
    return next((item for item in quicker if item.row["cuts"] == other.row["cuts"]), None)


def _alone_s(item: Compared) -> float:
    return sum(stage.alone_s for stage in item.stream.stages)


def _unsteady(longer: float) -> str:
    """Describe that stages took longer alone: all rows run the same operations, so the policy is not the cause."""
    if longer < _WORTH:
        return ""
    return f"; all its stages alone took {longer:.1%} longer for the same operations, which is the machine's doing"


def _slowest(item: Compared) -> str:
    return format_seconds(max(stage.alone_s for stage in item.stream.stages))


def _crossing(item: Compared) -> str:
    return format_bytes(sum(item.row.get("crossing_bytes", [])))


def _counts(pipelines: Sequence[Compared]) -> list[int]:
    return sorted({item.row["stages"] for item in pipelines})


def _best_of_counts(pipelines: Sequence[Compared]) -> list[Compared]:
    return [
        max((item for item in pipelines if item.row["stages"] == count), key=lambda item: item.row["speedup"])
        for count in _counts(pipelines)
    ]  # fmt: skip
