"""Generation on a device that is not the CPU, and from a model that lies on one: tokens of `model.generate`."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import UsageError
from penstock.generate.generator import Generator
from tests.fewer import long
from tests.generate.decoders import decoder, expected, prompts
from tests.pretend import module

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ["llama", long("mamba"), long("t5")]


def _put(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model; `Module.to` cannot move parameters to a device that exists only in Python."""
    for each in model.modules():
        each._parameters |= {
            name: None if p is None else nn.Parameter(p.to(device), False) for name, p in each._parameters.items()
        }
        each._buffers |= {name: b if b is None else b.to(device) for name, b in each._buffers.items()}
    return model


def _check(model: Any, wanted: list[list[int]], given: list[list[int]], **options: Any) -> None:
    with Generator(model, stages=1, slots=2, max_length=128, **options) as generator:
        requests = [generator.submit(prompt, max_new_tokens=10) for prompt in given]
        assert [request.result() for request in requests] == wanted


@pytest.mark.parametrize("name", NAMES)
def test_tokens_on_a_device_and_from_it(name: str, pretended_gpu: torch.device) -> None:
    model, given = decoder(name), prompts(5, 33)
    wanted = [expected(model, prompt, max_new_tokens=10, do_sample=False) for prompt in given]
    _check(model, wanted, given, device=pretended_gpu)
    _check(_put(copy.deepcopy(model), pretended_gpu), wanted, given)


def test_chunks_are_longer_on_a_gpu(pretended_gpu: torch.device) -> None:
    model, (prompt,) = decoder("llama"), prompts(300)
    with Generator(model, stages=1, slots=1, max_length=320, device=pretended_gpu) as generator:
        wanted = expected(model, prompt, max_new_tokens=3, do_sample=False)
        requests = [generator.submit(prompt, max_new_tokens=3) for _ in range(2)]
        assert [request.result() for request in requests] == [wanted, wanted]
    assert [request.num_reused for request in requests] == [0, 256]


@pytest.mark.parametrize(
    ("options", "copies"),
    [({}, False), ({"do_sample": True, "top_p": 0.9}, False), ({"do_sample": True, "min_p": 0.1}, True)],
)
def test_steps_copy_logits_only_for_processors(
    options: dict[str, Any], copies: bool, pretended_gpu: torch.device
) -> None:
    model, given = decoder("llama"), prompts(5, 33)
    with Generator(model, stages=1, slots=2, max_length=128, device=pretended_gpu) as generator:
        module.most_left = 0
        requests = [generator.submit(each, max_new_tokens=4, num_likeliest=3, seed=0, **options) for each in given]
        assert [len(request.result()) for request in requests] == [4, 4]
        assert (module.most_left >= generator.vocabulary) == copies
        alone = generator.submit(given[0], max_new_tokens=4, seed=0, **options)
        assert (alone.result(), alone.logprobs) == (requests[0].tokens, requests[0].logprobs)
    for request in requests:
        assert [len(each) for each in request.likeliest] == [3] * 4
        if not options:
            assert [each[0] for each in request.likeliest] == list(zip(request.tokens, request.logprobs, strict=True))


def test_a_gpu_that_is_missing_is_refused_before_the_model_is_read() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU on this machine")
    for device in ("cuda", "gpu"):
        with pytest.raises(UsageError):
            Generator(None, device=device)
