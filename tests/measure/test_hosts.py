"""Hosts measured over real processes, and messages over a worker of one's own."""

import json
import math
import sys

import pytest

from penstock.engine.reference import calibrate
from penstock.measure.hosts import measure_messages
from tests.processes import PROGRAMS, Running


def test_calibration_gives_positive_seconds() -> None:
    assert 0 < calibrate(0.01) < 60


@pytest.mark.long
def test_measured_message_costs_are_plausible() -> None:
    costs = measure_messages(num_microbatches=20)
    assert 0 < costs.stage_overhead_s < 0.1
    assert 0 <= costs.send_s_per_byte < 1e-6
    assert costs.feed_s > 0
    # a process that feeds and computes hands over within itself
    most_s = costs.stage_overhead_s + costs.feed_s + costs.result_s
    assert 0 < costs.own_input_s + costs.own_output_s <= most_s * 1.000001


@pytest.mark.long
def test_every_host_and_every_link_is_measured() -> None:
    script = str(PROGRAMS / "measured_hosts.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", script]
    with Running(command, deadline_s=100) as run:
        finished = run.wait()
    assert finished.status == 0, finished.stderr
    line = next(line for line in finished.stdout.splitlines() if line.startswith("MEASURED"))
    measured = json.loads(line.partition(" ")[2])
    assert len(measured["calibration_s"]) == 3
    assert {(link["source"], link["target"]) for link in measured["links"]} == {
        (a, b) for a in range(3) for b in range(3) if a != b
    }
    assert all(0 < link["bandwidth_bytes_per_s"] < math.inf for link in measured["links"])
