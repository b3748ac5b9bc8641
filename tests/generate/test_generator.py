"""`penstock.Generator`: the tokens of `model.generate`, the same bits in any company, and every way to end."""

import asyncio
import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import PenstockError, RunError, UsageError
from penstock.generate.generator import Generator
from penstock.report.run_report import write_report
from penstock.tracing.trace import read_run
from tests.fewer import long
from tests.generate.decoders import decoder, expected, prompts
from tests.processes import PROGRAMS, run_python

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (5, 1, 33, 64, 70, 10, 31, 32)


@pytest.fixture(scope="module")
def model() -> Any:
    return decoder("llama")


@pytest.fixture(scope="module")
def generator(model: Any) -> Iterator[Generator]:
    with Generator(model, stages=2, slots=2, max_length=128) as made:
        made.submit([1], max_new_tokens=1).result()  # all threads run before the first test counts them
        yield made


@pytest.mark.board
def test_one_stage_in_this_process_gives_the_tokens_of_the_model(model: Any) -> None:
    (prompt,) = prompts(9)
    with Generator(model, stages=1, slots=2, max_length=64) as made:
        tokens = made.submit(prompt, max_new_tokens=6).result()
    assert tokens == expected(model, prompt, max_new_tokens=6, do_sample=False)


def test_bits_do_not_depend_on_cuts_or_company(model: Any) -> None:
    given = prompts(*LENGTHS)
    wanted = [expected(model, prompt, max_new_tokens=30, do_sample=False) for prompt in given]
    logprobs: list[list[float]] = []
    for number, (stages, slots) in enumerate([(1, 3), (2, 3), (3, 3)]):
        with Generator(model, stages=stages, slots=slots, max_length=128) as made:
            order = list(range(len(given)))
            random.Random(number).shuffle(order)
            found = {index: made.submit(given[index], max_new_tokens=30) for index in order}
            together = [found[index].result() for index in range(len(given))]
            alone = made.submit(given[2], max_new_tokens=30)
            assert alone.result() == wanted[2]
            assert alone.logprobs == found[2].logprobs
        assert together == wanted
        logprobs = logprobs or [found[index].logprobs for index in range(len(given))]
        assert logprobs == [found[index].logprobs for index in range(len(given))]


def test_guesses_change_no_bits(model: Any) -> None:
    found: list[list[Any]] = []
    for speculate in (False, True):
        with Generator(model, stages=3, slots=2, max_length=128, speculate=speculate) as made:
            alone = made.submit(prompts(9)[0], max_new_tokens=60)
            alone.result()
            several = [
                made.submit(prompt, max_new_tokens=40, do_sample=bool(seed % 2), top_k=3, seed=seed)
                for seed, prompt in enumerate(prompts(5, 40, 9, 3))
            ]
            found.append([(request.result(), request.logprobs) for request in (alone, *several)])
            guesses, right = made.num_guesses
    assert found[0] == found[1]
    assert guesses > right > 0


def test_a_prompt_begins_after_what_a_slot_has_of_it(model: Any) -> None:
    (prompt,) = prompts(75)
    with Generator(model, stages=2, slots=1, lanes=1, max_length=128) as made:
        first, again = (made.submit(prompt, max_new_tokens=10) for _ in range(2))
        assert again.result() == first.result()
        assert again.logprobs == first.logprobs
        other = made.submit([*prompt[:40], *prompts(20)[0]], max_new_tokens=10)
        assert other.result() == expected(model, list(other.prompt), max_new_tokens=10, do_sample=False)
        assert [request.num_reused for request in (first, again, other)] == [0, 64, 32]


def test_generate_is_that_of_the_model(model: Any, generator: Generator) -> None:
    rows = prompts(9, 4, 12)
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    for settings in ({"max_new_tokens": 12}, {"max_length": 22}, {}, {"repetition_penalty": 1.3, "max_new_tokens": 20},
                     {"no_repeat_ngram_size": 2, "max_new_tokens": 20}, {"min_new_tokens": 9, "max_new_tokens": 12},
                     {"eos_token_id": 7, "max_new_tokens": 40}, {"bad_words_ids": [[5], [6, 7]]}):  # fmt: skip
        wanted = model.generate(ids, attention_mask=mask, do_sample=False, **settings)
        assert torch.equal(generator.generate(ids, mask, do_sample=False, **settings), wanted), settings


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_k": 0, "top_p": 0.8}, {"min_p": 0.1}], ids=str
)
def test_sampling_with_a_seed_is_that_of_the_model(model: Any, generator: Generator, settings: dict[str, Any]) -> None:
    ids = torch.tensor(prompts(6))
    torch.manual_seed(5)
    wanted = model.generate(ids, do_sample=True, max_new_tokens=15, **settings)
    found = generator.generate(ids, do_sample=True, max_new_tokens=15, seed=5, **settings)
    assert torch.equal(found, wanted)


def test_several_sequences_of_one_prompt(generator: Generator) -> None:
    ids = torch.tensor(prompts(6))
    found = generator.generate(ids, do_sample=True, max_new_tokens=10, num_return_sequences=3, seed=1)
    assert found.shape == (3, 16)
    assert len({tuple(row.tolist()) for row in found}) > 1
    assert torch.equal(found[1:2], generator.generate(ids, do_sample=True, max_new_tokens=10, seed=2))


def test_scores_of_a_prompt_are_those_of_the_model(model: Any, generator: Generator) -> None:
    for prompt in prompts(1, 8, 21, 70):
        request = generator.submit(prompt, max_new_tokens=2, score_prompt=True, num_likeliest=3)
        assert request.result() == expected(model, prompt, max_new_tokens=2, do_sample=False)
        with torch.no_grad():
            logprobs = model(torch.tensor([[*prompt, *request.tokens]])).logits[0].log_softmax(-1)
        assert request.prompt_logprobs[0] is None
        wanted = [float(logprobs[index, token]) for index, token in enumerate(prompt[1:])]
        assert request.prompt_logprobs[1:] == pytest.approx(wanted, abs=1e-4)
        for index, pairs in enumerate(request.prompt_likeliest[1:]):
            assert [token for token, _ in pairs] == logprobs[index].topk(3).indices.tolist()
        assert [pairs[0] for pairs in request.likeliest] == list(zip(request.tokens, request.logprobs, strict=True))


def test_penalties_and_biases(generator: Generator) -> None:
    prompt = prompts(6)[0]
    plain = generator.submit(prompt, max_new_tokens=20).result()
    assert len(set(plain)) < 20  # it repeats itself
    other = generator.submit(prompt, max_new_tokens=20, frequency_penalty=2.0, presence_penalty=100.0).result()
    assert other[0] == plain[0]
    assert len(set(other)) == 20
    # the prompt does not count
    for token in (plain[0], other[3]):
        found = generator.submit(prompt, max_new_tokens=5, logit_bias={token: 1e4}).result()
        assert found == [token] * 5
    seen: list[list[int]] = []

    def never(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(tokens[0].tolist())
        return scores.index_fill(1, torch.tensor([plain[0]]), -torch.inf)

    found = generator.submit(prompt, max_new_tokens=4, logits_processor=[never]).result()
    assert plain[0] not in found
    assert seen == [prompt + found[:count] for count in range(4)]
    with pytest.raises(UsageError, match="120"):
        generator.submit(prompt, logit_bias={120: 1.0})


def test_requests_work_from_asyncio(model: Any, generator: Generator) -> None:
    given = prompts(*range(2, 14))

    async def ask(prompt: list[int]) -> list[int]:
        return [token async for token in generator.submit(prompt, max_new_tokens=8)]

    async def leave() -> None:
        request = generator.submit(given[0], max_new_tokens=100)
        async for _ in request:
            break
        request.cancel()

    async def together() -> list[list[int]]:
        await leave()
        return await asyncio.gather(*map(ask, given))

    found = asyncio.run(together())
    assert found == [expected(model, prompt, max_new_tokens=8, do_sample=False) for prompt in given]
    # who has left with its loop is not called any more
    assert generator.submit(given[0], max_new_tokens=3).result() == found[0][:3]


def test_requests_work_from_many_threads(model: Any, generator: Generator) -> None:
    given = prompts(*range(2, 14))
    found: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        found[index] = generator.submit(given[index], max_new_tokens=8).result()

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    for index, prompt in enumerate(given):
        assert found[index] == expected(model, prompt, max_new_tokens=8, do_sample=False)


def test_tokens_come_one_by_one_and_a_request_may_be_left(generator: Generator) -> None:
    request = generator.submit(prompts(5)[0], max_new_tokens=100)
    first = [next(iter(request)) for _ in range(3)]
    request.cancel()
    rest = list(request)
    assert request.tokens == first + rest
    assert len(request.tokens) < 100
    assert request.finish_reason == "cancelled"
    # its slot is free again, as are those of requests that never began
    many = [generator.submit(prompts(5)[0], max_new_tokens=4) for _ in range(20)]
    for each in many[::2]:
        each.cancel()
    assert [len(each.result()) for each in many[1::2]] == [4] * 10


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"penalty_alpha": 0.6}, "penalty_alpha=0.6"),
        ({"max_new_token": 3}, "max_new_token"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 125}, "128"),
        ({"temperature": 0.0, "do_sample": True}, "temperature"),
        ({"stop_strings": ["x"]}, "tokenizer"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"num_return_sequences": 3, "do_sample": True}, "num_return_sequences=3"),
    ],
)
def test_invalid_generation_requests_are_refused(generator: Generator, changes: dict[str, Any], value: str) -> None:
    with pytest.raises(UsageError, match=value):
        generator.submit(prompts(5)[0], **changes)


@pytest.mark.parametrize(("prompt", "value"), [([], "none"), ([5] * 9 + [-1], "-1"), ([120], "120"), ("text", "text")])
def test_invalid_prompts_are_refused(generator: Generator, prompt: Any, value: str) -> None:
    with pytest.raises(UsageError, match=value):
        generator.submit(prompt, max_new_tokens=3)


def _broken(_tokens: Tensor, _scores: Tensor) -> Tensor:
    raise IndexError("no such token")


def test_failed_request_leaves_the_others_running(generator: Generator) -> None:
    bad = generator.submit(prompts(40)[0], max_new_tokens=20, logits_processor=[_broken])
    good = generator.submit(prompts(40)[0], max_new_tokens=20)
    with pytest.raises(RunError, match="no such token"):
        bad.result()
    assert len(good.result()) == 20


def test_reader_of_a_failed_request_gets_the_error(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = threading.Event()

    def breaks_once_watched(tokens: Tensor, scores: Tensor) -> Tensor:
        watched.wait(60)
        return _broken(tokens, scores)

    request = generator.submit(prompts(40)[0], max_new_tokens=20, logits_processor=[breaks_once_watched])
    ended, finish = [], request.finish

    def finishing(reason: str) -> None:
        ended.append(request._error)
        finish(reason)

    monkeypatch.setattr(request, "finish", finishing)
    watched.set()
    with pytest.raises(RunError, match="sampling failed"):
        request.result()
    assert len(ended) == 1
    assert ended[0] is not None, "the end came before the error"


def test_a_worker_that_is_killed_ends_all_requests(model: Any) -> None:
    made = Generator(model, stages=2, slots=2, max_length=128)
    requests = [made.submit(prompt, max_new_tokens=100) for prompt in prompts(5, 6, 7, 8, 9, 10, 11)]
    next(iter(requests[0]))
    workers = made.pipeline.world.workers
    assert workers is not None
    os.kill(workers.pids[1], signal.SIGKILL)
    begin = time.perf_counter()
    for request in requests:
        with pytest.raises(RunError, match="killed"):
            request.result()
    assert time.perf_counter() - begin < 20.0
    with pytest.raises(RunError, match="has ended"):
        made.submit(prompts(5)[0], max_new_tokens=3)
    made.close()


@pytest.mark.parametrize("stages", [2, long(4)])
def test_devices_that_are_lost_change_no_bit(model: Any, stages: int) -> None:
    given = prompts(*LENGTHS, 40, 50)
    settings: dict[str, Any] = {"max_new_tokens": 50, "do_sample": True}
    with Generator(model, stages=1, slots=3, max_length=128) as made:
        alone = [made.submit(prompt, seed=index, **settings) for index, prompt in enumerate(given)]
        wanted = [(request.result(), request.logprobs) for request in alone]
    with Generator(model, stages=stages, slots=3, max_length=128, on_loss="continue") as made:
        requests = [made.submit(prompt, seed=index, **settings) for index, prompt in enumerate(given)]
        workers = made.pipeline.world.workers
        assert workers is not None
        for lost in range(stages // 2):
            for _ in range(5):
                next(iter(requests[lost]))
            os.kill(workers.pids[stages - 1 - lost], signal.SIGKILL)
        assert [(request.result(), request.logprobs) for request in requests] == wanted
        # and one that comes after it
        again = made.submit(given[2], seed=2, **settings)
        assert (again.result(), again.logprobs) == wanted[2]


def test_a_device_that_comes_back_changes_no_bit(model: Any) -> None:
    (prompt,) = prompts(40)
    settings: dict[str, Any] = {"max_new_tokens": 60, "do_sample": True, "seed": 3}
    with Generator(model, stages=2, slots=2, max_length=128, on_loss="continue") as made:
        wanted = made.submit(prompt, **settings)
        assert len(wanted.result()) == 60
        workers = made.pipeline.world.workers
        assert workers is not None
        os.kill(workers.pids[0], signal.SIGSTOP)
        found = [made.submit(prompt, **settings)]
        found[0].result()
        assert [change.devices for change in made.pipeline.changes] == [("worker-2",)]
        os.kill(workers.pids[0], signal.SIGCONT)
        until_s = time.monotonic() + 40
        while len(made.pipeline.changes) == 1 and time.monotonic() < until_s:
            time.sleep(0.1)  # also while there are no requests
        assert {*made.pipeline.changes[1].devices} == {"worker-1", "worker-2"}
        found.append(made.submit(prompt, **settings))
        assert all((each.result(), each.logprobs) == (wanted.tokens, wanted.logprobs) for each in found)


def test_a_trace_has_every_microbatch_and_request(model: Any, tmp_path: Path) -> None:
    given = prompts(70, 5, 9)
    with Generator(model, stages=2, slots=2, max_length=128, trace=tmp_path) as made:
        made.submit(given[0], max_new_tokens=20).result()  # alone, so that there are guesses
        requests = [made.submit(prompt, max_new_tokens=20) for prompt in given[1:]]
        tokens = [request.result() for request in requests]
    facts = read_run(tmp_path).facts
    found = facts.generation
    assert found is not None
    assert facts.num_rows == 60 == 20 + sum(map(len, tokens))
    assert facts.num_microbatches == len(found.microbatches)
    assert sum(kind == "prompt" for kind, _ in found.microbatches) == 3 + 1 + 1
    assert {kind for kind, _ in found.microbatches} == {"prompt", "step", "guess"}
    assert sorted(each.num_prompt for each in found.requests) == [5, 9, 70]
    for each in found.requests:
        assert len(each.came_s) == 20
        assert each.asked_s <= each.came_s[0] <= each.came_s[-1] <= facts.total_s + 1.0
    assert len(found.cache_bytes) == 2
    report = write_report(tmp_path)
    tables = (tmp_path / "tables.md").read_text()
    assert "| requests | 3 |" in tables
    assert f"{found.num_right} of {found.num_guesses}" in tables
    assert "a prompt's chunk" in (tmp_path / "report.html").read_text()
    assert report.account.num_times == pytest.approx(2, abs=0.5)


def test_waiting_requests_fail_when_the_generator_closes(model: Any) -> None:
    made = Generator(model, stages=1, slots=1, max_length=128)
    running, waiting = (made.submit(prompts(5)[0], max_new_tokens=50) for _ in range(2))
    next(iter(running))
    made.close()
    assert len(running.result()) == 50
    with pytest.raises(PenstockError, match="closed"):
        waiting.result()
    with pytest.raises(UsageError, match="closed"):
        made.submit(prompts(5)[0])


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"max_length": 1}, {"lanes": -1}, {"lanes": 0}])
def test_impossible_generator_options_are_refused(model: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Generator(model, **wrong)


def test_generator_works_under_torchrun() -> None:
    script = str(PROGRAMS / "generate_under_torchrun.py")
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = run_python(*arguments, deadline_s=120.0)
    assert done.status == 0, done.stderr
    assert done.stdout.count("fine") == 2


def test_threads_that_are_started_later_have_the_callers_number_of_threads(model: Any) -> None:
    found: list[int] = []
    torch.set_num_threads(2)
    try:
        with Generator(model, stages=1, max_length=64) as made:
            assert made.submit(prompts(5)[0], max_new_tokens=5).result()
            thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            thread.start()
            thread.join()
        assert (found, torch.get_num_threads()) == ([2], 2)
    finally:
        torch.set_num_threads(1)


def test_settings_that_change_after_the_start_are_refused(model: Any) -> None:
    with Generator(model, stages=1, max_length=64) as made:
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(UsageError, match="deterministic"):
                made.submit(prompts(5)[0], max_new_tokens=5)
        finally:
            torch.use_deterministic_algorithms(False)
        assert made.submit(prompts(5)[0], max_new_tokens=5).result()


def test_a_generator_that_failed_is_collected(model: Any) -> None:
    made = Generator(model, stages=2, max_length=64)
    workers, dropped = made.pipeline.world.workers, weakref.ref(made.pipeline)
    assert workers is not None
    os.kill(workers.pids[1], signal.SIGKILL)
    with pytest.raises(PenstockError):
        made.submit(prompts(5)[0], max_new_tokens=50).result()
    del made, workers
    until = time.monotonic() + 20
    while dropped() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.1)
    assert dropped() is None


@pytest.mark.parametrize("stages", [2, long(1)])
def test_process_can_end_with_a_request_in_flight(stages: int) -> None:
    done = run_python(str(PROGRAMS / "request_left_open.py"), str(stages), deadline_s=120.0)
    assert done.status == 3, done.stderr
    assert "failed" not in done.stderr
