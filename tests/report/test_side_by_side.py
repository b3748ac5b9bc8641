"""The report of pipelines side by side, each with microbatches of its own."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.pipeline import Pipeline
from penstock.report.run_report import write_report
from penstock.report.stream_account import make_account
from penstock.report.stream_measured import measure_stream
from penstock.tracing.trace import read_run
from tests.fewer import long
from tests.stream.test_callers_memory import different, passing, planned
from tests.worlds import memory_world

NUM = 13


@pytest.mark.parametrize(("devices", "pipelines"), [(2, 2), long(1, 2), long(1, 3)])
def test_pipelines_side_by_side_are_one_run(devices: int, pipelines: int, tmp_path: Path) -> None:
    model = passing()
    _, plan = planned(model, devices, pipelines, rotating=False)
    inputs = different(NUM)
    with (
        memory_world(devices * pipelines) as made,
        Pipeline(model, (inputs[0],), plan=plan, world=made.feeder, threads=1, trace=tmp_path) as pipe,
    ):
        assert len(list(pipe.stream(inputs))) == NUM
    run = read_run(tmp_path)
    stream = measure_stream(run)
    assert [len(route) for route in stream.routes] == [devices] * pipelines
    for number in range(NUM):
        steps = stream.steps_of(number)
        assert [step.microbatch for _, step in steps] == [number] * devices
        assert len({stage.index // devices for stage, _ in steps}) == 1
        assert all(one.begin_s <= other.begin_s for (_, one), (_, other) in pairwise(steps))
    assert sum(stage.share for stage in stream.stages) == pytest.approx(devices)
    account = make_account(run, stream)
    assert account.num_times - sum(line.times for line in account.lines) == pytest.approx(account.speedup)
    report = write_report(tmp_path)
    assert report.account.speedup == pytest.approx(account.speedup)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    arrows = [event for event in events if event["ph"] == "s"]
    assert len(arrows) == NUM * (devices + 1)
