"""Rows of one model on one world."""

from penstock.engine.jobs import send_leave
from penstock.engine.world import start_local
from penstock.stream.compare import Comparison
from penstock.zoo.models import load_model
from tests.cli.conftest import SMALL


def test_replicas_are_a_row_with_the_same_numbers() -> None:
    world = start_local(2)
    try:
        comparison = Comparison(
            load_model(SMALL), world, num_images=12, passes=1, microbatch_size=1, threads=1, depth=2, max_stages=2
        )
        comparison.serial()
        row = comparison.replicas(2)
        send_leave(world.transport)
    finally:
        world.close()
    assert row["mode"] == "replicas"
    assert row["bit_equal"]
    assert [stage["stage"] for stage in row["per_stage"]] == [0, 0]
    assert len({stage["device"] for stage in row["per_stage"]}) == 2
    assert row["efficiency"] > 0
