"""Plans of a model that generates: measured steps, caches as memory, and one way for every microbatch."""

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PlanError, UsageError
from penstock.generate.generator import Generator
from penstock.plan.candidates import Request
from penstock.plan.choose import choose, make_plan
from penstock.recipes.profiled import profile_generation
from penstock.recipes.texts import TextSettings, open_generator
from penstock.spec.cluster import Cluster, Device
from penstock.spec.plan import Generation, Plan, write_plan
from penstock.spec.profile import Profile
from tests.generate.tokens import save_model

pytestmark = pytest.mark.usefixtures("one_thread")
CACHES = Generation(slots=2, lanes=3, max_length=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planned")
    save_model(path)
    return path


@pytest.fixture(scope="module")
def profile(folder: Path) -> Profile:
    return profile_generation(f"hf:{folder}", CACHES, repeats=3)


def cluster(*memory_bytes: float) -> Cluster:
    return Cluster(
        devices=tuple(Device(name=f"d{at}", speed=1.0, memory_bytes=int(each)) for at, each in enumerate(memory_bytes))
    )


def test_a_plan_brings_the_caches_and_the_same_tokens(folder: Path, profile: Profile, tmp_path: Path) -> None:
    whole = make_plan(profile, cluster(1e12)).prediction.devices[0].memory_bytes
    held = sum(dict(pair for unit in profile.units for pair in unit.parameters).values())
    # the driver has the model's library too; neither has room for everything
    plan = make_plan(profile, cluster(whole - held / 3, profile.base_bytes + held))
    assert plan.generation == CACHES
    assert len(plan.pipelines) == 1
    assert len(plan.pipelines[0].stages) == 2
    assert len(plan.pipelines[0].cut_sets) == 1
    write_plan(tmp_path / "plan.json", plan)
    with open_generator(TextSettings(model=f"hf:{folder}", slots=2, stages=1)) as one:
        wanted = one.submit("The turbine", max_new_tokens=30).result()
    with open_generator(TextSettings(model=f"hf:{folder}", plan=tmp_path / "plan.json")) as made:
        assert (made.num_slots, made.max_length) == (6, 128)
        assert made.submit("The turbine", max_new_tokens=30).result() == wanted
        assert len(made.pipeline.world.devices) == 2


def test_memory_is_that_of_the_caches(profile: Profile) -> None:
    sizes = dict(pair for unit in profile.units for pair in unit.parameters)
    caches = [size for name, size in sizes.items() if name.startswith(("keys", "values"))]
    assert len(set(caches)) == 1
    # of the model that is saved: heads times their width, floats, in a room of 128 and one for each of six sequences
    assert caches[0] % (6 * 129 * 4) == 0
    assert profile.result_s > 0


def test_what_a_plan_does_not_allow(folder: Path, profile: Profile, tmp_path: Path) -> None:
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
        choose(profile, cluster(1e12), Request(schedule="1f1b", num_microbatches=4))


def as_of_images(plan: Plan) -> Plan:
    import msgspec

    return msgspec.structs.replace(plan, generation=None)
