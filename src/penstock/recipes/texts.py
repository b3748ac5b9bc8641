"""Text from a language model: answers to a file of prompts, in order, or a conversation."""

import contextlib
import inspect
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import msgspec

from penstock.errors import DataError, ModelError, UsageError
from penstock.generate.generator import Generator
from penstock.generate.request import Request
from penstock.generate.sampling import ends_of
from penstock.group.world import World
from penstock.recipes.predictions import PredictionFile, go_on_with
from penstock.spec.settings import LanguageSettings, TextSettings
from penstock.text import note, one_line
from penstock.zoo.models.language import load_generation_config, load_tokenizer, turn_ends
from penstock.zoo.models.models import load_model
from penstock.zoo.weights.weights import fingerprint_of

_UNANSWERED = "error: "  # begins the `finish_reason` of a prompt without an answer
_COLUMNS = ("prompt", "text", "finish_reason", "num_tokens", "logprob")


def open_generator(settings: LanguageSettings, world: World | None = None, *, chats: bool = False) -> Generator:
    """Load a language model and its tokenizer, and deploy its stages.

    Raises `ModelError` if there is no tokenizer next to the model, and as `Generator` does.
    """
    tokenizer = load_tokenizer(settings.model, pretrained=settings.pretrained)
    if chats:
        check_chats(tokenizer)
    zoo = load_model(settings.model, weights=settings.weights, pretrained=settings.pretrained, head="language")
    vocabulary = zoo.module.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    if len(tokenizer) > vocabulary:
        raise ModelError(
            f"the tokenizer next to {settings.model} has {len(tokenizer)} tokens, but the model {vocabulary}: it is of "
            "another model"
        )
    own: Any = load_generation_config(settings.model, pretrained=settings.pretrained) or zoo.module.generation_config
    if (own.num_beams or 1) > 1:
        note(f"{settings.model} is meant for {own.num_beams} beams; tokens are the likeliest or sampled instead")
        own.num_beams = 1
    zoo.module.generation_config = own
    return Generator(
        zoo.module, tokenizer, weights=zoo.weights, stages=settings.stages, cuts=settings.cuts,
        plan=settings.plan, slots=settings.slots, max_length=settings.max_length, threads=settings.threads, world=world,
        device=settings.device, runtime=settings.runtime, on_loss=settings.on_loss or "stop",
        trace=getattr(settings, "trace", None), speculate=settings.speculate, cache_dtype=settings.cache_dtype,
    )  # fmt: skip


def answer_ends(generator: Generator, model: str) -> list[int]:
    """Return the tokens that end an answer of a chat or a server: the model's, its tokenizer's and its GGUF file's."""
    return sorted({*ends_of(generator.model.generation_config), *turn_ends(model, generator.tokenizer)})


def read_prompts(path: Path) -> list[str]:
    """Read prompts, one per line; from .jsonl and .ndjson the field `prompt` of each line, from .json a list of these.

    Only line feeds, with or without a carriage return, end a line: other separators belong to the prompt, as `generate
    -o` writes them. Raises `DataError`.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); give a file with a prompt in each line") from None
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix.lower() not in {".jsonl", ".ndjson", ".json"}:
        return [line for _, line in lines]
    if path.suffix.lower() == ".json" and text.lstrip().startswith("["):
        rows = enumerate(_json(text, f"{path}") or [], 1)
        return [_prompt(row, f"entry {number} of {path}") for number, row in rows]
    return [_prompt(_json(line, place := f"line {number} of {path}"), place) for number, line in lines]


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f'{place} is not JSON; write {{"prompt": "..."}} in each line') from None


def _prompt(row: Any, place: str) -> str:
    found = row.get("prompt") if isinstance(row, dict) else row
    if not isinstance(found, str):
        raise DataError(f'{place} has no text as "prompt"; write {{"prompt": "..."}}')
    return found


def answer_prompts(generator: Generator, prompts: Sequence[str], settings: TextSettings) -> dict[str, Any]:
    """Answer prompts in order, many at a time, and write a row for each; returns counts and tokens per second.

    The row of a prompt that cannot be answered, such as one that is too long, has the reason as its `finish_reason`.
    Existing rows in its `output` are kept if they answer these prompts with the same settings; raises `UsageError` if
    they do not.
    """
    began_s = perf_counter()
    rows: list[dict[str, Any]] = []
    with open_answers(generator, prompts, settings) as file:
        before = file.done if file is not None else []
        for number, request in _in_flight(generator, prompts, len(before), settings):
            rows.append(dict(zip(_COLUMNS, (prompts[number], *_answer(request)), strict=True)))
            if file is not None:
                file.write(rows[-1])
    taken_s, tokens = perf_counter() - began_s, sum(row["num_tokens"] for row in rows)
    unanswered = [
        {"prompt": number, "reason": str(row["finish_reason"]).removeprefix(_UNANSWERED)}
        for number, row in enumerate([*before, *rows], 1)
        if str(row.get("finish_reason")).startswith(_UNANSWERED)
    ]
    return {
        "num_prompts": len(prompts),
        "resumed_after": len(before),
        "num_tokens": tokens,
        "seconds": round(taken_s, 3),
        "tokens_per_s": round(tokens / taken_s, 2),
        "unanswered": unanswered,
        "rows": rows,
    }


def _answer(request: Request | UsageError) -> tuple[str, str | None, int, float]:
    """Return the columns of an answer after its prompt."""
    if isinstance(request, UsageError):
        return "", f"{_UNANSWERED}{request}", 0, 0.0
    answer, decoder = request.result(), request.decoder()
    text = "".join([*map(decoder.add, answer), decoder.end()])
    return text, request.finish_reason, len(answer), sum(request.logprobs)


class AnswerRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that determine a file's answers, saved as FILE.run.json and compared on resume."""

    format: Literal["penstock-answers"] = "penstock-answers"
    model: str
    weights: str
    runtime: str = "eager"
    sampling: dict[str, Any]
    seed: int | None


@contextlib.contextmanager
def open_answers(
    generator: Generator, prompts: Sequence[str], settings: TextSettings
) -> Iterator[PredictionFile | None]:
    """Open a file of answers for appending; raises `UsageError` if its rows do not match."""
    if settings.output is None:
        yield None
        return
    output = Path(settings.output)
    about = AnswerRun(
        model=settings.model,
        weights=fingerprint_of(generator.weights),
        runtime=settings.runtime,
        sampling=settings.sampling,
        seed=settings.seed,
    )
    anew = "choose another --output"
    with PredictionFile(
        output, resume=True, columns=_COLUMNS, needed=_COLUMNS, again="run the same again", anew=anew
    ) as file:
        if [row["prompt"] for row in file.done] != list(prompts[: len(file.done)]):
            raise UsageError(f"{output} has rows that do not answer these prompts; {anew}")
        go_on_with(file, about)
        yield file


def _in_flight(
    generator: Generator, prompts: Sequence[str], done: int, settings: TextSettings
) -> Iterator[tuple[int, Request | UsageError]]:
    """Yield requests in order, submitting ahead: enough to fill every slot, but not a whole file.

    Instead of a request that is refused yields its error.
    """
    ahead: deque[tuple[int, Request | UsageError]] = deque()
    for number, prompt in enumerate(prompts[done:], done):
        seed = None if settings.seed is None else settings.seed + number
        try:
            ahead.append((number, generator.submit(prompt, seed=seed, **settings.sampling)))
        except UsageError as error:
            ahead.append((number, error))
        if len(ahead) > 2 * generator.num_slots:
            yield ahead.popleft()
    yield from ahead


def check_chats(tokenizer: Any) -> None:
    """Raise `ModelError` if the tokenizer has no chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ModelError("this model's tokenizer has no chat template; use penstock generate, or an instruct model")


def chat_tokens(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    *,
    begins: bool = True,
    continues: bool = False,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens of messages in the model's own template, up to the beginning of its answer.

    With `continues` the answer continues the last message; without `begins` the template's beginning of an answer is
    left out. `options` are variables of the template.

    Example:
        tokens = chat_tokens(tokenizer, [{"role": "user", "content": "What is a penstock?"}])

    Raises `ModelError` if there is no template, and `DataError` for messages or options that it does not take.
    """
    check_chats(tokenizer)
    options = options or {}
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    if wrong := sorted(own.keys() & options.keys()):
        raise DataError(f"{wrong[0]} is no variable of a template; remove it from chat_template_kwargs")
    try:
        found = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=begins, continue_final_message=continues, return_dict=True, **options
        )
    except Exception as problem:  # a template is a program that may raise any exception
        raise DataError(f"the model's template does not take these messages ({one_line(problem)})") from problem
    return list(found["input_ids"])


class Conversation:
    """A conversation in the model's own template.

    Example:
        for text in Conversation(generator).ask("What is a penstock?"):
            print(text, end="")

    Raises `ModelError` for a tokenizer without a chat template.
    """

    def __init__(self, generator: Generator, system: str | None = None, **sampling: Any) -> None:
        check_chats(generator.tokenizer)
        self._generator, self._sampling = generator, sampling
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer as it is generated, and add it to the conversation."""
        self.messages.append({"role": "user", "content": text})
        tokens = chat_tokens(self._generator.tokenizer, self.messages)
        answer = ""
        try:
            for part in self._generator.stream(tokens, **self._sampling):
                answer += part
                yield part
        except UsageError:
            self.messages.pop()  # the conversation continues without this message
            raise
        self.messages.append({"role": "assistant", "content": answer})
