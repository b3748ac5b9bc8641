"""A token must be left to choose, and a processor can end a text."""

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process

from penstock.errors import RunError
from penstock.generate.sampling import Draw, Sampler, drawn, most_likely
from tests.fewer import examples


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
def test_at_least_one_token_must_be_allowed(sample: bool, options: dict[str, Any]) -> None:
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


def test_rows_sample_together_as_alone() -> None:
    logits = torch.randn(5, 301, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(transformers.GenerationConfig(), num_prompt=1)
    assert [sampler([3], row, each) for row, each in zip(logits, most_likely(logits), strict=True)] == [
        sampler([3], row) for row in logits
    ]


draws = st.builds(
    Draw, at=st.floats(0, 1, exclude_max=True, width=32), temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 5, 100]), top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
)  # fmt: skip


@settings(max_examples=examples(200))
@given(st.lists(draws, min_size=1, max_size=4), st.integers(0, 2**31))
def test_drawn_tokens_are_left_by_the_warpers_of_transformers(rows: list[Draw], seed: int) -> None:
    logits = torch.randn(len(rows), 9, generator=torch.Generator().manual_seed(seed))
    for draw, row, found in zip(rows, logits, drawn(logits, rows), strict=True):
        scores = logits_process.TemperatureLogitsWarper(draw.temperature)(None, row[None])
        scores = logits_process.TopKLogitsWarper(draw.top_k)(None, scores) if draw.top_k else scores
        scores = logits_process.TopPLogitsWarper(draw.top_p)(None, scores) if draw.top_p < 1 else scores
        chances = torch.softmax(scores, -1)[0].double()
        largest, token, logprob = found
        assert chances[token] > 0
        before = float(chances[row > row[token]].sum())
        assert before - 1e-6 <= draw.at <= before + float(chances[token]) + 1e-6
        assert largest == float(row.max())
        assert logprob == pytest.approx(float(row.log_softmax(-1)[token]))


def test_top_k_keeps_equal_logits() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert {drawn(logits, [Draw(at, top_k=1)])[0][1] for at in (0.1, 0.5, 0.9)} == {0, 1, 2}


def test_draws_have_the_probabilities_of_a_row() -> None:
    count, logits = 4000, torch.tensor([0.0, 1.0, 2.0, -1.0])
    sampler = Sampler(transformers.GenerationConfig(do_sample=True, top_k=3, temperature=0.5), num_prompt=1, seed=3)
    tokens = [token for _, token, _ in drawn(logits.expand(count, 4), [sampler.draw() for _ in range(count)])]
    wanted = torch.softmax(logits[:3] * 2, -1)
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / count
    assert float((shares[:3] - wanted).abs().max()) < 0.03
    assert shares[3] == 0


@pytest.mark.parametrize(
    ("options", "draws"),
    [({}, True), ({"top_p": 0.9, "temperature": 0.5}, True), ({"min_p": 0.1}, False), ({"typical_p": 0.9}, False),
     ({"repetition_penalty": 1.3}, False), ({"do_sample": False}, False)],
)  # fmt: skip
def test_draws_need_no_processor(options: dict[str, Any], draws: bool) -> None:
    config = transformers.GenerationConfig(**{"do_sample": True, **options})
    assert Sampler(config, num_prompt=1, seed=0).draws == draws


def test_each_processor_that_ends_a_text_gets_each_token() -> None:
    first, second = UntilFive(), UntilFive()
    sampler = Sampler(transformers.GenerationConfig(), num_prompt=1, processors=[first, second])
    assert [sampler.ended(token) for token in (1, 5)] == [False, True]
    assert first.seen == second.seen == [1, 5]
