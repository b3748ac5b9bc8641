"""DeiT-S on four emulated hosts beside what others published: `python -m benchmarks.compared --json FILE`.

All rows are of one run, in turns with what the hosts do alone.
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.pipeline.__main__ import LAB, environment, lab_of, run, seconds_of
from benchmarks.pipeline.cases import BY_HAND, DEIT_S, TURNS, Case, pipeline
from benchmarks.pipeline.figure import draw
from benchmarks.planning.cases import frozen_profile, plan_task
from penstock.cluster.lab import take_down
from penstock.measure.profiler import device_kind
from penstock.spec.cluster import parse_cluster

ALTERNATING = "4 stages, cut sets that take turns"
EQUAL_SIZE = "4 stages, equal-size"
# the page's own text stands around these lines, which the command writes
_BEGIN, _END = "<!-- written by benchmarks.compared -->", "<!-- until here -->"
_MEASURED = """{begin}
`{command}`, on a virtual machine with {cores} cores ({processor}), Linux {system}, Python {python},
torch {torch}; means of {passes} streams of {num_images} images for each row.

| stages | published | ours | ours, steady | bit-equal | compute / wait / send of the stages, s |
| --- | --- | --- | --- | --- | --- |
{rows}

By the account of each row:

{account}

![Efficiency of each row, and where its stages' time went](compared.png)
{end}"""


@dataclass(frozen=True, slots=True)
class Published:
    """A row that others published: what it is of, and its speed-up over one board."""

    label: str
    speedup: float | None


PUBLISHED = (
    Published("2 stages, balanced", 2.02), Published("3 stages, balanced", 2.71), Published("4 stages, balanced", 3.51),
    Published("6 stages, balanced", 2.62), Published(EQUAL_SIZE, 3.5167), Published(str(BY_HAND["label"]), 3.6086),
    Published(ALTERNATING, None),
)  # fmt: skip


def main() -> None:
    """Measure the rows, and write JSON and page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compared")
    parser.add_argument("--json", type=Path, required=True, help="every row and the summary")
    parser.add_argument("--page", type=Path, help="also write the page, as docs/compared.md, and a picture beside it")
    parser.add_argument("--passes", type=int, default=TURNS["passes"], help="streams of each row")
    given = parser.parse_args()
    if given.page is not None and not (given.page.is_file() and _BEGIN in given.page.read_text()):
        parser.error(f"--page takes a page with {_BEGIN!r}: take docs/compared.md, not {str(given.page)!r}")
    take_down(LAB)
    profile = frozen_profile(DEIT_S)  # before anything runs in the lab
    case = Case(name="compared", **TURNS | {"passes": given.passes})
    alternating = plan_task(
        ALTERNATING, parse_cluster(lab_of(case)), profile, {"replicas": False, "shared": False, "rows": [1]}
    )
    tasks = [*(pipeline(stages) for stages in (2, 3, 4, 6)), pipeline(4, "equal-size"), BY_HAND, alternating]
    rows = {row.get("label", "serial"): row for row in run(replace(case, tasks=tasks), depth=2)}
    result = {"summary": summarize(rows), "environment": environment(), "rows": list(rows.values())}
    given.json.write_text(json.dumps(result, indent=2) + "\n")
    text = measured(rows, case, f"python -m benchmarks.compared --json {given.json.name} --page docs/compared.md")
    print(text)
    if given.page is not None:
        before, _, rest = given.page.read_text().partition(_BEGIN)
        given.page.write_text(before + text + rest.partition(_END)[2])
        draw(list(rows.values()), given.page.with_suffix(".png"))
    print(json.dumps(result["summary"]), file=sys.stderr)


def summarize(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that the project watches."""
    return {
        "efficiency_6_on_4": rows["6 stages, balanced"]["efficiency"],
        "compared": {each.label: [each.speedup, rows[each.label]["speedup"]] for each in PUBLISHED},
    }


def measured(rows: dict[str, dict[str, Any]], case: Case, command: str) -> str:
    """Write what the page says of the rows by name."""
    return _MEASURED.format(
        **environment(), command=command, processor=device_kind(), passes=case.passes, num_images=case.num_images,
        rows="\n".join(_row(each, rows) for each in PUBLISHED), begin=_BEGIN, end=_END,
        account="\n".join(_sentence(each.label, rows[each.label]) for each in PUBLISHED),
    )  # fmt: skip


def _row(published: Published, rows: dict[str, dict[str, Any]]) -> str:
    row = rows[published.label]
    devices = min(4, row["stages"])
    cells = [
        published.label, "" if published.speedup is None else f"{published.speedup:g}", f"{row['speedup']:.2f}",
        f"{row['efficiency'] * devices:.2f}", "yes" if row["bit_equal"] else "no", seconds_of(row),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _sentence(label: str, row: dict[str, Any]) -> str:
    """Say what sets the pace of a row: the device that computes most, and what it leaves to the others."""
    of_device: dict[str, float] = {}
    for stage in row["per_stage"]:
        of_device[stage["device"]] = of_device.get(stage["device"], 0.0) + stage["compute_s"]
    name, most = max(of_device.items(), key=lambda item: item[1])
    total = sum(of_device.values())
    busy = most / (most + sum(s["wait_s"] + s["send_s"] for s in row["per_stage"] if s["device"] == name))
    even = total / len(of_device)
    return (
        f"- {label}: {name} computes {most / total:.1%} of the seconds, {most / even:.2f} times an even part, in "
        f"{busy:.0%} of its time."
    )


if __name__ == "__main__":
    main()
