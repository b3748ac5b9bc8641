"""Rows of one model on one world."""

from collections.abc import Sequence

import pytest
from torch import Tensor

from penstock.bench.compare import Comparison
from penstock.bench.references import WholeModel
from penstock.group.entry import start_local
from penstock.spec.settings import BenchSettings
from penstock.zoo.models.models import load_model
from tests.cli.conftest import SMALL


@pytest.mark.long
def test_replicas_are_a_row_with_the_same_numbers() -> None:
    world = start_local(2)
    try:
        comparison = Comparison(
            load_model(SMALL), world, BenchSettings(model=SMALL, num_images=12, passes=1, threads=1), max_stages=2
        )
        first = comparison.serial()
        row = comparison.replicas(2)
        world.dismiss()
    finally:
        world.close()
    assert row["mode"] == "replicas"
    assert row["bit_equal"]
    assert [stage["stage"] for stage in row["per_stage"]] == [0, 0]
    assert len({stage["device"] for stage in row["per_stage"]}) == 2
    assert row["efficiency"] > 0
    # the serial row's rate is taken to the speed that the machine had around this row
    assert row["speedup"] == pytest.approx(row["images_per_second"] / row["serial_images_per_second"])
    assert row["serial_images_per_second"] == pytest.approx((1 + row["drift"]) * first["images_per_second"])


class TwoRowsPerSecond:
    """Says that every device alone does two microbatches per second, and can be asked at any time."""

    beside = True

    def __init__(self, whole: WholeModel) -> None:
        assert len(whole.inputs) == 8
        self.num_asked = 0

    def run(self, ranks: Sequence[int], count: int) -> tuple[list[list[Tensor]], list[float]]:
        self.num_asked += 1
        return [], [count / 2 for _ in ranks]


@pytest.mark.long
def test_limit_is_measured_around_every_pass() -> None:
    world = start_local(2)
    limits: list[TwoRowsPerSecond] = []

    def make(whole: WholeModel) -> TwoRowsPerSecond:
        limits.append(TwoRowsPerSecond(whole))
        return limits[-1]

    try:
        comparison = Comparison(
            load_model(SMALL), world, BenchSettings(model=SMALL, num_images=12, passes=3, threads=1), max_stages=2
        )
        comparison.serial()
        comparison.take_limit_from(make)
        row = comparison.pipeline(2)
        world.dismiss()
    finally:
        world.close()
    assert limits[0].num_asked == 4  # the one behind a pass is the one before the next
    assert row["bit_equal"]
    assert row["ceiling_images_per_second"] == 4
    assert len(row["pass_efficiencies"]) == 3
    assert row["efficiency"] == pytest.approx(sum(row["pass_efficiencies"]) / 3)
