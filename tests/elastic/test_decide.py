"""The decision between two epochs, on profiles by hand: six layers, each a second forward and two back."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from penstock.elastic.decide import CacheCosts, Decision, Situation, decide, forward_s, read_s
from penstock.errors import PlanError
from penstock.plan.candidates import PlanRequest
from penstock.plan.choose import make_plan
from penstock.spec.cluster import Cluster
from penstock.spec.plan import Plan
from penstock.spec.profile import Profile, Unit
from tests.spec.samples import make_cluster, make_profile

LAYERS = [f"unit{index}:after" for index in range(6)]
PROFILE: Profile = msgspec.structs.replace(
    make_profile([0.0] * 7, [1e3] * 8),
    units=tuple(Unit(forward_s=(1.0,), backward_s=(2.0,), parameters=((f"w{n}", 1000),)) for n in range(7)),
)
TWO = make_cluster(1, 1)


def begun(cluster: Cluster, *, replicas: bool = False) -> Plan:
    return make_plan(PROFILE, cluster, PlanRequest(rows=(1,), schedule="1f1b", num_microbatches=4, replicas=replicas))


def caching(
    read: float = 0.0, *, write: float = 0.0, samples: int = 10, sizes: Sequence[int | None] = (100,) * 6
) -> CacheCosts:
    return CacheCosts(bytes_per_row=sizes, num_samples=samples, read_s_per_byte=read, write_s_per_byte=write)


def situation(cluster: Cluster = TWO, *, frozen: int = 4, **changes: Any) -> Situation:
    given: dict[str, Any] = {
        "profile": PROFILE, "cluster": cluster, "plan": begun(cluster), "layers": LAYERS, "frozen_layers": frozen,
        "cached_layers": 0, "remaining_rows": 100.0, "migrate_s": 0.0, "replicate": False,
    }  # fmt: skip
    return Situation(**(given | changes))


def stages(decision: Decision) -> list[list[str]]:
    return [[stage.device for stage in pipeline.stages] for pipeline in decision.plan.pipelines]


def test_same_situation_gives_the_same_decision() -> None:
    now = situation(caching=caching())
    before = msgspec.json.encode(now.plan)
    first = decide(now)
    assert decide(now) == first
    assert msgspec.json.encode(now.plan) == before


def test_forward_time_through_layers_is_predicted() -> None:
    assert forward_s(PROFILE, LAYERS, 0, 4) == pytest.approx(4.0)
    assert forward_s(PROFILE, LAYERS, 2, 4) == pytest.approx(2.0)
    assert read_s(situation(caching=caching(0.5)), 3) == pytest.approx(50.0)


@pytest.mark.parametrize(("read", "cached"), [(0.0, 4), (0.03, 4), (0.0401, 0), (1.0, 0)])
def test_the_cache_is_read_only_where_that_is_faster_than_computing(read: float, cached: int) -> None:
    found = decide(situation(caching=caching(read)))
    assert found.cached_layers == cached
    assert ("caches 4 layers" in found.why) == bool(cached)


@pytest.mark.parametrize("cluster", [make_cluster(1), TWO])
def test_the_last_epoch_fills_no_cache(cluster: Cluster) -> None:
    """With as many rows left as there are samples, all is computed once in either case."""
    samples = 100
    last = decide(situation(cluster, caching=caching(1e-4, write=1e-4, samples=samples), replicate=True))
    assert last.cached_layers == 0
    more = decide(
        situation(cluster, caching=caching(1e-4, write=1e-4, samples=samples), remaining_rows=1000.0, replicate=True)
    )
    assert more.cached_layers == 4


def test_cache_is_extended_from_cached_layers() -> None:
    """Two layers more of four cost half; so they pay in fewer rows than all four would."""
    costs = caching(1e-4, samples=100)
    rows = {
        cached: next(
            rows
            for rows in range(10, 400, 10)
            if decide(
                situation(make_cluster(1), cached_layers=cached, caching=costs, remaining_rows=float(rows))
            ).cached_layers
            == 4
        )
        for cached in (0, 2)
    }
    assert rows[2] <= rows[0]
    found = decide(situation(make_cluster(1), cached_layers=2, caching=costs, remaining_rows=500.0))
    assert "caches 4 layers, 3 min 20 s to fill" in found.why


def test_uncacheable_layers_are_not_cached() -> None:
    sizes = [100, 100, 100, None, 100, 100]
    assert decide(situation(caching=caching(sizes=sizes))).cached_layers == 0
    assert decide(situation(caching=caching(sizes=sizes), cached_layers=2)).cached_layers == 2
    assert decide(situation(frozen=5, caching=caching(sizes=sizes))).cached_layers == 5
    assert decide(situation(caching=None)).cached_layers == 0


def test_nothing_frozen_has_nothing_cached() -> None:
    found = decide(situation(frozen=0, caching=None, cached_layers=4))
    assert found.cached_layers == 0
    assert stages(found) == [["a", "b"]]


def test_layers_that_were_thawed_are_not_read() -> None:
    found = decide(situation(frozen=2, cached_layers=4, caching=caching()))
    assert found.cached_layers == 2
    assert "caches 2 layers" in found.why
    assert decide(situation(frozen=2, cached_layers=4, caching=None)).cached_layers == 0


def test_plan_stays_where_moving_does_not_pay() -> None:
    moves = decide(situation(migrate_s=1.0))
    assert moves.plan.pipelines != begun(TWO).pipelines
    assert moves.why.startswith("moves; ")
    stays = decide(situation(migrate_s=1e6))
    assert stays.plan.pipelines == begun(TWO).pipelines
    assert re.match(r"stays: .* 10% .*\(", stays.why)
    assert stays.remaining_s < 1e6, "what stays does not take what moving takes"
    gained = 100 / stays.plan.prediction.rows_per_s - 100 / moves.plan.prediction.rows_per_s
    for cost, pays in ((0.9 * gained, True), (1.1 * gained, False)):
        assert decide(situation(migrate_s=cost)).why.startswith("moves" if pays else "stays")


def test_a_cache_frees_devices_and_replicas_use_them() -> None:
    packed = decide(situation(frozen=6, caching=caching(1e-6)))
    assert packed.cached_layers == 6
    assert stages(packed) in ([["a"]], [["b"]]), "one device has all that is left"
    both = decide(situation(frozen=6, caching=caching(1e-6), replicate=True))
    assert sorted(stages(both)) == [["a"], ["b"]]


def test_decision_without_packing_has_its_reason() -> None:
    """A plan that stays, one that loses a stage whose layers are all cached, and one that no longer fits."""
    plan = begun(TWO)
    kept = decide(situation(pack=False))
    assert kept.plan.pipelines == plan.pipelines
    assert kept.why.startswith("keeps the plan; ")
    cached = decide(situation(pack=False, frozen=6, cached_layers=6, caching=caching(1e-6)))
    assert cached.moves
    assert cached.why.startswith("keeps the plan, without ")
    needs = [load.memory_bytes for load in plan.prediction.devices]
    small = make_cluster(1, 1, 1, memory_bytes=int(0.97 * max(needs)))
    moved = decide(situation(small, frozen=0, plan=plan, pack=False))
    assert moved.moves
    assert moved.why.startswith("moves, since ")


def test_decision_fails_if_nothing_fits() -> None:
    with pytest.raises(PlanError, match=r"does not fit|alone needs"):
        decide(situation(make_cluster(1, 1, memory_bytes=100), plan=begun(TWO)))


def test_loading_time_of_a_row_is_predicted() -> None:
    """Loading and the loop's own code are in every plan: they change what is foreseen."""
    plain, slower = decide(situation()), decide(situation(beside_s=7.0))
    rate = plain.plan.prediction.rows_per_s
    assert stages(plain) == stages(slower)
    assert slower.remaining_s == pytest.approx(plain.remaining_s + 100.0 * 7.0)
    assert f"{1 / (1 / rate + 7.0):.4g} rows/s predicted" in slower.why
