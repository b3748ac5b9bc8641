from itertools import islice

import pytest

from penstock.plan.schedule.actions import forward_only, text


@pytest.mark.parametrize(
    ("stages", "num_microbatches", "expected"),
    [
        ([0], 3, "F0.0 F1.0 F2.0"),
        ([2, 3], 2, "F0.2 F0.3 F1.2 F1.3"),  # a device with two stages takes each microbatch through both
        ([1], None, "F0.1 F1.1 F2.1 F3.1"),  # without an end
        ([], 0, ""),
    ],
)
def test_forwards_are_in_order(stages: list[int], num_microbatches: int | None, expected: str) -> None:
    assert text(islice(forward_only(stages, num_microbatches), 4)) == expected
