"""Texts from a language model: a file of prompts answered in order, or a conversation."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from penstock.errors import DataError, ModelError, UsageError
from penstock.generate.generator import Generator
from penstock.generate.request import Request
from penstock.group.world import World
from penstock.zoo.models.language import load_generation_config, load_tokenizer
from penstock.zoo.models.models import load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """What a model is asked to write, and how it is cut; `sampling` are options of `Generator.submit`."""

    model: str
    stages: int | None = None
    policy: str = "balanced"
    cuts: Sequence[str] | None = None
    slots: int = 4
    max_length: int = 512
    threads: int = 1
    runtime: str = "eager"
    weights: Path | None = None
    pretrained: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    on_loss: str = "stop"


def open_generator(settings: TextSettings, world: World | None = None) -> Generator:
    """Load a language model and its tokenizer, and put its stages in place.

    Raises `ModelError` for a model without a tokenizer beside it, and what `Generator` raises.
    """
    tokenizer = load_tokenizer(settings.model, pretrained=settings.pretrained)
    zoo = load_model(
        settings.model, weights=settings.weights, pretrained=settings.pretrained, head="language"
    )  # fmt: skip
    vocabulary = zoo.module.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    if len(tokenizer) > vocabulary:
        raise ModelError(
            f"the tokenizer beside {settings.model} has {len(tokenizer)} tokens, and the model {vocabulary}: it is of "
            "another model"
        )
    zoo.module.generation_config = (
        load_generation_config(settings.model, pretrained=settings.pretrained) or zoo.module.generation_config
    )
    return Generator(
        zoo.module, tokenizer, weights=zoo.weights, stages=settings.stages, policy=settings.policy, cuts=settings.cuts,
        slots=settings.slots, max_length=settings.max_length, threads=settings.threads, runtime=settings.runtime,
        world=world, on_loss=settings.on_loss,
    )  # fmt: skip


def read_prompts(path: Path) -> list[str]:
    """Read prompts: a line each, or JSON lines with the field `prompt`; raises `DataError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); give a file with a prompt in each line") from None
    if path.suffix != ".jsonl":
        return [line for line in lines if line.strip()]
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompts.append(json.loads(line)["prompt"])
        except (ValueError, LookupError, TypeError):
            raise DataError(f'line {number} of {path} is not JSON with a "prompt"; write {{"prompt": "..."}}') from None
        if not isinstance(prompts[-1], str):
            raise DataError(f"the prompt in line {number} of {path} is not text")
    return prompts


def answer_prompts(
    generator: Generator, prompts: Sequence[str], settings: TextSettings, output: Path | None,
    tell: Callable[[int, int], None] = lambda _done, _all: None,
) -> dict[str, Any]:  # fmt: skip
    """Answer prompts in order, many at a time, and write a JSON line for each; returns counts and tokens per second.

    Lines that are in `output` already are kept, if their prompts are these. Raises `UsageError` if they are not, and
    `DataError` naming the prompt that cannot be answered.
    """
    done = _answered(output, prompts)
    began_s, tokens = perf_counter(), 0
    rows: list[dict[str, Any]] = []
    for number, request in _in_flight(generator, prompts, done, settings):
        answer = request.result()
        text = generator.tokenizer.decode(answer, skip_special_tokens=True)
        row = {"prompt": prompts[number], "text": text, "finish_reason": request.finish_reason,
               "num_tokens": len(answer), "logprob": sum(request.logprobs)}  # fmt: skip
        rows.append(row)
        tokens += len(answer)
        if output is not None:
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        tell(number + 1, len(prompts))
    taken_s = perf_counter() - began_s
    return {"num_prompts": len(prompts), "resumed_after": done, "num_tokens": tokens, "seconds": round(taken_s, 3),
            "tokens_per_s": round(tokens / taken_s, 2), "rows": rows}  # fmt: skip


def _in_flight(
    generator: Generator, prompts: Sequence[str], done: int, settings: TextSettings
) -> Iterator[tuple[int, Request]]:
    """Hand requests in ahead of the one whose answer is taken: enough to fill every slot, not a whole file."""
    ahead: deque[tuple[int, Request]] = deque()
    for number, prompt in enumerate(prompts[done:], done):
        seed = None if settings.seed is None else settings.seed + number
        try:
            ahead.append((number, generator.submit(prompt, seed=seed, **settings.sampling)))
        except UsageError as error:
            raise DataError(f"prompt {number + 1} cannot be answered: {error}") from error
        if len(ahead) > 2 * generator.num_slots:
            yield ahead.popleft()
    yield from ahead


def _answered(output: Path | None, prompts: Sequence[str]) -> int:
    """Return how many prompts an output has the answers of; raises `UsageError` where they are others."""
    if output is None or not output.exists():
        return 0
    lines = output.read_text(encoding="utf-8").split("\n")
    whole = lines[:-1]
    try:
        there = [json.loads(line)["prompt"] for line in whole]
    except (ValueError, LookupError, TypeError):
        there = None
    if there is None or there != list(prompts[: len(there)]):
        raise UsageError(f"{output} has other rows than answers to these prompts; choose another --output")
    if lines[-1]:  # a row that was cut off
        output.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")
    return len(there)


class Conversation:
    """Messages back and forth, in the model's own template.

    Example:
        for text in Conversation(generator).ask("What is a penstock?"):
            print(text, end="")

    Raises `ModelError` for a tokenizer without a chat template.
    """

    def __init__(self, generator: Generator, system: str | None = None, **sampling: Any) -> None:
        if getattr(generator.tokenizer, "chat_template", None) is None:
            raise ModelError("this model's tokenizer has no chat template; use penstock generate, or an instruct model")
        self._generator, self._sampling = generator, sampling
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer as it comes; it is part of the conversation from then on."""
        self.messages.append({"role": "user", "content": text})
        tokens = self._generator.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        answer = ""
        try:
            for part in self._generator.stream(tokens, **self._sampling):
                answer += part
                yield part
        except UsageError:
            self.messages.pop()  # the conversation goes on without it
            raise
        self.messages.append({"role": "assistant", "content": answer})
