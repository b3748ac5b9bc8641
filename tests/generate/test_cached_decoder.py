"""One graph for prompts and steps: the tokens of `model.generate`, for decoders of many kinds, cut anywhere."""

import threading
from dataclasses import replace

import pytest
import torch
import transformers

import penstock
from penstock.errors import OutOfMemory, UsageError
from penstock.generate.cached_decoder import CachedDecoder, is_causal, mask_of_rows, masks_by, sees_everything
from penstock.generate.generator import Generator
from penstock.generate.lanes import Lanes, SequenceState
from penstock.generate.loop import inputs_of
from penstock.graph.capture import capture
from penstock.graph.cuts import Cuts, divide
from penstock.graph.program import read_program, states_of, write_program
from penstock.runtime.eager import Runtime
from tests.fewer import long
from tests.generate.decoders import FAMILIES, decoder, expected, prompts
from tests.models import split_at

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 34  # beyond the window of those that have one
# further families are in benchmarks.generation
MORE = ("gemma3", "opt", "mpt", "llama4", "bart-decoder", "jamba", "m2m100")


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral", "bloom", "t5", *map(long, MORE)])
def test_the_tokens_of_transformers(name: str) -> None:
    model = decoder(name)
    wrapped = CachedDecoder(model, slots=3, length=128).eval()
    graph = capture(wrapped, (), wrapped.example(3, 32), dynamic=wrapped.dynamic, largest=wrapped.largest)
    split = split_at(wrapped, graph, list(Cuts(graph))[7::40])  # also inside of blocks
    lanes = Lanes(chunk=32, num_lanes=1, num_used=1, slots=3, recurrent=wrapped.recurrent)
    given = prompts(5, 33, 70)
    if wrapped.encodes:
        start = model.generation_config.decoder_start_token_id
        sequences = [SequenceState([start], 1, source=prompt) for prompt in given]
    else:
        sequences = [SequenceState(list(prompt), len(prompt)) for prompt in given]
    for sequence in sequences:
        lanes.admit(sequence)
    while (step := lanes.next()) is not None:
        logits = split(**inputs_of(step))
        for row, sequence in step.continued():
            lanes.add(sequence, int(logits[row, -1].argmax()))
            if len(sequence.tokens) == sequence.num_prompt + NEW:
                lanes.release(sequence)
    for prompt, sequence in zip(given, sequences, strict=True):
        wanted = expected(model, prompt, max_new_tokens=NEW, do_sample=False)
        assert sequence.tokens[sequence.num_prompt :] == wanted


def test_caches_are_not_weights() -> None:
    wrapped = CachedDecoder(decoder("llama"), slots=3, length=100).eval()
    parts = penstock.split(wrapped, (), wrapped.example(3, 32), stages=2, dynamic=wrapped.dynamic)
    caches = [state for stage in parts.stages for state in stage.program.states if state.kind == "cache"]
    assert len(caches) == 6  # keys and values of three layers, none in both stages
    assert {state.value.evaluate({}) for state in caches} == {(3, 129, 2, 12)}  # room in blocks of 64, and one


@pytest.mark.parametrize("name", ["gpt2", long("gpt-j")])
def test_a_table_of_positions_may_be_used_to_its_end(name: str) -> None:
    kind, fields = FAMILIES[name]
    limit = 90  # no multiple of a chunk
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**fields | {"n_positions": limit})
    ).eval()
    with pytest.raises(UsageError, match=str(limit)):
        Generator(model, stages=1, max_length=limit + 1)
    with Generator(model, stages=1, slots=1, max_length=limit) as generator:
        (prompt,) = prompts(limit - 3)
        found = generator.submit(prompt, max_new_tokens=3).result()
    assert found == expected(model, prompt, max_new_tokens=3, do_sample=False)


def test_model_without_key_value_cache_is_refused() -> None:
    with pytest.raises(UsageError, match="not Linear"):
        CachedDecoder(torch.nn.Linear(2, 2), slots=1, length=64)
    rwkv = transformers.RwkvConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, context_length=64)
    with pytest.raises(UsageError, match="RwkvForCausalLM keeps nothing"):
        CachedDecoder(transformers.RwkvForCausalLM(rwkv), slots=1, length=64)
    bert = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with pytest.raises(UsageError, match="BertLMHeadModel asks transformers for no causal mask"):
        CachedDecoder(transformers.BertLMHeadModel(bert), slots=1, length=64)
    moshi = transformers.MoshiConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16, sliding_window=8
    )
    with pytest.raises(UsageError, match="MoshiForCausalLM has a sliding window in its cache"):
        CachedDecoder(transformers.MoshiForCausalLM(moshi), slots=1, length=64)


def test_cache_relative_attention_is_refused() -> None:
    model = decoder("llama4")
    assert {layer.self_attn.floor_scale for layer in model.model.layers} == {8192}
    with pytest.raises(UsageError, match="8256"):
        CachedDecoder(model, slots=1, length=8256)
    inkling = transformers.InklingTextConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with pytest.raises(UsageError, match=r"InklingForCausalLM .*64"):
        CachedDecoder(transformers.AutoModelForCausalLM.from_config(inkling), slots=1, length=64)


def test_caches_that_do_not_fit_are_refused_before_they_are_made() -> None:
    wrapped = CachedDecoder(decoder("llama"), slots=3, length=128).eval()
    graph = capture(wrapped, (), wrapped.example(3, 32), dynamic=wrapped.dynamic, largest=wrapped.largest)
    program = divide(graph, [])[0]
    states = tuple(
        replace(state, value=replace(state.value, shape=(2**18, 2**12, 2, 12))) if state.kind == "cache" else state
        for state in program.states
    )
    forged = read_program(write_program(replace(program, states=states)))
    tensors = {state.value.name: torch.zeros(state.value.evaluate({})) for state in states_of([forged])}
    with pytest.raises(OutOfMemory, match="fewer slots"):
        Runtime(forged, tensors)


def test_another_thread_keeps_its_masks() -> None:
    other = decoder("mistral")
    ids = torch.tensor(prompts(40))
    wanted = other(ids).logits
    found: list[torch.Tensor] = []
    with masks_by(lambda _: torch.zeros(1, 1, 40, 40, dtype=torch.bool)):
        assert not torch.equal(other(ids).logits, wanted)
        thread = threading.Thread(target=lambda: found.append(other(ids).logits))
        thread.start()
        thread.join()
    assert torch.equal(found[0], wanted)
    assert torch.equal(other(ids).logits, wanted)


def test_a_mask_has_the_rows_own_positions() -> None:
    def near(_row: object, _head: object, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (keys <= queries) & (keys > queries - 2)

    mask = mask_of_rows(near, torch.tensor([[2, 3], [0, 1]]), torch.arange(4))
    assert mask.shape == (2, 1, 2, 4)
    assert mask[:, 0].int().tolist() == [[[0, 1, 1, 0], [0, 0, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]]
    assert is_causal(near)
    assert not is_causal(lambda _row, _head, queries, keys: (queries >= 0) & (keys >= 0))
    assert not sees_everything(near)
    assert sees_everything(lambda _row, _head, queries, keys: keys <= queries)
