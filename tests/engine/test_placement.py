"""Rows of a batch among replicas: evenly, or as their microbatches divide them."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.placement import Grid, Replica, shares


def grid(*counts: int | None) -> Grid:
    return Grid(tuple(Replica((rank,), (rank,), count) for rank, count in enumerate(counts)))


def test_replicas_get_rows_by_their_microbatches() -> None:
    assert grid(None, None).rows(7) == [range(4), range(4, 7)]
    assert grid(3, 1).rows(8) == [range(6), range(6, 8)]
    assert grid(1, 3).rows(6) == [range(2), range(2, 6)]  # microbatches of 2, 2, 1 and 1 rows
    assert grid(1, 3).rows(3) == [range(1), range(1, 3)]
    assert grid(3, 1).rows(3) == [range(3), range(3, 3)]
    assert grid(3, None).rows(8) == [range(4), range(4, 8)]  # one is not known
    assert grid(2).rows(0) == [range(0)]


@given(st.integers(0, 40), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_a_row_s_microbatch_depends_on_no_replicas(num_rows: int, counts: list[int]) -> None:
    total = sum(counts)
    whole = [rows for rows in shares(num_rows, total) if rows]
    found = []
    for part, count in zip(grid(*counts).rows(num_rows), counts, strict=True):
        found += [range(part.start + rows.start, part.start + rows.stop) for rows in shares(len(part), count) if rows]
    assert found == whole
