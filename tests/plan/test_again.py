import msgspec
import pytest

from penstock.errors import ClusterError, PlanError
from penstock.plan.candidates import PlanRequest
from penstock.plan.check import check_devices
from penstock.plan.choose import cluster_among, make_plan, observed, plan_again
from penstock.spec.cluster import Cluster, Device, Link
from tests.spec.samples import make_cluster, make_profile

PROFILE = make_profile([1.0] * 40)
CLUSTER = make_cluster(1, 1, 1, 1)
PLAN = make_plan(PROFILE, CLUSTER, PlanRequest(replicas=False))


def test_replan_without_news_keeps_the_plan() -> None:
    again = plan_again(PLAN, PROFILE, CLUSTER)
    assert again.pipelines == PLAN.pipelines
    assert again.prediction == PLAN.prediction


def test_replan_leaves_out_a_lost_device() -> None:
    again = plan_again(PLAN, PROFILE, CLUSTER, missing={"c"})
    assert set(again.devices) == {"a", "b", "d"}
    assert again.prediction.rows_per_s == pytest.approx(3 / 40, rel=0.01)
    check_devices(again, observed(CLUSTER, {}, {"c"}))


def test_replan_gives_a_slowed_device_less() -> None:
    again = plan_again(PLAN, PROFILE, CLUSTER, speeds={"c": 0.5})
    assert again.prediction.rows_per_s == pytest.approx(3.5 / 40, rel=0.02)


def test_small_slowdown_keeps_the_plan() -> None:
    again = plan_again(PLAN, PROFILE, CLUSTER, speeds={"c": 0.99})
    assert again.pipelines == PLAN.pipelines
    assert again.prediction.rows_per_s == pytest.approx(0.099, rel=1e-3)


def test_replan_uses_an_added_device() -> None:
    again = plan_again(PLAN, PROFILE, make_cluster(1, 1, 1, 1, 1))
    assert "e" in again.devices
    assert again.prediction.rows_per_s == pytest.approx(5 / 40, rel=0.01)


def test_replan_depends_only_on_its_arguments() -> None:
    first = plan_again(PLAN, PROFILE, CLUSTER, speeds={"b": 0.3}, missing={"d"})
    assert plan_again(PLAN, PROFILE, CLUSTER, speeds={"b": 0.3}, missing={"d"}) == first


def test_unknown_device_names_are_refused() -> None:
    with pytest.raises(ClusterError, match="device 'z' not found in cluster"):
        plan_again(PLAN, PROFILE, CLUSTER, missing={"z"})


def test_replan_needs_the_driver() -> None:
    with pytest.raises(PlanError, match="driver a is lost; set another feeder"):
        plan_again(PLAN, PROFILE, CLUSTER, missing={"a"})


def test_replan_refuses_what_no_longer_fits() -> None:
    profile = msgspec.structs.replace(
        PROFILE,
        units=tuple(msgspec.structs.replace(u, parameters=((f"w{i}", 10),)) for i, u in enumerate(PROFILE.units)),
    )
    cluster = make_cluster(1, 1, 1, 1, memory_bytes=130)
    plan = make_plan(profile, cluster, PlanRequest())
    with pytest.raises(PlanError, match="the model does not fit"):
        plan_again(plan, profile, cluster, missing={"b", "c"})


def test_unknown_device_gets_assumed_speed_and_memory() -> None:
    known = Cluster(
        devices=(Device(name="a", speed=2.0, memory_bytes=100), Device(name="b", speed=1.0, memory_bytes=100)),
        links=(Link(between=("a", "b"), bandwidth_bytes_per_s=1e6),),
    )
    among = cluster_among(known, ["a", "new"], feeder="new", speed=0.5)
    assert (among.feeding.name, among.device("a"), among.links) == ("new", known.device("a"), ())
    assert among.device("new").speed == 0.5
    assert among.device("new").memory_bytes > 2**40
    assert cluster_among(known, ["b", "a"], feeder="b").links == known.links
