"""Plans for the devices that there are now, with and without a plan, a profile and a cluster to begin from."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.graph.capture import capture
from penstock.graph.cuts import Cuts
from penstock.measure.profiler import counted_profile
from penstock.spec.cluster import Cluster, Device
from penstock.spec.plan import PlannedStage
from penstock.spec.profile import Profile, RuntimeColumn
from penstock.stream.replanner import Replanner
from tests.fewer import examples
from tests.worlds import tower, tower_inputs

NAMES = ["a", "b", "c", "d"]


@pytest.fixture(scope="module")
def profile() -> Profile:
    torch.manual_seed(0)
    return counted_profile(capture(tower(), tower_inputs(1)[0]), rows=2)


def begun(profile: Profile, devices: list[str], stage: PlannedStage | None = None) -> Replanner:
    replanner = Replanner(None, lambda: profile, None)
    cuts = [boundary.name for boundary in profile.boundaries[1:-1]]
    each = len(cuts) // len(devices)
    chosen = [cuts[each * (index + 1)] for index in range(len(devices) - 1)]
    replanner.begin(chosen, devices, 2, 2, stage or PlannedStage(device=""))
    return replanner


def test_counted_costs_are_those_of_the_whole_model(profile: Profile) -> None:
    graph = capture(tower(), tower_inputs(1)[0])
    assert [boundary.name for boundary in profile.boundaries[1:-1]] == [cut.name for cut in Cuts(graph)]
    names = {name for unit in profile.units for name, _ in unit.parameters}
    assert names == set(tower().state_dict())


@settings(max_examples=examples(15))
@given(lost=st.sets(st.sampled_from(NAMES), max_size=3))
def test_survivors_hold_the_whole_model(profile: Profile, lost: set[str]) -> None:
    replanner = begun(profile, NAMES)
    left = [name for name in NAMES if name not in lost]
    plan = replanner.plan(left, {})
    assert set(plan.devices) <= set(left)
    assert len(plan.pipelines) == 1
    replanner.take(plan)
    total = sum(unit.forward_s[0] for unit in profile.units)
    assert abs(sum(replanner.seconds().values()) - total) < 1e-9


def test_a_slower_device_does_less(profile: Profile) -> None:
    replanner = begun(profile, ["a", "b"])
    before = replanner.seconds()
    plan = replanner.plan(["a", "b"], {"a": 1.0, "b": 0.25})
    replanner.take(plan)
    assert replanner.seconds().get("b", 0.0) < before["b"] / 2


def test_device_speed_is_compared_on_its_own_runtime(profile: Profile) -> None:
    column = RuntimeColumn(
        runtime="openvino", precision="float32", forward_s=(0.5,) * len(profile.rows),
        eager_s=(1.0,) * len(profile.rows), error=0.0,
    )  # fmt: skip
    profile = msgspec.structs.replace(profile, runtimes=(column,))
    replanner = begun(profile, ["a", "b"])
    eager = replanner.seconds()
    plan = replanner.current
    (pipeline,) = plan.pipelines
    first = msgspec.structs.replace(pipeline.stages[0], runtime="openvino")
    replanner.take(
        msgspec.structs.replace(
            plan, pipelines=(msgspec.structs.replace(pipeline, stages=(first, *pipeline.stages[1:])),)
        )
    )
    assert replanner.seconds() == pytest.approx({"a": eager["a"] / 2, "b": eager["b"]})
    fresh = replanner.plan(["a", "b"], {"a": 1.0, "b": 1.0})
    assert {stage.runtime for stage in fresh.pipelines[0].stages} == {"openvino"}


def test_small_gains_cause_no_replan(profile: Profile) -> None:
    replanner = begun(profile, ["a", "b"])
    replanner.take(replanner.plan(["a", "b"], {"a": 1.0, "b": 1.0}))
    assert replanner.plan(["a", "b"], {"a": 1.0, "b": 0.98}).pipelines == replanner.current.pipelines


def test_stages_compute_as_before(profile: Profile) -> None:
    replanner = begun(profile, NAMES, PlannedStage(device="", runtime="onnxruntime", precision="int8", keep=("head",)))
    plan = replanner.plan(["a", "c"], {})
    assert {(s.runtime, s.precision, s.keep) for s in plan.pipelines[0].stages} == {("onnxruntime", "int8", ("head",))}


def test_replan_uses_devices_outside_of_the_cluster_file(profile: Profile) -> None:
    cluster = Cluster(devices=tuple(Device(name=name, speed=1.0, memory_bytes=2**30) for name in "ab"), feeder="a")
    replanner = Replanner(None, lambda: profile, cluster)
    with pytest.raises(PlanError, match="no stages are placed"):
        replanner.plan(["a"], {})
    replanner.begin([profile.boundaries[5].name], ["a", "b"], 2, 2, PlannedStage(device=""))
    assert set(replanner.plan(["b", "new"], {"b": 0.5}).devices) <= {"b", "new"}
