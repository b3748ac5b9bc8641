"""What stages need: the parts add up to the planner's memory, and the most rows that fit are the most."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as with_fields

from penstock.plan.candidates import PlanRequest
from penstock.plan.choose import choose
from penstock.plan.needs import fit, stage_needs
from penstock.spec.plan import Generation
from penstock.spec.profile import Profile, Unit
from tests.spec.samples import make_cluster, make_profile

INFERENCE = PlanRequest(replicas=False, alternate=False)
TRAINING = PlanRequest(replicas=False, schedule="1f1b", num_microbatches=8, optimizer_state_factor=2.0)


def profile(*, generation: Generation | None = None) -> Profile:
    units = tuple(
        Unit(
            forward_s=(1.0,), backward_s=(2.0,), parameters=((f"w{index}", 1000),), kept_bytes_per_row=100.0,
            working_bytes_per_row=10.0,
        )
        for index in range(8)
    )  # fmt: skip
    return make_profile([0.0] * 8, [4.0] * 9, units=units, base_bytes=500.0, generation=generation)


@pytest.mark.parametrize("request_", [INFERENCE, TRAINING], ids=["inference", "training"])
def test_parts_add_up_to_the_memory_of_the_plan(request_: PlanRequest) -> None:
    choice = choose(profile(), make_cluster(1, 1, 1), replace(request_, rows=(3,)))
    needs = stage_needs(choice, profile())
    loads = {load.device: load.memory_bytes for load in choice.plan.prediction.devices}
    for each in needs:
        parts = each.weights + each.training + each.kept + each.working + each.process
        assert parts == pytest.approx(each.total) == pytest.approx(loads[each.device])
    assert sum(each.weights for each in needs) == 8000
    assert [each.begin for each in needs[1:]] == [each.end for each in needs[:-1]]


def test_checkpointing_keeps_inputs_and_one_microbatch() -> None:
    choice = choose(profile(), make_cluster(1, 1), replace(TRAINING, rows=(1,)))
    first, last = stage_needs(choice, profile())
    assert first.recomputed == pytest.approx(first.total - first.kept / 2)  # two in flight; its input is loaded anyway
    assert last.recomputed == pytest.approx(last.total)


@pytest.mark.parametrize("generation", [None, Generation(slots=1, lanes=1, max_length=8)], ids=["rows", "slots"])
def test_the_most_rows_fit_and_one_more_does_not(generation: Generation | None) -> None:
    costs = profile(generation=generation)
    for count in (1, 2, 4):
        cluster = make_cluster(*[1.0] * count, memory_bytes=12_000)
        found = fit(costs, cluster, INFERENCE)
        assert found.rows == found.most_rows > 0
        assert found.reason == ""
        assert fit(costs, cluster, INFERENCE, found.most_rows + 1).reason
        assert found.most_with_more >= found.most_rows
    smaller = make_cluster(1, memory_bytes=6000)
    misfit = fit(costs, smaller, INFERENCE)
    assert (misfit.most_rows, misfit.stages) == (0, [])
    enough = with_fields(smaller, devices=make_cluster(*[1.0] * (1 + misfit.more), memory_bytes=6000).devices)
    assert fit(costs, enough, INFERENCE).most_rows > 0
    assert misfit.more > 0
