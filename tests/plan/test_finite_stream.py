"""Streams with bounded queues, by hand and by properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan.cost.predict import StageTimes, result_times, steady_s


def stage(*compute: float, wire: float = 0.0) -> StageTimes:
    return StageTimes(compute_s=compute, wire_s=(wire,) * len(compute))


def test_stream_time_of_two_equal_stages() -> None:
    assert result_times([stage(1.0), stage(1.0)], (0,), 4) == [2, 3, 4, 5]


def test_the_slowest_stage_sets_the_pace() -> None:
    assert result_times([stage(1.0), stage(3.0), stage(1.0)], (0,), 3) == [5, 8, 11]


def test_transfers_are_hidden_until_they_are_slowest() -> None:
    assert steady_s([stage(2.0), stage(2.0, wire=1.5)], (0,)) == pytest.approx(2.0)
    assert steady_s([stage(2.0), stage(2.0, wire=3.0)], (0,)) == pytest.approx(3.0)
    # with one buffer the wire and the next stage's computing cannot overlap
    assert steady_s([stage(2.0), stage(2.0, wire=1.5)], (0,), depth=1) == pytest.approx(3.5)


def test_differences_between_cut_sets_are_absorbed_by_queues() -> None:
    assert steady_s([stage(1.0, 2.0), stage(2.0, 1.0)], (0, 1)) == pytest.approx(1.5)


def test_a_slow_feeder() -> None:
    assert result_times([stage(1.0)], (0,), 3, feed_s=2.0) == [3, 5, 7]


@given(
    st.lists(st.tuples(st.floats(0.1, 3), st.floats(0, 3)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(2, 30),
)
def test_stream_time_is_between_slowest_part_and_sum(parts: list[tuple[float, float]], depth: int, count: int) -> None:
    stages = [stage(compute, wire=wire) for compute, wire in parts]
    times = result_times(stages, (0,), count, depth=depth)
    way = sum(compute + wire for compute, wire in parts)
    slowest = max(max(part) for part in parts)
    assert times[0] == pytest.approx(way)
    assert times == sorted(times)
    assert times[-1] >= way + (count - 1) * slowest - 1e-9
    assert times[-1] <= count * way + 1e-9
    deeper = result_times(stages, (0,), count, depth=depth + 1)
    assert all(a <= b + 1e-9 for a, b in zip(deeper, times, strict=True))
