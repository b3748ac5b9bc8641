"""A token must be left to choose, and a processor can end a text."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from penstock.errors import RunError
from penstock.generate.sampling import Sampler, most_likely


class UntilFive:
    """Ends a text after token 5."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, _tokens: Tensor, scores: Tensor) -> Tensor:
        return scores

    def ends(self, token: int) -> bool:
        self.seen.append(token)
        return token == 5


@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize(
    "options", [{"suppress_tokens": list(range(8))}, {"eos_token_id": list(range(8)), "min_new_tokens": 2}]
)
def test_a_token_must_be_left(sample: bool, options: dict[str, Any]) -> None:
    config = transformers.GenerationConfig(do_sample=sample, **options)
    with pytest.raises(RunError, match="suppress_tokens"):
        Sampler(config, num_prompt=1, seed=0)([3], torch.zeros(8))


@pytest.mark.parametrize("sample", [True, False])
def test_logits_must_be_finite_in_each_row_alone(sample: bool) -> None:
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 2.0, 1.0]])
    sampler = Sampler(transformers.GenerationConfig(do_sample=sample), num_prompt=1, seed=0)
    with pytest.raises(RunError, match="got nan"):
        sampler([3], logits[0], most_likely(logits)[0])
    sampler([3], logits[1], most_likely(logits)[1])


def test_rows_together_are_as_each_alone() -> None:
    logits = torch.randn(5, 301, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(transformers.GenerationConfig(), num_prompt=1)
    assert [sampler([3], row, each) for row, each in zip(logits, most_likely(logits), strict=True)] == [
        sampler([3], row) for row in logits
    ]


def test_each_processor_that_ends_a_text_gets_each_token() -> None:
    first, second = UntilFive(), UntilFive()
    sampler = Sampler(transformers.GenerationConfig(), num_prompt=1, processors=[first, second])
    assert [sampler.ended(token) for token in (1, 5)] == [False, True]
    assert first.seen == second.seen == [1, 5]
