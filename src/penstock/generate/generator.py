"""`penstock.Generator`: a language model in stages that answers many requests at a time."""

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.deploy.deployment import Deployment
from penstock.deploy.run_options import CutOptions, ModelCall, RunOptions, SurvivalOptions
from penstock.engine.driver import Driver, finish_stream, open_stream
from penstock.errors import DeviceLost, OutOfMemory, PenstockError, RunError, UsageError
from penstock.generate.cached_decoder import DYNAMIC, CachedDecoder
from penstock.generate.lanes import CHUNKS, Lanes, SequenceState, Step
from penstock.generate.request import Request
from penstock.generate.sampling import Sampler, read_config
from penstock.graph.call import bind_inputs, build_output
from penstock.group.entry import under_torchrun
from penstock.group.world import World
from penstock.runtime.registry import parse_runtime
from penstock.stream.streaming_pipeline import StreamingPipeline
from penstock.stream.survival import SurvivingStages
from penstock.zoo.weights.weights import Weights

_NEW_TOKENS = 20  # transformers' own, where nothing is said


class Generator:
    """A language model of transformers, cut into stages, that generates text for many requests at a time.

    Each stage keeps the keys and values of its own layers. `slots` sequences step together, in each of `lanes` (one
    more than there are stages, so that all of these are busy), and others wait their turn. A request gets the same
    tokens whatever else is served and however the model is cut.

    Example:
        with penstock.Generator(model, tokenizer, stages=2) as generator:
            output = generator.generate(input_ids, max_new_tokens=20)       # as model.generate
            for text in generator.stream("Once upon a time"):
                print(text, end="")

    `max_length` is the most tokens of a sequence, prompt and answer. With more than one thread for each stage, the last
    bits of a row depend on its place among the rows, and so may a token on the request's company. With
    `on_loss="continue"` a lost machine is a pause: the stages move to the others, what is in flight is fed again in the
    same shapes, and goes on with the same bits. Options that are not listed here are those of `penstock.Pipeline`.
    Under torchrun the first process generates and the others hold stages.

    Raises `UsageError` for a model that keeps something else than keys and values, and what `penstock.Pipeline` raises.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, stages: int | None = None, slots: int = 4,
        lanes: int | None = None, max_length: int = 512, policy: str = "balanced", cuts: Sequence[str] | None = None,
        threads: int = 1, runtime: str = "eager", weights: Weights | None = None, world: World | None = None,
        on_loss: str = "stop",
    ) -> None:  # fmt: skip
        for name, value in {"slots": slots, "lanes": lanes or 1, "max_length": max_length - 1}.items():
            if value < 1:
                raise UsageError(f"{name} must be at least {2 if name == 'max_length' else 1}, not {value}")
        self.model: Any = model
        self.tokenizer = tokenizer
        self._max_length = max_length
        self._condition = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._requests: dict[SequenceState, Request] = {}
        self._closing = False
        self._failure: BaseException | None = None
        count = stages or _num_devices(world)
        num_lanes = lanes or (count + 1 if count > 1 else 1)
        self._num_slots = slots * num_lanes
        call = ModelCall(model=None)
        if model is not None:
            if weights is None and any(parameter.is_meta for parameter in model.parameters()):
                raise UsageError("the model's parameters have no values; load it with from_pretrained, or give weights")
            self._vocabulary = int(model.config.get_text_config().vocab_size)
            decoder = CachedDecoder(model, slots=self._num_slots, length=max_length).eval()
            call = ModelCall(
                model=decoder, kwargs=decoder.example(slots, CHUNKS[-1]), dynamic=DYNAMIC,
                weights=None if weights is None else _OfDecoder(weights),
            )  # fmt: skip
        self._pipeline = StreamingPipeline(
            call, CutOptions(stages=count if cuts is None else None, policy=policy, cuts=cuts),
            RunOptions(threads=threads, runtime=parse_runtime(runtime), survival=SurvivalOptions(on_loss=on_loss)),
            world, owns_world=world is None,
        )  # fmt: skip
        self._thread: threading.Thread | None = None
        if self._pipeline.feeds:
            self._graph = self._pipeline.graph
            self._lanes = Lanes(num_lanes=num_lanes, num_used=min(count, num_lanes), slots=slots)
            driver = open_stream(self._deployment.place)
            self._thread = threading.Thread(target=self._run, args=(driver,), name="penstock-generator", daemon=True)
            self._thread.start()

    @property
    def num_slots(self) -> int:
        """Return how many sequences are in flight at most."""
        return self._num_slots

    @property
    def generates(self) -> bool:
        """Return whether this process generates; the others of a run hold stages."""
        return self._thread is not None

    def submit(
        self, prompt: Sequence[int] | str, *, generation_config: Any = None, seed: int | None = None, **changes: Any
    ) -> Request:
        """Hand in a request, from any thread; its tokens come while it is in flight.

        `prompt` is text or tokens. Raises `UsageError` for what cannot be generated.

        Example:
            for token in generator.submit([5, 7, 2], max_new_tokens=10):
                ...
        """
        if self._thread is None:
            raise UsageError("this process holds a stage; generate in the first one")
        config = read_config(self.model, generation_config, changes)
        tokens = self._tokens(prompt)
        vocabulary = self._vocabulary
        if not tokens or not all(0 <= token < vocabulary for token in tokens):
            raise UsageError(f"a prompt is tokens from 0 to {vocabulary - 1}, at least one; got {tokens[:8]}")
        most = self._most_tokens(len(tokens), config)
        if config.stop_strings and self.tokenizer is None:
            raise UsageError("stop_strings are looked for in text; give the generator a tokenizer")
        request = Request(
            tokens, most, Sampler(config, num_prompt=len(tokens), seed=seed), config,
            self.tokenizer if config.stop_strings else None,
        )  # fmt: skip
        with self._condition:
            self._check()
            self._waiting.append(request)
            self._condition.notify_all()
        return request

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, generation_config: Any = None,
        streamer: Any = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Generate as `model.generate` does, and return the same: prompts and answers [B, L], filled up on the right.

        Rows are in flight together. Padding of prompts is what `attention_mask` hides. `seed=` gives each row random
        numbers of its own, from `seed` and its number. Raises `UsageError` for what `model.generate` does and this does
        not, by name.
        """
        seed = kwargs.pop("seed", None)
        config = read_config(self.model, generation_config, kwargs)
        if input_ids.dim() != 2 or (attention_mask is not None and attention_mask.shape != input_ids.shape):
            raise UsageError(f"input_ids and attention_mask are [B, L] alike; got {list(input_ids.shape)}")
        if streamer is not None and len(input_ids) > 1:
            raise UsageError(f"a streamer takes one prompt at a time, not {len(input_ids)}")
        prompts = input_ids.repeat_interleave(config.num_return_sequences or 1, 0)
        if config.max_new_tokens is None and config.max_length is not None:
            # it counts padding, which requests do not have
            config.max_new_tokens = config.max_length - input_ids.shape[1]
        shown = attention_mask if attention_mask is not None else torch.ones_like(input_ids)
        shown = shown.repeat_interleave(config.num_return_sequences or 1, 0).bool()
        requests: list[Request] = []
        try:
            for number, (row, seen) in enumerate(zip(prompts, shown, strict=True)):
                own = None if seed is None else seed + number
                requests.append(self.submit(row[seen].tolist(), generation_config=config, seed=own))
            if streamer is not None:
                streamer.put(input_ids)
                for token in requests[0]:
                    streamer.put(torch.tensor([token]))
                streamer.end()
            answers = [request.result() for request in requests]
        finally:
            for request in requests:  # where one could not be taken, or the caller is interrupted
                request.cancel()
        ends = config.eos_token_id if isinstance(config.eos_token_id, int) else (config.eos_token_id or [0])[0]
        fill = config.pad_token_id if config.pad_token_id is not None else ends
        longest = max(map(len, answers))
        filled = torch.tensor([answer + [fill] * (longest - len(answer)) for answer in answers])
        return torch.cat([prompts, filled.to(prompts)], 1)

    def stream(self, prompt: Sequence[int] | str, **kwargs: Any) -> Iterator[str]:
        """Yield the answer's text as it comes; `kwargs` are those of `submit`. Needs a tokenizer."""
        if self.tokenizer is None:
            raise UsageError("text needs a tokenizer; give the generator one, or use submit for tokens")
        if not {"max_new_tokens", "max_length", "generation_config"} & kwargs.keys():
            kwargs["max_length"] = self._max_length
        request = self.submit(prompt, **kwargs)
        return self._texts(request)

    def _texts(self, request: Request) -> Iterator[str]:
        given = ""
        tokens: list[int] = []
        try:
            for token in request:
                tokens.append(token)
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                if not text.endswith("\ufffd"):  # the rest of a character is in the next token
                    yield text[len(given) :]
                    given = text
            yield self.tokenizer.decode(tokens, skip_special_tokens=True)[len(given) :]
        finally:
            request.cancel()

    def close(self) -> None:
        """Finish what is in flight, refuse what waits, and end the stages."""
        self._join()
        self._pipeline.close()

    def _join(self) -> None:
        """Have the thread end once nothing is in flight."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()  # each wait of its own has a deadline

    def __enter__(self) -> "Generator":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, GeneratorExit):
            self.close()
            return
        self._fail(RunError(f"the generator was closed by an error: {error}"))
        self._pipeline.end(error)
        self._join()

    def _tokens(self, prompt: Sequence[int] | str) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise UsageError("a prompt of text needs a tokenizer; give the generator one, or tokens")
        return list(self.tokenizer(prompt)["input_ids"])

    def _most_tokens(self, num_prompt: int, config: Any) -> int:
        """Return how many tokens may be generated; raises `UsageError` where they do not fit."""
        if config.max_new_tokens is not None:
            most = int(config.max_new_tokens)
        else:
            most = _NEW_TOKENS if config.max_length is None else int(config.max_length) - num_prompt
        if most < 1:
            raise UsageError(
                f"there is nothing to generate after {num_prompt} tokens with max_length={config.max_length}, "
                f"max_new_tokens={config.max_new_tokens}; give max_new_tokens=20"
            )
        if num_prompt + most > self._max_length:
            raise UsageError(
                f"a sequence of this generator has at most {self._max_length} tokens, but {num_prompt} of a prompt and "
                f"{most} new ones were asked for; make it with max_length={num_prompt + most}, or ask for fewer"
            )
        return most

    def _check(self) -> None:
        if self._failure is not None:
            raise RunError(f"the generator has ended: {self._failure}") from self._failure
        if self._closing:
            raise UsageError("the generator is closed; make a new one")

    @property
    def _deployment(self) -> Deployment:
        """Return the stages as they are in place now."""
        return self._pipeline.deployment.deployments[0]

    def _run(self, driver: Driver) -> None:
        """Feed microbatches and take their results, until the generator is closed; over a loss, if that was asked."""
        try:
            while True:
                try:
                    self._generate(driver)
                    return
                except (DeviceLost, OutOfMemory) as error:
                    stages = self._pipeline.deployment
                    if not isinstance(stages, SurvivingStages):
                        raise
                    stages.recover(error, len(self._requests))
                    self._lanes.begin_again()
                    driver = open_stream(self._deployment.place)
        except Exception as error:  # whoever waits for a token gets it
            self._fail(error)
            self._deployment.abandon()

    def _generate(self, driver: Driver) -> None:
        place = self._deployment.place
        # what is in the pipeline at a time: enough that no stage waits, and few enough that a new request need not
        most = 2 * len(place.job.ranks)
        in_flight: deque[tuple[Step, Mapping[str, int]]] = deque()
        while self._goes_on(in_flight):
            while driver.has_room and len(in_flight) < most and (step := self._lanes.next()) is not None:
                in_flight.append((step, self._feed(driver, step)))
                if driver.has_result:
                    break
            if in_flight:
                step, sizes = in_flight.popleft()
                logits: Tensor = build_output(self._graph, driver.take(), sizes)
                self._take(step, logits)
        finish_stream(place)

    def _goes_on(self, in_flight: Sequence[object]) -> bool:
        """Take requests in, and wait for one while there is nothing to do; False once all is done."""
        with self._condition:
            while True:
                for sequence, request in list(self._requests.items()):
                    if request.cancelled and not sequence.waits:
                        self._end(sequence, "cancelled")
                while self._waiting and self._lanes.has_room and not self._closing:
                    request = self._waiting.popleft()
                    if request.cancelled:
                        request.finish("cancelled")
                        continue
                    sequence = SequenceState(list(request.prompt), len(request.prompt))
                    self._lanes.admit(sequence)
                    self._requests[sequence] = request
                if self._closing:
                    while self._waiting:
                        self._waiting.popleft().fail(UsageError("the generator was closed before this request began"))
                if in_flight or self._requests:
                    return True
                if self._closing:
                    return False
                self._condition.wait()

    def _feed(self, driver: Driver, step: Step) -> Mapping[str, int]:
        tensors, sizes = bind_inputs(
            self._graph, (),
            {
                "ids": torch.tensor(step.ids), "positions": torch.tensor(step.positions),
                "rows": torch.tensor(step.rows), "last": torch.tensor([step.last]), "places": torch.arange(step.room),
            },
        )  # fmt: skip
        driver.feed(tensors, [sizes[symbol] for symbol in self._deployment.symbols])
        return sizes

    def _take(self, step: Step, logits: Tensor) -> None:
        """Sample for every row that is waited for."""
        self._lanes.took(step)
        for row, sequence in step.sampled:
            request = self._requests[sequence]
            if request.cancelled:
                self._end(sequence, "cancelled")
                continue
            try:
                token, logprob = request.sample(sequence.tokens, logits[row])
            except Exception as error:  # one request's own: the others go on
                failed = error if isinstance(error, PenstockError) else RunError(f"sampling failed: {error}")
                self._end(sequence, "failed")
                request.fail(failed)
                continue
            sequence.tokens.append(token)
            if (reason := request.add(token, logprob)) is not None:
                self._end(sequence, reason)

    def _end(self, sequence: SequenceState, reason: str) -> None:
        self._lanes.release(sequence)
        self._requests.pop(sequence).finish(reason)

    def _fail(self, error: BaseException) -> None:
        with self._condition:
            self._failure = error
            waiting = [*self._requests.values(), *self._waiting]
            self._requests.clear()
            self._waiting.clear()
        for request in waiting:
            request.fail(error)


def _num_devices(world: World | None) -> int:
    if world is not None:
        return len(world.devices)
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else 2


class _OfDecoder:
    """A model's weights, under the names that they have in a `CachedDecoder`."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def names(self) -> list[str]:
        """Return every name that can be loaded."""
        return [f"model.{name}" for name in self._weights.names()]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without loading it."""
        return self._weights.shape(name.removeprefix("model."))

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype without loading it."""
        return self._weights.dtype(name.removeprefix("model."))

    def load(self, name: str) -> Tensor:
        """Return one tensor, fresh or memory-mapped."""
        return self._weights.load(name.removeprefix("model."))
