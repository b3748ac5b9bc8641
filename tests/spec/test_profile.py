from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ProfileError
from penstock.spec.fields import fingerprint
from penstock.spec.plan import Generation
from penstock.spec.profile import Boundary, RuntimeColumn, Unit, interpolate, read_profile, write_profile
from tests.spec.samples import make_profile


def test_a_profile_loads_back_equal(tmp_path: Path) -> None:
    unit = Unit(forward_s=(0.1, 0.3), forward_spread_s=(0.01, 0.02), backward_s=(0.2, 0.7), parameters=(("w", 12),))
    profile = make_profile([1.0], rows=(1, 4), units=(unit,), loader_s_per_row=1e-3)
    write_profile(tmp_path / "profile.json", profile)
    assert read_profile(tmp_path / "profile.json") == profile
    assert fingerprint(read_profile(tmp_path / "profile.json")) == fingerprint(profile)


def test_cuts_are_the_boundaries_between_units() -> None:
    assert make_profile([1, 2, 3]).cuts == ("unit0:after", "unit1:after")


def test_a_message_has_a_constant_part() -> None:
    assert Boundary(name="x", bytes_per_row=100, constant_bytes=8).num_bytes(3) == 308


def test_seconds_between_and_beyond_what_was_measured() -> None:
    assert interpolate((1, 4), (2.0, 5.0), 1) == 2.0
    assert interpolate((1, 4), (2.0, 5.0), 2) == 3.0
    assert interpolate((1, 4), (2.0, 5.0), 6) == 7.0
    assert interpolate((2,), (2.0,), 5) == 5.0
    assert interpolate((2, 4), (1.0, 9.0), 1) == 0.0  # seconds are never negative


def test_noise_adds_up_the_ranges_of_all_units() -> None:
    units = (
        Unit(forward_s=(1.0, 4.0), forward_spread_s=(0.05, 0.1), backward_s=(2.0, 8.0), backward_spread_s=(0.1, 0.2)),
        Unit(forward_s=(1.0, 4.0), forward_spread_s=(0.05, 0.1), backward_s=(0.0, 0.0)),
    )
    profile = make_profile([1.0, 1.0], rows=(1, 4), units=units)
    assert profile.noise(1) == pytest.approx(0.2 / 4.0)
    assert profile.noise(4) == pytest.approx(0.4 / 16.0)
    assert profile.noise(2) == pytest.approx((0.2 + 0.2 / 3) / 8.0)
    assert make_profile([1.0]).noise(1) == 0.0


@given(st.integers(1, 40), st.floats(0, 10), st.floats(0, 10))
def test_interpolation_keeps_straight_lines(rows: int, start: float, slope: float) -> None:
    table = [start + slope * row for row in (1, 3, 8)]
    assert interpolate((1, 3, 8), table, rows) == pytest.approx(start + slope * rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ()}, r"rows must be batch sizes of at least 1 in rising order; got \[\]"),
        ({"rows": (4, 1)}, r"rows must be batch sizes of at least 1 in rising order; got \[4, 1\]"),
        ({"rows": (1, 2)}, r"units\[0\].forward_s must have one number for each of the profile's 2 batch sizes; got 1"),
        ({"units": ()}, "got 3 boundaries and 0 units"),
        ({"feed_s": -1.0}, "feed_s must be a number of at least 0; got -1"),
        (
            {"feed_s": 0.1, "own_input_s": 0.1, "own_output_s": 0.1},
            r"own_input_s \+ own_output_s must be at most stage_overhead_s \+ feed_s \+ result_s; got 0.2 and 0.1",
        ),
        ({"threads": 0}, "threads must be at least 1; got 0"),
        ({"generation": Generation(slots=2, lanes=3, max_length=8)}, "1 lane; got 3"),
        ({"version": 2}, "must be 1; got 2"),
        (
            {"boundaries": (Boundary(name="a", bytes_per_row=1),) * 3},
            "names of boundaries must be unique; 'a' is given twice",
        ),
        (
            {"units": tuple(Unit(forward_s=(1.0,), parameters=(("w", size),)) for size in (3, 4))},
            r"a tensor must have one size; w has 3 and 4 bytes in units\[1\].parameters",
        ),
    ],
)
def test_profile_with_contradicting_parts_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        make_profile([1.0, 1.0], **change)


def test_a_file_that_is_no_profile(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text('{"model": 3}')
    with pytest.raises(ProfileError, match=r"profile\.json: .* model: "):
        read_profile(file)


def test_profile_measured_on_weights_in_blocks_can_be_read(tmp_path: Path) -> None:
    column = RuntimeColumn(runtime="onnxruntime", precision="stored", forward_s=(1.0,), eager_s=(2.0,), error=0.01)
    profile = make_profile([1.0], runtimes=(column,))
    write_profile(tmp_path / "profile.json", profile)
    assert read_profile(tmp_path / "profile.json") == profile
