"""Prompts and options as scripts for `model.generate` give them, and answers that continue their prompts."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from penstock.errors import UsageError
from penstock.generate.generator import Generator
from tests.fewer import long
from tests.generate.decoders import FAMILIES, decoder, expected, prompts
from tests.generate.tokens import spaced

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = spaced()
PROMPT = "The water"


@pytest.fixture(scope="module")
def generator() -> Iterator[Generator]:
    with Generator(decoder("llama"), TOKENIZER, stages=1, slots=2, max_length=128) as made:
        made.submit([1], max_new_tokens=1).result()  # all threads run before the first test counts them
        yield made


def test_the_space_between_prompt_and_answer_is_kept(generator: Generator) -> None:
    tokens = generator.submit(PROMPT, max_new_tokens=8).result()
    whole = TOKENIZER.decode([*TOKENIZER(PROMPT)["input_ids"], *tokens], skip_special_tokens=True)
    assert PROMPT + "".join(generator.stream(PROMPT, max_new_tokens=8)) == whole


def test_a_stop_string_may_begin_with_the_space_of_a_token(generator: Generator) -> None:
    word = max((token for token in TOKENIZER.get_vocab() if token.startswith("▁")), key=len)
    always = {TOKENIZER.convert_tokens_to_ids(word): 1000.0}
    found = generator.submit(PROMPT, max_new_tokens=12, stop_strings=[word.replace("▁", " ")], logit_bias=always)
    assert len(found.result()) == 1
    assert found.finish_reason == "stop"


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_prompts_are_lists_arrays_and_tensors(generator: Generator, convert: Any) -> None:
    given = [prompts(5)[0], prompts(9)[0][:5]]
    wanted = generator.generate(torch.tensor(given), max_new_tokens=4)
    assert torch.equal(generator.generate(convert(given), max_new_tokens=4), wanted)
    assert torch.equal(generator.generate(inputs=convert(given), max_new_tokens=4), wanted)
    with pytest.raises(UsageError, match="input_ids"):
        generator.generate(given, inputs=given)


def test_padding_is_found_as_in_transformers(generator: Generator) -> None:
    model, (first, second) = generator.model, prompts(7, 4)
    ids = torch.tensor([first, [0, 0, 0, *second]])
    wanted = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(generator.generate(ids, max_new_tokens=6, pad_token_id=0), wanted)


def test_ends_may_be_a_tensor(generator: Generator) -> None:
    (prompt,) = prompts(6)
    tokens = generator.submit(prompt, max_new_tokens=8).result()
    found = generator.submit(prompt, max_new_tokens=8, eos_token_id=torch.tensor([tokens[2], 1]))
    assert found.result() == tokens[: tokens.index(tokens[2]) + 1]


def test_a_tokenizer_may_come_with_stop_strings() -> None:
    with Generator(decoder("llama"), stages=1, slots=2, max_length=64) as made:
        ids = torch.tensor([TOKENIZER(PROMPT)["input_ids"]])
        stopped = made.generate(ids, max_new_tokens=12, stop_strings=[" "], tokenizer=TOKENIZER)
        assert stopped.shape[1] <= ids.shape[1] + 12
        with pytest.raises(UsageError, match="stop_strings"):
            made.generate(ids, max_new_tokens=12, stop_strings=[" "])


def test_compiled_models_and_adapters() -> None:
    class Adapted(nn.Module):
        config, generation_config = transformers.LlamaConfig(), None

        def generate(self) -> None: ...

        def merge_and_unload(self) -> None: ...

    model, (prompt,) = decoder("llama"), prompts(6)
    with Generator(torch.compile(model), stages=1, slots=2, max_length=64) as made:
        assert made.submit(prompt, max_new_tokens=4).result() == expected(model, prompt, max_new_tokens=4)
    with pytest.raises(UsageError, match="merge_and_unload"):
        Generator(Adapted(), stages=1)


@pytest.mark.parametrize("name", ["phi3-longrope", long("llama-dynamic")])
def test_factors_that_long_company_would_change_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="max_length=128"):
        Generator(decoder(name), stages=1, slots=2, max_length=192)
    model, given = decoder(name), prompts(5, 100)
    with Generator(model, stages=1, slots=2, max_length=128) as made:
        requests = [made.submit(prompt, max_new_tokens=20) for prompt in given]
        assert [each.result() for each in requests] == [
            expected(model, prompt, max_new_tokens=20, do_sample=False) for prompt in given
        ]


@pytest.mark.parametrize("window", [8, long(40)])
def test_windows_of_gpt_neo_count_from_each_rows_position(window: int) -> None:
    kind, fields = FAMILIES["gpt-neo"]
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**fields | {"window_size": window})
    ).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1 and "wte" not in path and "wpe" not in path:
                parameter.mul_(6.0)
    given = prompts(5, 33, 70)
    with Generator(model, stages=2, slots=3, max_length=256) as made:
        requests = [made.submit(prompt, max_new_tokens=24) for prompt in given]
        assert [each.result() for each in requests] == [
            expected(model, prompt, max_new_tokens=24, do_sample=False) for prompt in given
        ]
