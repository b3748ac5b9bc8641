"""Whatever a cache's values depend on changes its key."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.elastic.cache.key import cache_key


def weights(dtype: torch.dtype = torch.bfloat16, changed: float = 4.0) -> list[tuple[str, Tensor]]:
    return [("a.weight", torch.tensor([[1, 2], [3, changed]], dtype=dtype)), ("a.bias", torch.tensor(5.0))]


BASE: dict[str, Any] = {
    "program": '{"operations": []}',
    "weights": weights(),
    "data": "digits train",
    "preprocessing": "resize 32",
    "num_samples": 10,
    "num_views": 1,
    "stored": torch.bfloat16,
}


def test_a_key_depends_on_contents_alone() -> None:
    key = cache_key(**BASE)
    assert key == cache_key(**BASE | {"weights": iter(weights())})
    assert len(key) == 32
    strided = [(name, tensor.t().contiguous().t()) for name, tensor in weights()]
    assert key == cache_key(**BASE | {"weights": strided})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("program", '{"operations": [1]}'),
        ("weights", weights(changed=4.5)),
        ("weights", weights(torch.float32)),
        ("weights", weights()[:1]),
        ("weights", [("b.weight", weights()[0][1]), weights()[1]]),
        ("weights", [("a.weight", weights()[0][1].flatten()), weights()[1]]),
        ("data", "digits test"),
        ("data", "digits train of \udcff"),
        ("preprocessing", "resize 64"),
        ("num_samples", 11),
        ("num_views", 2),
        ("stored", torch.float32),
        ("stored", None),
    ],
)
def test_each_of_them_changes_it(field: str, value: object) -> None:
    assert cache_key(**BASE | {field: value}) != cache_key(**BASE)


def test_texts_do_not_run_into_each_other() -> None:
    assert cache_key(**BASE | {"data": "ab", "preprocessing": "c"}) != cache_key(
        **BASE | {"data": "a", "preprocessing": "bc"}
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.float8_e4m3fn])
def test_weights_of_any_dtype(dtype: torch.dtype) -> None:
    one, other = torch.tensor([1.0, 0.0]).to(dtype), torch.tensor([0.0, 1.0]).to(dtype)
    assert cache_key(**BASE | {"weights": [("a", one)]}) != cache_key(**BASE | {"weights": [("a", other)]})
