"""A plan loads back equal, and one that was edited into nonsense is refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PlanError
from penstock.plan.check import check_cuts, check_devices, check_plan, read_plan
from penstock.spec.plan import decode_plan, encode_plan, write_plan
from tests.spec.samples import make_cluster, make_plan


def test_a_plan_loads_back_equal(tmp_path: Path) -> None:
    plan = make_plan()
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == plan
    assert decode_plan(encode_plan(plan)) == plan


def _first(document: Any) -> Any:
    return document["pipelines"][0]


NONSENSE: list[tuple[str, Callable[[Any], object], str]] = [
    ("rows", lambda d: d.update(microbatch_rows=0), "microbatch_rows of a plan must be at least 1; got 0"),
    ("depth", lambda d: d.update(depth=-1), "depth of a plan must be at least 1; got -1"),
    ("version", lambda d: d.update(version=7), "version of a plan must be 1 in this penstock; got 7"),
    (
        "schedule",
        lambda d: d.update(schedule="zigzag"),
        "schedule of a plan must be one of forward-only, gpipe, .*; got 'zigzag'",
    ),
    ("type", lambda d: d.update(depth="two"), "at depth: Expected `int`, got `str`"),
    ("unknown field", lambda d: d.update(colour="red"), "unknown field `colour`"),
    ("missing field", lambda d: d.pop("loader"), "missing required field `loader`"),
    ("loader", lambda d: d.update(loader=""), "loader of a plan must be 1 to 128 letters, digits or .*; got ''"),
    (
        "a device outside of its folder",
        lambda d: _first(d)["stages"][0].update(device="../../x"),
        r"stages\[0\].device of a plan must be 1 to 128 letters, digits or .*; got '../../x'; correct it",
    ),
    (
        "a writer that is a path",
        lambda d: d.update(writer="/etc"),
        "writer of a plan must be 1 to 128 letters.*; got '/etc'",
    ),
    (
        "no pipelines",
        lambda d: d.update(pipelines=[]),
        r"pipelines of a plan must have at least one pipeline; got \[\]",
    ),
    (
        "no stages",
        lambda d: _first(d).update(stages=[]),
        r"pipelines\[0\].stages of a plan must have at least one stage",
    ),
    (
        "steps",
        lambda d: d.update(num_microbatches=4),
        "num_microbatches of a plan must be null for the schedule forward-only; got 4",
    ),
    (
        "training without steps",
        lambda d: d.update(schedule="1f1b"),
        "num_microbatches of a plan must be at least 1 for the schedule 1f1b; got None",
    ),
    (
        "weights",
        lambda d: _first(d)["cut_sets"][0].update(weight=0.9),
        r"pipelines\[0\].cut_sets\[\*\].weight of a plan must add up to 1; got 1.4",
    ),
    (
        "negative weight",
        lambda d: _first(d)["cut_sets"][0].update(weight=-0.5),
        r"cut_sets\[\*\].weight of a plan must be above 0 and at most 1; got -0.5",
    ),
    (
        "cuts",
        lambda d: _first(d)["cut_sets"][1].update(cuts=["unit0:after", "unit1:after"]),
        r"pipelines\[0\].cut_sets\[1\].cuts of a plan must have 1 cut for 2 stages; got 2 cuts",
    ),
    (
        "the same cut set twice",
        lambda d: _first(d)["cut_sets"][1].update(cuts=["unit0:after"]),
        r"pipelines\[0\].cut_sets of a plan must have each cut set once",
    ),
    (
        "a device twice",
        lambda d: _first(d)["stages"][1].update(device="a"),
        r"pipelines\[0\].stages\[0\].device of a plan must be a device that holds no other stage; got 'a'",
    ),
    ("share", lambda d: _first(d).update(share=0.8), r"pipelines\[\*\].share of a plan must add up to 1; got 1.05"),
    (
        "precision",
        lambda d: _first(d)["stages"][0].update(precision="int3"),
        r"at pipelines\[0\].stages\[0\].precision: Invalid enum value 'int3'",
    ),
    ("rate", lambda d: d["prediction"].update(rows_per_s=0), "prediction.rows_per_s of a plan must be above 0; got 0"),
    (
        "memory",
        lambda d: d["prediction"]["devices"][2].update(memory_bytes=-1),
        r"prediction.devices\[2\].memory_bytes of a plan must be at least 0; got -1",
    ),
    (
        "device not predicted",
        lambda d: d["prediction"]["devices"].pop(),
        "prediction.devices of a plan must have each device of the plan once; got c 0 times",
    ),
]


@pytest.mark.parametrize(("edit", "message"), [row[1:] for row in NONSENSE], ids=[row[0] for row in NONSENSE])
def test_contradicting_plan_is_refused(edit: Callable[[Any], object], message: str, tmp_path: Path) -> None:
    document = json.loads(encode_plan(make_plan()))
    edit(document)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=message) as caught:
        read_plan(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"a plan cannot be read from .* \(No such file"):
        read_plan(tmp_path / "none.json")
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(PlanError, match=r"a plan must be JSON"):
        read_plan(tmp_path / "plan.json")


def test_cuts_of_another_model() -> None:
    plan = make_plan()
    check_cuts(plan, ["unit0:after", "unit1:after"])
    with pytest.raises(PlanError, match=r"cut_sets\[1\]\.cuts .*got 'unit1:after'"):
        check_cuts(plan, ["unit0:after"])


def test_devices_of_another_cluster() -> None:
    check_devices(make_plan(), make_cluster(1, 1, 1))
    with pytest.raises(PlanError, match=r"pipelines\[1\].*got 'c'"):
        check_devices(make_plan(), make_cluster(1, 1))


def test_sample_plan_is_valid() -> None:
    check_plan(make_plan())
