"""What a search asks, chooses and keeps, without a model."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.compress.search import (
    CompressSettings,
    Found,
    check_asked,
    choose,
    contenders,
    floor_of,
    frontier,
    is_enough,
    read_search,
    write_search,
)
from penstock.errors import UsageError


def settings(**fields: Any) -> CompressSettings:
    return CompressSettings(model="timm:vit", data="digits", **({"max_drop": 0.01} | fields))


def found(ratio: float, runtime: str, accuracy: float, rate: float) -> Found:
    return Found(
        ratio=ratio, runtime=runtime, accuracy=accuracy, rows_per_s=rate, num_parameters=10, weights="w.safetensors"
    )


FOUND = [
    found(0.0, "eager", 0.9, 10.0), found(0.0, "openvino", 0.9, 20.0), found(0.0, "onnxruntime:int8", 0.88, 30.0),
    found(0.3, "eager", 0.893, 15.0), found(0.3, "openvino", 0.893, 28.0),
]  # fmt: skip


def test_the_fastest_that_holds_the_floor_is_chosen() -> None:
    assert choose(settings(max_drop=0.01), FOUND) == (FOUND[4], True)
    assert choose(settings(max_drop=0.03), FOUND) == (FOUND[2], True)
    assert choose(settings(max_drop=None, accuracy_floor=0.895), FOUND) == (FOUND[1], True)
    assert floor_of(settings(max_drop=0.03), FOUND) == pytest.approx(0.87)


def test_rates_within_the_noise_are_equal() -> None:
    """The faster one by the median is slower in one of the rounds."""
    asked = settings(max_drop=0.01)
    base, other = FOUND[0], FOUND[3]
    rounds = [replace(base, rates=(10.0, 12.0, 9.0)), replace(other, rates=(11.0, 11.9, 10.0), rows_per_s=11.0)]
    assert choose(asked, rounds) == (rounds[0], True)  # more accurate
    alike = [rounds[0], replace(rounds[1], accuracy=rounds[0].accuracy)]
    assert choose(asked, alike) == (alike[0], True)  # nothing is better than the original
    clear = [rounds[0], replace(rounds[1], rates=(11.0, 12.1, 10.0))]
    assert choose(asked, clear) == (clear[1], True)


def test_the_original_and_the_best_are_compared() -> None:
    many = [found(0.0, f"r{index}", 0.9, 20.0 + index) for index in range(7)]
    chosen = contenders(settings(), [FOUND[0], *many, found(0.6, "wrong", 0.1, 99.0)])
    assert [each.runtime for each in chosen] == ["eager", "r6", "r5", "r4", "r3", "r2"]


def test_a_floor_that_nothing_holds_gives_the_most_accurate() -> None:
    assert choose(settings(max_drop=None, accuracy_floor=0.95), FOUND) == (FOUND[1], False)


def test_the_most_accurate_that_is_fast_enough_is_chosen() -> None:
    asked = settings(max_drop=None, target_speedup=2.5)
    assert choose(asked, FOUND) == (FOUND[4], True)
    assert is_enough(asked, FOUND, 0.3)
    far = settings(max_drop=None, target_speedup=9.0)
    assert choose(far, FOUND) == (FOUND[2], False)
    assert not is_enough(far, FOUND, 0.3)


def test_pruning_ends_where_nothing_holds_the_floor() -> None:
    assert not is_enough(settings(), FOUND, 0.3)
    assert is_enough(settings(), [*FOUND, found(0.6, "eager", 0.5, 50.0)], 0.6)


def test_frontier_has_no_dominated_candidate() -> None:
    assert frontier(FOUND) == [FOUND[1], FOUND[4], FOUND[2]]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=30))
def test_frontier_has_every_undominated_candidate(pairs: list[tuple[int, int]]) -> None:
    all_found = [found(0.0, str(index), a / 20, float(r)) for index, (a, r) in enumerate(pairs)]
    kept = frontier(all_found)
    for each in all_found:
        assert any(k.accuracy >= each.accuracy and k.rows_per_s >= each.rows_per_s for k in kept)
    for before, after in pairwise(kept):
        assert before.accuracy > after.accuracy
        assert before.rows_per_s < after.rows_per_s


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_drop": None}, "a search needs exactly one aim; give one of --accuracy-floor"),
        ({"target_speedup": 2.0}, "a search needs exactly one aim"),
        ({"max_drop": None, "target_speedup": 0.0}, "must be above 0; got 0"),
        ({"runtimes": ("abacus",)}, "among eager, eager:bfloat16, onnx.*; got 'abacus'"),
    ],
)
def test_invalid_searches_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_asked(settings(**fields))


def test_a_search_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "search.json"
    assert read_search(file, settings()) == []
    write_search(file, settings(), FOUND)
    assert read_search(file, settings(max_drop=0.05, ratios=(0.2,))) == FOUND
    with pytest.raises(UsageError, match=r"^epochs .* 3; got 5; choose another --output"):
        read_search(file, settings(epochs=5))
    file.write_text("{}")
    with pytest.raises(UsageError, match="holds no search"):
        read_search(file, settings())
