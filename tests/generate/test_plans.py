"""Plans of a model that generates: measured steps, caches as memory, and one way for every microbatch."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.errors import PlanError, UsageError
from penstock.generate.generator import Generator
from penstock.plan.candidates import PlanRequest
from penstock.plan.choose import choose, make_plan, plan_again
from penstock.recipes.profiled import profile_generation
from penstock.recipes.texts import open_generator
from penstock.runtime.registry import RuntimeChoice
from penstock.spec.cluster import Cluster, Device
from penstock.spec.plan import Generation, Plan, write_plan
from penstock.spec.profile import Profile
from penstock.spec.settings import TextSettings
from tests.generate.tokens import save_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planned")
    save_model(path)
    return path


@pytest.fixture(scope="module")
def profile(folder: Path) -> Profile:
    return profile_generation(f"hf:{folder}", slots=(1, 2), max_length=128, repeats=3)


def cluster(*memory_bytes: float) -> Cluster:
    return Cluster(
        devices=tuple(Device(name=f"d{at}", speed=1.0, memory_bytes=int(each)) for at, each in enumerate(memory_bytes))
    )


def test_a_plan_brings_the_caches_and_the_same_tokens(folder: Path, profile: Profile, tmp_path: Path) -> None:
    alone = make_plan(steady(profile), cluster(1e12))
    assert alone.generation == Generation(slots=2, lanes=1, max_length=128)
    whole = alone.prediction.devices[0].memory_bytes
    held = sum(dict(pair for unit in profile.units for pair in unit.parameters).values())
    # the driver has the model's library too, and no room for everything
    plan = make_plan(steady(profile), cluster(whole - held / 4, profile.base_bytes + 2 * held), PlanRequest(rows=(2,)))
    assert plan.generation == Generation(slots=2, lanes=3, max_length=128)
    assert len(plan.pipelines) == 1
    assert len(plan.pipelines[0].stages) == 2
    assert len(plan.pipelines[0].cut_sets) == 1
    write_plan(tmp_path / "plan.json", plan)
    with open_generator(TextSettings(model=f"hf:{folder}", slots=2, stages=1)) as one:
        wanted = one.submit("The turbine", max_new_tokens=30).result()
    with open_generator(TextSettings(model=f"hf:{folder}", plan=str(tmp_path / "plan.json"))) as made:
        assert (made.num_slots, made.max_length) == (6, 128)
        assert made.submit("The turbine", max_new_tokens=30).result() == wanted
        assert len(made.pipeline.world.devices) == 2


def test_memory_is_that_of_the_caches(profile: Profile) -> None:
    assert not any(name.startswith(("keys", "values")) for unit in profile.units for name, _ in unit.parameters)
    caches = [unit.kept_bytes_per_row for unit in profile.units if unit.kept_bytes_per_row]
    assert len(set(caches)) == 1
    # keys and values, heads times their width of floats, in a room of 128 and one
    assert caches[0] % (2 * 129 * 4) == 0
    assert profile.loader_s_per_row > 0
    needs = {
        rows: make_plan(profile, cluster(1e12), PlanRequest(rows=(rows,))).prediction.devices[0].memory_bytes
        for rows in (1, 2, 3)
    }
    assert needs[2] - needs[1] >= sum(caches)
    assert needs[3] - needs[2] == pytest.approx(needs[2] - needs[1], rel=0.01)


def test_slots_and_lanes_are_planned(profile: Profile) -> None:
    profile = steady(profile)
    small = make_plan(profile, cluster(1e12), PlanRequest(rows=(1,))).prediction.devices[0].memory_bytes
    large = make_plan(profile, cluster(1e12), PlanRequest(rows=(2,))).prediction.devices[0].memory_bytes
    assert slots_of(make_plan(profile, cluster((small + large) / 2))) == 1
    assert slots_of(make_plan(profile, cluster(large))) == 2
    assert slots_of(make_plan(profile, cluster(1e12), PlanRequest(aim="latency"))) == 1
    with pytest.raises(PlanError):
        make_plan(profile, cluster(small * 0.99))


def test_a_loss_changes_neither_slots_nor_lanes(profile: Profile) -> None:
    profile = steady(profile)
    plan = make_plan(profile, of_speeds(1.0, 1.0, 1.0))
    assert plan.generation == Generation(slots=2, lanes=4, max_length=128)
    again = plan_again(plan, profile, of_speeds(1.0, 1.0, 1.0), missing={"d2"})
    assert len(again.pipelines[0].stages) == 2
    assert again.generation == plan.generation


@pytest.mark.long
def test_a_runtime_is_planned_by_the_error_of_its_logits(folder: Path, profile: Profile, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    measured = profile_generation(
        f"hf:{folder}", slots=(1, 2), max_length=128, repeats=3,
        runtimes=[RuntimeChoice("onnxruntime"), RuntimeChoice("onnxruntime", "int8")],
    )  # fmt: skip
    assert measured.graph == profile.graph
    exact, rounded = measured.runtimes
    assert exact.error < 1e-5 < rounded.error < 0.5
    # how fast each is on a model this small does not matter here
    faster = [msgspec.structs.replace(column, forward_s=(1e-6, 1e-6)) for column in measured.runtimes]
    measured = msgspec.structs.replace(measured, runtimes=tuple(faster))
    plan = make_plan(measured, cluster(1e12), PlanRequest(max_error=1e-4))
    assert plan.pipelines[0].stages[0].runtime == "onnxruntime"
    write_plan(tmp_path / "plan.json", plan)
    with open_generator(TextSettings(model=f"hf:{folder}", stages=1, slots=2)) as eager:
        wanted = eager.submit("The turbine", max_new_tokens=10).result()
    with open_generator(TextSettings(model=f"hf:{folder}", plan=str(tmp_path / "plan.json"))) as made:
        assert made.submit("The turbine", max_new_tokens=10).result() == wanted


def slots_of(plan: Plan) -> int:
    assert plan.generation is not None
    return plan.generation.slots


def steady(profile: Profile) -> Profile:
    """Units that take a second with one row and a little more with two, whatever was measured."""
    units = tuple(msgspec.structs.replace(unit, forward_s=(1.0, 1.1)) for unit in profile.units)
    return msgspec.structs.replace(profile, units=units)


def of_speeds(*speeds: float) -> Cluster:
    return Cluster(
        devices=tuple(Device(name=f"d{at}", speed=each, memory_bytes=10**12) for at, each in enumerate(speeds))
    )


def test_options_that_a_plan_sets_are_refused(folder: Path, profile: Profile, tmp_path: Path) -> None:
    plan = make_plan(profile, cluster(1e12))
    path = tmp_path / "plan.json"
    write_plan(path, plan)
    model: Any = open_generator(TextSettings(model=f"hf:{folder}", stages=1))
    model.close()
    for wrong in ({"slots": 4}, {"lanes": 2}, {"max_length": 512}, {"stages": 2}, {"cuts": ["x"]}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            Generator(model.model, plan=path, weights=model.weights, **wrong)
    with pytest.raises(UsageError, match="--generate"):
        Generator(model.model, plan=as_of_images(plan))
    with pytest.raises(PlanError, match="1f1b"):
        choose(profile, cluster(1e12), PlanRequest(schedule="1f1b", num_microbatches=4))


def as_of_images(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, generation=None)
