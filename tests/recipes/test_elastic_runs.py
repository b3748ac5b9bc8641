"""Elastic runs from settings: what they write and how they go on after a process was killed."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.recipes.data_formats import make_task
from penstock.recipes.launch import fit
from penstock.recipes.settings import FitSettings, elastic_options, read_settings, write_settings
from penstock.report.training_measured import read_metrics
from penstock.spec.cluster import Cluster, Device, write_cluster
from penstock.spec.profile import write_profile
from penstock.train.captured import Captured
from tests.elastic.trainings import profile_of
from tests.processes import PROGRAMS, run_groups
from tests.recipes.test_fit import VIT, lines, settings

MODEL = VIT.replace("depth=2", "depth=4")
FREEZE = [0, 1, 1, 2]
STEPS = 6  # of an epoch

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile by hand of the model that is trained."""
    folder = tmp_path_factory.mktemp("costs")
    task = make_task(settings(folder, model=MODEL))
    write_profile(folder / "profile.json", profile_of(Captured(task.module, *task.example)))
    return folder / "profile.json"


def elastic(folder: Path, costs: Path, **changes: Any) -> FitSettings:
    given = settings(
        folder / "run", model=MODEL, epochs=4, elastic=True, freeze=",".join(map(str, FREEZE)), costs=str(costs),
        cache_dir=str(folder / "cache"),
    )  # fmt: skip
    return given.replace(**changes)


@pytest.fixture(scope="module")
def whole(costs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process to the end that freezes alike, and neither moves nor caches anything."""
    folder = tmp_path_factory.mktemp("whole")
    fit(elastic(folder, costs, cache=False, pack=False, replicate=False))
    return folder


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder / "run", "step")]


def test_killed_run_resumes_with_the_same_result(whole: Path, costs: Path, tmp_path: Path) -> None:
    moments = [
        ("fill", 2, "1", STEPS),  # the first cache: one process has written half of its rows
        ("move", 2, "1", STEPS),  # tensors have come to where they are used next, and the optimizer's have not
        ("step", 17, "all", 16),  # within an epoch that reads the cache
        ("validation", 12, "0", 8),  # the last batch of an epoch has been trained on, but nobody has said how good
    ]
    script = PROGRAMS / "killed_elastic_run.py"
    expected = losses(whole)
    groups: list[list[tuple[int, list[str]]]] = [[], []]
    folders = [tmp_path / str(number) for number in range(len(moments))]
    for folder, (moment, at, who, _) in zip(folders, moments, strict=True):
        folder.mkdir()
        given = elastic(folder, costs, processes=2, checkpoint_every=4)
        write_settings(given, folder / "settings.json")
        write_settings(given.replace(resume=True), folder / "resume.json")
        groups[0].append((2, [str(folder / "settings.json"), moment, str(at), who]))
        if moment != "validation":
            groups[1].append((2, [str(folder / "resume.json"), "", "0", ""]))
    killed = run_groups(script, groups[0], deadline_s=90.0)
    for (_, _, who, _), ended in zip(moments, killed, strict=True):
        assert [end.status == -signal.SIGKILL for end in ended] == [who in ("all", rank) for rank in "01"]
    before = [losses(folder) for folder in folders]
    assert all(len(found) < len(expected) for found in before)
    for ended in run_groups(script, groups[1], deadline_s=90.0):
        assert [end.status for end in ended] == [0, 0]
    for folder in folders[3:]:  # which one process takes over
        fit(read_settings(folder / "resume.json").replace(processes=None))
    for folder, (moment, at, _, resumed) in zip(folders, moments, strict=True):
        assert losses(folder) == pytest.approx(expected, rel=1e-4), moment
        last, wanted = (lines(place / "run", "epoch")[-1] for place in (folder, whole))
        assert last["validation_loss"] == pytest.approx(wanted["validation_loss"], rel=1e-4)
        assert last["accuracy"] == wanted["accuracy"]
        assert [line["epoch"] for line in lines(folder / "run", "epoch")] == [0, 1, 2, 3]
        plans = lines(folder / "run", "plan")
        assert {(plan["epoch"], plan["frozen_layers"]) for plan in plans} == set(enumerate(FREEZE)), moment
        assert resumed in [plan["step"] for plan in plans], (moment, at)
        metrics = read_metrics(folder / "run")
        assert metrics is not None
        read = metrics.timeline
        assert read is not None
        assert len(read.plans) == len(plans)
        assert [span.plan.frozen_layers for span in read.spans() if span.begin < span.end] == FREEZE


def test_the_lines_of_plans_are_what_a_report_reads(costs: Path, tmp_path: Path) -> None:
    result = fit(elastic(tmp_path, costs, epochs=5))
    read = read_metrics(tmp_path / "run")
    assert read is not None
    assert [plan.step for plan in read.plans] == [STEPS * epoch for epoch in range(5)]
    assert [plan.frozen_layers for plan in read.plans] == [*FREEZE, 2]
    assert {plan.num_layers for plan in read.plans} == {4}
    assert [plan.cached for plan in read.plans][:2] == [False, True]
    assert all(plan.why and plan.stages == plan.replicas == 1 for plan in read.plans)
    assert read.plans[1].fill_s > 0
    assert [epoch.accuracy for epoch in read.epochs] == [epoch.accuracy for epoch in result.epochs]
    assert list((tmp_path / "cache").iterdir()) == []


def test_finished_run_continues_with_more_epochs(whole: Path, costs: Path, tmp_path: Path) -> None:
    """The last epoch of a run counts when it is continued."""
    fit(elastic(tmp_path / "parts", costs, epochs=2))
    fit(elastic(tmp_path / "parts", costs, epochs=4, resume=True))
    assert losses(tmp_path / "parts") == pytest.approx(losses(whole), rel=1e-4)
    frozen = {line["epoch"]: line["frozen_layers"] for line in lines(tmp_path / "parts" / "run", "plan")}
    assert frozen == dict(enumerate(FREEZE))


def test_run_that_ends_within_an_epoch_has_no_validation(costs: Path, tmp_path: Path) -> None:
    freeze = "0,1+take-back:0"
    fit(elastic(tmp_path, costs, freeze=freeze, steps=STEPS + 2))
    index = next((tmp_path / "run" / "checkpoints").glob("*8/*.json"))
    history = json.loads(index.read_text())["elastic"]["history"]
    assert [record["epoch"] for record in history] == [0]
    assert history[0]["accuracy"] == lines(tmp_path / "run", "epoch")[0]["accuracy"]


def test_a_guard_sees_the_validation_of_each_epoch(costs: Path, tmp_path: Path) -> None:
    fit(elastic(tmp_path, costs, epochs=2, checkpoint_every=STEPS))
    index = next((tmp_path / "run" / "checkpoints").glob(f"*{2 * STEPS}/*.json"))
    history = json.loads(index.read_text())["elastic"]["history"]
    assert [record["accuracy"] for record in history] == [line["accuracy"] for line in lines(tmp_path / "run", "epoch")]


def test_elastic_settings_round_trip_through_a_file(costs: Path, tmp_path: Path) -> None:
    cluster = Cluster(devices=tuple(Device(name=name, speed=0.5, memory_bytes=2**30) for name in ("desk", "board")))
    (tmp_path / "boards.toml").write_text(write_cluster(cluster))
    given = elastic(
        tmp_path, costs, from_cluster=str(tmp_path / "boards.toml"), pack=False, replicate=False, cache=False,
        cache_limit="1GiB", cache_dtype="bfloat16", cache_views=3,
    )  # fmt: skip
    write_settings(given, tmp_path / "settings.json")
    assert read_settings(tmp_path / "settings.json") == given
    asked = elastic_options(given)
    assert (asked.pack, asked.replicate, asked.cache) == (False, False, False)
    assert (asked.limit_bytes(), asked.cache_dtype, asked.cache_views, asked.epochs) == (2**30, "bfloat16", 3, 4)
    assert asked.profile is not None
    assert asked.cluster == cluster


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"elastic": False}, "--elastic"),
        ({"freeze": "thaw"}, "'thaw'"),
        ({"cache_limit": "much"}, "much"),
        ({"costs": "nowhere.json"}, "nowhere.json"),
        ({"from_cluster": "nowhere.toml"}, "nowhere.toml"),
        ({"trace": "trace"}, "leave the trace out"),
    ],
)
def test_impossible_settings_are_refused_before_training(
    wrong: dict[str, Any], said: str, costs: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        fit(elastic(tmp_path, costs).replace(**wrong))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
