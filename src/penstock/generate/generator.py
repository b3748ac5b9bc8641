"""`penstock.Generator`: a language model in stages that answers many requests at a time."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from penstock.deploy.run_options import CutOptions, ModelCall, OnLoss, RunOptions, Trace
from penstock.errors import RunError, UsageError
from penstock.generate.cached_decoder import chunk_on, decoder_call
from penstock.generate.lanes import Lanes
from penstock.generate.loop import GenerationLoop
from penstock.generate.request import Request, TextDecoder
from penstock.generate.sampling import (
    LogitBias,
    Penalties,
    Processor,
    Sampler,
    ends_of,
    most_tokens,
    read_config,
    start_of,
)
from penstock.group.entry import under_torchrun
from penstock.group.world import World
from penstock.plan.check import read_plan
from penstock.runtime.registry import RUNTIMES, parse_runtime
from penstock.spec.plan import CacheDtype, Generation, Plan, num_lanes
from penstock.stream.streaming_pipeline import StreamingPipeline
from penstock.tensors import find_device
from penstock.zoo.weights.weights import ModuleWeights, Weights

SLOTS, MAX_LENGTH = 4, 512


class Generator:
    """A language model of transformers, cut into stages, that generates text for many requests at a time.

    Each stage holds the keys and values, or other states, of its own layers. A lane is a group of `slots` sequences
    that are decoded together. With several stages there is by default one lane more than stages: requests fill one lane
    per stage first, then the extra lane, which occupies the stage that would otherwise wait for sampled tokens. Further
    requests wait for a free slot. A `plan`, or its file, sets stages, slots, lanes and length. With one thread per
    stage, a request gets the same tokens regardless of other requests and of how the model is cut.

    Example:
        with penstock.Generator(model, tokenizer, stages=2) as generator:
            output = generator.generate(input_ids, max_new_tokens=20)       # as model.generate
            for text in generator.stream("Once upon a time"):
                print(text, end="")

    `max_length` is the maximum number of tokens of prompt plus answer; for encoder-decoders, of the prompt and of the
    answer separately. With more than one thread per stage, the last bits of a row depend on its position in the batch,
    so tokens may depend on the other requests in flight. With `on_loss="continue"` a lost machine only pauses
    generation: the survivors take over its stages, and requests in flight are replayed in the same shapes, so that
    their tokens stay the same. Idle stages run draft tokens, guessed from repetitions in the sequence (speculative
    decoding); `speculate=False` turns this off. With a `cache_dtype` of `float16`, `bfloat16` or `int8`, keys and
    values take less memory, and answers differ in their last bits or more from those of `model.generate`. With
    `trace`, a folder for `penstock report` is written at the end. Options that are not listed here are those of
    `penstock.Pipeline`. Under torchrun rank 0 samples and, unless a plan says otherwise, also holds the last stage;
    the other ranks hold the other stages. Otherwise local workers hold the stages, and this process only samples; a
    single stage is held in this process, unless `on_loss` is "continue".

    Raises `UsageError` for a model whose state is not in transformers' cache, and the errors of `penstock.Pipeline`.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, stages: int | None = None, slots: int | None = None,
        lanes: int | None = None, max_length: int | None = None,
        cuts: str | Sequence[str] | None = None, plan: Plan | str | os.PathLike[str] | None = None,
        threads: int = 1, device: str | torch.device = "cpu", runtime: str = "eager", weights: Weights | None = None,
        world: World | None = None, on_loss: str = "stop", speculate: bool = True, trace: str | Path | None = None,
        cache_dtype: CacheDtype | None = None,
    ) -> None:  # fmt: skip
        if cache_dtype not in {None, *get_args(CacheDtype)}:
            raise UsageError(f"cache_dtype must be one of {', '.join(get_args(CacheDtype))}; got {cache_dtype!r}")
        for name, value, least in (("slots", slots, 1), ("lanes", lanes, 1), ("max_length", max_length, 2)):
            if value is not None and value < least:
                raise UsageError(f"{name} must be at least {least}, not {value}")
        chosen = parse_runtime(runtime)
        model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
        self.model: Any = model
        self._weights = weights
        self.tokenizer = tokenizer
        plan = read_plan(plan) if isinstance(plan, (str, os.PathLike)) else plan
        cut = CutOptions(stages=stages, cuts=cuts, plan=plan)
        if plan is not None:
            caches, count = _caches_of(plan, slots, lanes, max_length, cache_dtype), len(plan.pipelines[0].stages)
        else:
            count = cut.count(_num_devices(world))
            cut = replace(cut, stages=count)
            caches = Generation(
                slots=slots or SLOTS,
                lanes=lanes or num_lanes(count),
                max_length=max_length or MAX_LENGTH,
                cache_dtype=cache_dtype or "model",
                chunk=chunk_on(RUNTIMES[chosen.name].device or str(device), max_length or MAX_LENGTH),
            )
        self.max_length = caches.max_length
        self._num_slots = caches.slots * caches.lanes
        call = ModelCall(model=None)
        if model is not None:
            if weights is None and any(parameter.is_meta for parameter in model.parameters()):
                raise UsageError("the model's parameters have no values; load it with from_pretrained, or give weights")
            self.vocabulary = int(model.config.get_text_config().vocab_size)
            call = decoder_call(model, caches, weights)
        self.pipeline = StreamingPipeline(
            call,
            cut,
            RunOptions(
                threads=threads,
                device=str(device),
                runtime=chosen,
                trace=None if trace is None else Trace(trace),
                on_loss=OnLoss(on_loss),
            ),
            world,
            owns_world=world is None,
        )
        self.pipeline.model_name = type(model).__name__
        self._loop: GenerationLoop | None = None
        if self.pipeline.feeds:
            planned = Lanes(
                num_lanes=caches.lanes,
                num_used=min(count, caches.lanes),
                slots=caches.slots,
                chunk=caches.chunk,
                longest=caches.max_length,
                recurrent=getattr(call.model, "recurrent", False),
            )
            place = find_device(device, self.pipeline.deployment.world.position)
            self._loop = GenerationLoop(self.pipeline, planned, speculates=speculate and count > 1, device=place)

    @property
    def weights(self) -> Weights:
        """The source of the model's tensors."""
        return self._weights if self._weights is not None else ModuleWeights(self.model)

    @property
    def num_slots(self) -> int:
        """Largest number of sequences in flight."""
        return self._num_slots

    @property
    def num_guesses(self) -> tuple[int, int]:
        """Numbers of draft tokens and of accepted draft tokens."""
        return self._loop.num_guesses if self._loop is not None else (0, 0)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended all requests, if any."""
        return self._loop.failure if self._loop is not None else None

    @property
    def generates(self) -> bool:
        """True if this process samples tokens; False on ranks that only hold a stage."""
        return self._loop is not None

    def submit(
        self, prompt: Sequence[int] | str, *, generation_config: Any = None, seed: int | None = None,
        presence_penalty: float = 0.0, frequency_penalty: float = 0.0, logit_bias: Mapping[int, float] | None = None,
        logits_processor: Sequence[Processor] = (), num_likeliest: int = 0, score_prompt: bool = False,
        tokenizer: Any = None, **changes: Any,
    ) -> Request:  # fmt: skip
        """Submit a request, from any thread, and return it immediately; its tokens arrive while it is in flight.

        `prompt` is text or tokens. The penalties are those of OpenAI's protocol: `presence_penalty` is subtracted once
        from the score of each token already generated, `frequency_penalty` once per occurrence. `logit_bias` is added
        to the scores of tokens. `logits_processor` are called in the generator's thread with tokens [1, L] and scores
        [1, V], and return scores. `num_likeliest` is the number of likeliest tokens to record at each position, and
        `score_prompt` records the log-probabilities of the prompt's tokens. `tokenizer` is that of `stop_strings`,
        by default the generator's. Other options are transformers' own;
        without a limit, 20 new tokens are generated. Raises `UsageError` for an invalid prompt or option.

        Example:
            for token in generator.submit([5, 7, 2], max_new_tokens=10):
                ...
        """
        if self._loop is None:
            raise UsageError("call submit on rank 0; this rank only holds a stage")
        self.pipeline.check_settings()
        config = read_config(self.model, generation_config, changes)
        if (count := config.num_return_sequences or 1) > 1:
            raise UsageError(
                f"submit makes one sequence, not num_return_sequences={count}; use generate, or submit {count} times"
            )
        tokens = self._tokens(prompt)
        vocabulary = self.vocabulary
        wrong = [token for token in tokens if not 0 <= token < vocabulary]
        if not tokens or wrong:
            raise UsageError(
                f"a prompt must have at least one token, each from 0 to {vocabulary - 1}; got {wrong[:8] or 'none'}"
            )
        start = start_of(self.model, config)
        if start and (score_prompt or len(tokens) > self.max_length):
            raise UsageError(
                f"an encoder takes at most max_length={self.max_length} tokens and no score_prompt; got {len(tokens)} "
                f"tokens and score_prompt={score_prompt}"
            )
        most = most_tokens(len(start or tokens), config, self.max_length)
        tokenizer = tokenizer if tokenizer is not None else self.tokenizer
        if config.stop_strings and tokenizer is None:
            raise UsageError("stop_strings need a tokenizer; give the generator one")
        processors: list[Processor] = []
        if presence_penalty or frequency_penalty:
            processors.append(Penalties(len(start or tokens), presence=presence_penalty, frequency=frequency_penalty))
        if logit_bias:
            if outside := [token for token in logit_bias if not 0 <= token < vocabulary]:
                raise UsageError(f"keys of logit_bias must be tokens from 0 to {vocabulary - 1}; got {outside[0]}")
            processors.append(LogitBias(logit_bias))
        sampler = Sampler(
            config, num_prompt=len(start or tokens), most=most, seed=seed, processors=[*processors, *logits_processor]
        )
        request = Request(
            tokens,
            most,
            sampler,
            config,
            tokenizer=tokenizer,
            num_likeliest=num_likeliest,
            scored=score_prompt,
            start=start,
        )
        self._loop.take(request)
        return request

    def generate(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        generation_config: Any = None,
        streamer: Any = None,
        *,
        inputs: Any = None,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the tensor of `model.generate`: prompts and their answers [B, L], padded on the right.

        All rows are in flight together. `input_ids` (or `inputs`) are tokens [B, L] as a tensor, an array or lists.
        `attention_mask` is 0 at the padding of prompts; without it, as in transformers, padding are the tokens
        `pad_token_id` unless these also end a text. With `seed`, row `i` is sampled with the seed `seed + i`.
        `stop_strings` need a tokenizer: this one, or that of the generator.

        Example:
            tokens = generator.generate(prompts, max_new_tokens=20)

        Raises `UsageError`, naming the option, for options of `model.generate` that a generator does not support.
        """
        seed = kwargs.pop("seed", None)
        config = read_config(self.model, generation_config, kwargs)
        if (input_ids is None) == (inputs is None):
            raise UsageError("generate takes prompts as input_ids or as inputs, not both; give one of them")
        input_ids, shown = _padded(inputs if input_ids is None else input_ids, attention_mask, config)
        if streamer is not None and len(input_ids) > 1:
            raise UsageError(f"a streamer takes one prompt at a time, not {len(input_ids)}")
        count = config.num_return_sequences or 1
        config.num_return_sequences = 1  # of each request
        prompts = input_ids.repeat_interleave(count, 0)
        if config.max_new_tokens is None and config.max_length is not None:
            # max_length counts padding, which requests do not have
            config.max_new_tokens = config.max_length - (len(start_of(self.model, config)) or input_ids.shape[1])
        shown = shown.repeat_interleave(count, 0)
        requests: list[Request] = []
        try:
            for number, (row, seen) in enumerate(zip(prompts, shown, strict=True)):
                own = None if seed is None else seed + number
                requests.append(
                    self.submit(row[seen].tolist(), generation_config=config, seed=own, tokenizer=tokenizer)
                )
            if streamer is not None:
                streamer.put(input_ids)
                for token in requests[0]:
                    streamer.put(torch.tensor([token]))
                streamer.end()
            answers = [request.result() for request in requests]
        finally:
            for request in requests:  # if a request was rejected, or the caller was interrupted
                request.cancel()
        fill = config.pad_token_id if config.pad_token_id is not None else next(iter(ends_of(config)), 0)
        longest = max(map(len, answers))
        filled = torch.tensor([answer + [fill] * (longest - len(answer)) for answer in answers])
        # an encoder's prompt is not part of the result, which begins with the decoder's first tokens
        before = torch.tensor([request.start for request in requests]) if requests[0].start else prompts
        return torch.cat([before, filled.to(before)], 1)

    def stream(self, prompt: Sequence[int] | str, **kwargs: Any) -> Iterator[str]:
        """Yield the answer's text as it is generated, up to a stop string; `kwargs` are those of `submit`.

        The text continues a prompt of text, with the space between them; after a prompt of tokens it is a new text.

        Example:
            for text in generator.stream("The capital of France is", max_new_tokens=12):
                print(text, end="", flush=True)

        Raises `UsageError` without a tokenizer, and the errors of `submit`.
        """
        if self.tokenizer is None:
            raise UsageError("text needs a tokenizer; give the generator one, or use submit for tokens")
        if not {"max_new_tokens", "max_length", "generation_config"} & kwargs.keys():
            kwargs["max_length"] = self.max_length
        request = self.submit(prompt, **kwargs)
        return self._texts(request, request.decoder(continues=isinstance(prompt, str)))

    def _texts(self, request: Request, decoder: TextDecoder) -> Iterator[str]:
        try:
            for token in request:
                if text := decoder.add(token):
                    yield text
            if text := decoder.end():
                yield text
        finally:
            request.cancel()

    def close(self) -> None:
        """Finish requests in flight, fail waiting ones, and stop the stages."""
        if self._loop is not None:
            self._loop.end()
        self.pipeline.close()

    def __enter__(self) -> "Generator":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, GeneratorExit):
            self.close()
            return
        if self._loop is not None:
            self._loop.fail(RunError(f"the generator was closed by an error: {error}"))
        self.pipeline.end(error)
        if self._loop is not None:
            self._loop.end()

    def _tokens(self, prompt: Sequence[int] | str) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise UsageError(
                "a prompt of text needs a tokenizer; create the generator with one, or give the prompt as tokens"
            )
        return list(self.tokenizer(prompt)["input_ids"])


def _padded(given: Any, attention_mask: Any, config: Any) -> tuple[Tensor, Tensor]:
    """Return prompts [B, L] and a mask that is False at padding; raises `UsageError` if shapes differ."""
    tokens = torch.as_tensor(given)
    shown = torch.ones_like(tokens) if attention_mask is None else torch.as_tensor(attention_mask)
    if attention_mask is None and config.pad_token_id is not None and config.pad_token_id not in ends_of(config):
        shown = tokens.ne(config.pad_token_id)
    if tokens.dim() != 2 or shown.shape != tokens.shape:
        raise UsageError(
            f"input_ids and attention_mask must have the same shape [B, L]; got {list(tokens.shape)} and "
            f"{None if attention_mask is None else list(shown.shape)}"
        )
    return tokens, shown.bool()


def _caches_of(
    plan: Plan, slots: int | None, lanes: int | None, max_length: int | None, cache_dtype: CacheDtype | None
) -> Generation:
    """Return the caches that a plan was made for; raises `UsageError` if the arguments differ from them."""
    caches = plan.generation
    if caches is None:
        raise UsageError("this plan has no slots and lanes; profile the model with --generate, and plan again")
    for name, asked in (("slots", slots), ("lanes", lanes), ("max_length", max_length), ("cache_dtype", cache_dtype)):
        if asked not in {None, getattr(caches, name)}:
            raise UsageError(f"the plan was made for {name}={getattr(caches, name)}; leave {name} out, or plan again")
    return caches


def _num_devices(world: World | None) -> int:
    if world is not None:
        return len(world.devices)
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else 2
