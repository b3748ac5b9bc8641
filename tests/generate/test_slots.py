"""States that are replaced, and those of an encoder's output: equal bits in any company, after losses too."""

import os
import random
import signal
from typing import Any

import pytest
import torch
import transformers

from penstock.errors import UsageError
from penstock.generate.generator import Generator
from penstock.generate.slots import Slots, slot_cache
from tests.fewer import long
from tests.generate.decoders import FAMILIES, decoder, expected, prompts

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (5, 1, 33, 64, 70, 10)


@pytest.mark.parametrize("name", ["mamba", long("bart"), long("qwen3-next")])
def test_bits_do_not_depend_on_cuts_or_company(name: str) -> None:
    model, given = decoder(name), prompts(*LENGTHS)
    wanted = [expected(model, prompt, max_new_tokens=20, do_sample=False) for prompt in given]
    logprobs: list[list[float]] = []
    for stages in (1, 2):
        with Generator(model, stages=stages, slots=2, max_length=128) as made:
            order = random.Random(stages).sample(range(len(given)), len(given))
            found = {index: made.submit(given[index], max_new_tokens=20) for index in order}
            assert [found[index].result() for index in range(len(given))] == wanted
            alone = made.submit(given[2], max_new_tokens=20)
            assert (alone.result(), alone.logprobs) == (wanted[2], found[2].logprobs)
        logprobs = logprobs or [found[index].logprobs for index in range(len(given))]
        assert logprobs == [found[index].logprobs for index in range(len(given))]


# 8-bit heads have 12 numbers of a byte, and a scale of 4
@pytest.mark.parametrize(("cache_dtype", "part"), [long("bfloat16", 1 / 2), ("int8", 1 / 3)])
def test_keys_and_values_in_fewer_bits(cache_dtype: Any, part: float) -> None:
    model, given = decoder("llama"), prompts(*LENGTHS)
    caches: list[int] = []
    logprobs: list[list[list[float]]] = []
    for stages, kept in ((1, None), (1, cache_dtype), (2, cache_dtype)):
        with Generator(model, stages=stages, lanes=1, slots=2, max_length=128, cache_dtype=kept) as made:
            order = random.Random(stages).sample(range(len(given)), len(given))
            found = {index: made.submit(given[index], max_new_tokens=20) for index in order}
            answers = [found[index].result() for index in range(len(given))]
            alone = made.submit(given[2], max_new_tokens=20)
            assert (alone.result(), alone.logprobs) == (answers[2], found[2].logprobs)
            logprobs.append([found[index].logprobs for index in range(len(given))])
            (pipeline,) = made.pipeline.deployment.pipelines
            caches.append(sum(pipeline.cache_bytes))
    assert caches[1] == caches[2] == round(caches[0] * part)
    assert logprobs[1] == logprobs[2] != logprobs[0]
    for few, exact in zip(logprobs[1], logprobs[0], strict=True):
        assert few[0] == pytest.approx(exact[0], abs=0.02)


def test_unknown_cache_dtype_is_refused() -> None:
    wrong: Any = "int4"
    with pytest.raises(UsageError, match="int4"):
        Generator(decoder("llama"), cache_dtype=wrong)


@pytest.mark.parametrize("name", ["mamba", long("t5")])
def test_a_device_that_is_lost_changes_no_bit(name: str) -> None:
    model, given = decoder(name), prompts(*LENGTHS)
    settings: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True}
    found: list[list[Any]] = []
    for stages in (1, 2):
        with Generator(model, stages=stages, slots=2, max_length=128, on_loss="continue") as made:
            requests = [made.submit(prompt, seed=index, **settings) for index, prompt in enumerate(given)]
            if stages == 2:
                for _ in range(5):
                    next(iter(requests[0]))
                workers = made.pipeline.world.workers
                assert workers is not None
                os.kill(workers.pids[1], signal.SIGKILL)
            found.append([(request.result(), request.logprobs) for request in requests])
            assert len(made.pipeline.changes) == stages - 1
    assert found[0] == found[1]


def test_a_recurrent_models_prompt_is_scored_and_never_guessed() -> None:
    model = decoder("mamba")
    (prompt,) = prompts(12)
    with Generator(model, stages=2, slots=2, max_length=64) as made:
        request = made.submit(prompt, max_new_tokens=30, score_prompt=True)
        request.result()
        assert made.num_guesses == (0, 0)
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    wanted = [float(logprobs[index, token]) for index, token in enumerate(prompt[1:])]
    assert request.prompt_logprobs[1:] == pytest.approx(wanted, abs=1e-4)


def test_generate_is_that_of_an_encoder_decoder() -> None:
    model, rows = decoder("bart"), prompts(9, 4, 12)
    ids = torch.tensor([row + [0] * (12 - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (12 - len(row)) for row in rows])
    with Generator(model, stages=1, slots=3, max_length=64) as made:
        for settings in ({"max_new_tokens": 9}, {"max_length": 9}, {"forced_bos_token_id": 7, "forced_eos_token_id": 2},
                         {"min_new_tokens": 9, "eos_token_id": 7}, {"decoder_start_token_id": 5},
                         {"no_repeat_ngram_size": 2}):  # fmt: skip
            settings = {"max_new_tokens": 12} | settings if "max_length" not in settings else settings
            wanted = model.generate(ids, attention_mask=mask, do_sample=False, **settings)
            assert torch.equal(made.generate(ids, mask, do_sample=False, **settings), wanted), settings
        with pytest.raises(UsageError, match="score_prompt"):
            made.submit(rows[0], score_prompt=True)
        with pytest.raises(UsageError, match="got 65"):
            made.submit(prompts(65)[0])


def test_an_encoders_table_of_positions_may_be_used_to_its_end() -> None:
    kind, fields = FAMILIES["bart"]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**fields | {"max_position_embeddings": 90})
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    with Generator(model, stages=1, slots=1, max_length=90) as made:
        (prompt,) = prompts(88)
        found = made.submit(prompt, max_new_tokens=3).result()
    assert found == expected(model, prompt, max_new_tokens=3, do_sample=False)


def test_a_sequence_begins_with_zeros_and_leaves_other_slots_alone() -> None:
    state = torch.arange(8.0).reshape(4, 2).clone()
    slots = Slots(torch.tensor([2, 0]), torch.tensor([[0], [5]]), torch.arange(64))
    cache = slot_cache([{"recurrent0_": state}], slots)
    read = cache.get_recurrent_state(0)
    assert read.tolist() == [[0.0, 0.0], [0.0, 1.0]]
    read.add_(10.0)
    assert state.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    cache.layers[0].write_back()
    assert state.tolist() == [[10.0, 11.0], [2.0, 3.0], [10.0, 10.0], [6.0, 7.0]]
