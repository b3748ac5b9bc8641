"""A body's parameters: sampling as options of `Generator.submit`, JSON by a schema, and fields that are not known."""

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import pydantic
import torch
from torch import Tensor

from penstock.errors import DataError
from penstock.generate.generator import Generator
from penstock.serve.protocol import ApiError, ChatBody, CompletionBody
from penstock.serve.trial import Trial
from penstock.text import note, one_line
from penstock.zoo.optional import optional_import

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's tokens for bytes of rare characters


class JsonGrammar:
    """A logits processor that allows only tokens that keep the output valid JSON for a schema, and ends with it.

    For one answer; others of the same schema take copies. Raises `DataError` if llguidance rejects the schema or the
    tokenizer.

    Example:
        generator.submit(prompt, logits_processor=[JsonGrammar(tokenizer, {"type": "object"})])
    """

    def __init__(self, tokenizer: Any, schema: Mapping[str, Any]) -> None:
        library = optional_import("llguidance", "serve")
        try:
            vocabulary = _vocabulary(tokenizer)
        except ValueError as error:
            raise DataError(f"JSON is not supported with this model's tokenizer ({one_line(error)})") from None
        grammar = library.LLMatcher.grammar_from_json_schema(json.dumps(dict(schema)))
        self._matcher = library.LLMatcher(vocabulary, grammar)
        if problem := self._matcher.get_error():
            raise DataError(f"the schema is not supported: {problem.splitlines()[0]}")

    def copy(self) -> "JsonGrammar":
        """Return the grammar at the beginning of another answer."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def __call__(self, _tokens: Tensor, scores: Tensor) -> Tensor:
        """Return scores [1, V] with minus infinity for all other tokens."""
        # 0 for tokens that are not allowed
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        forbidden = torch.ones(scores.shape[-1], dtype=torch.bool)
        forbidden[: len(allowed)] = ~allowed[: len(forbidden)]
        return scores.masked_fill(forbidden, -torch.inf)

    def ends(self, token: int) -> bool:
        """Consume a sampled token; True if none can follow it."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped())


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any) -> Any:
    return optional_import("llguidance.hf", "serve").from_tokenizer(tokenizer)


class TokenTexts:
    """Text and bytes of a tokenizer's single tokens, with the space that a token begins with.

    Example:
        TokenTexts(tokenizer).data(7)  # one byte, for a token that is a part of a character
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """Return a token's text after another token: the first one of a text may lose its space."""
        once, twice = self._tokenizer.decode([token]), self._tokenizer.decode([token, token])
        return str(twice[len(once) :] if twice.startswith(once) else once)

    def data(self, token: int) -> bytes:
        """Return a token's own bytes, which need not be whole characters."""
        word = self._tokenizer.convert_ids_to_tokens(token)
        if word is None or token in self._added:
            return self.text(token).encode()
        if self._bytes:
            return bytes(self._bytes[letter] for letter in word if letter in self._bytes)
        found = _BYTE.fullmatch(word)
        return bytes([int(found[1], 16)]) if found else self.text(token).encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.added_tokens_decoder)

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """The byte of each letter of a byte-level vocabulary; empty for others."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if "ByteLevel" not in str(getattr(backend, "decoder", None)):
            return {}
        letters = optional_import("transformers.convert_slow_tokenizer", "text").bytes_to_unicode()
        return {letter: byte for byte, letter in letters.items()}


_COLDEST = 1e-3  # below this temperature sampling is greedy anyway, and logits / temperature overflows


def submit_options(body: CompletionBody | ChatBody, generator: Generator, ends: Sequence[int]) -> dict[str, Any]:
    """Return the options of `Generator.submit` for all choices of a body; `ends` are the tokens that end an answer."""
    options = _sampling(body, generator.model.generation_config)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if stops := [stop for stop in stops if stop]:
        options["stop_strings"] = stops
    own = list(body.stop_token_ids or ())
    check_tokens(own, generator.vocabulary, "stop_token_ids")
    options["eos_token_id"] = [*([] if body.ignore_eos else ends), *own] or None
    if body.repetition_penalty is not None:
        options["repetition_penalty"] = body.repetition_penalty
    if body.min_tokens:
        options["min_new_tokens"] = body.min_tokens
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    check_tokens(bias, generator.vocabulary, "logit_bias")
    number = (body.logprobs if isinstance(body, CompletionBody) else body.top_logprobs) or 0
    return options | {
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "logit_bias": bias,
        "num_likeliest": number,
    }


def _sampling(body: CompletionBody | ChatBody, config: Any) -> dict[str, Any]:
    """Return how tokens are drawn: as the client asks, else as the model recommends."""
    own = config if config.do_sample else None

    def wanted(name: str) -> Any:
        given = getattr(body, name)
        return given if given is not None else getattr(own, name, None)

    temperature, top_p = wanted("temperature"), wanted("top_p")
    temperature = 1.0 if temperature is None else temperature
    if temperature < _COLDEST or top_p == 0:  # both mean the likeliest token
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "seed": None}
    seed = body.seed if body.seed not in {None, -1} else secrets.randbits(62)  # -1: llama.cpp's random seed
    return {
        "do_sample": True,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": max(wanted("top_k") or 0, 0),
        "min_p": wanted("min_p"),
        "seed": seed,
    }


def schema_of(body: CompletionBody | ChatBody) -> Mapping[str, Any] | None:
    """Return the schema of a body's `response_format`, or None for text."""
    return body.response_format.schema_of_answer() if body.response_format is not None else None


def json_grammar(tokenizer: Any, schema: Mapping[str, Any], trial: Trial) -> JsonGrammar:
    """Return the grammar of a schema, once it is known to take little time and memory."""
    try:
        trial.grammar(schema)
        return JsonGrammar(tokenizer, schema)
    except DataError as error:
        raise ApiError(f"response_format: {error}", param="response_format") from None


def check_tokens(tokens: Iterable[int], vocabulary: int, param: str) -> None:
    """Raise `ApiError` for tokens that the model does not have."""
    if wrong := [token for token in tokens if token >= vocabulary]:
        raise ApiError(f"{param}: tokens must be below {vocabulary}; got {wrong[0]}", param=param)


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """Return the prompts of a body: texts or tokens."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [each for each in prompt if not isinstance(each, int)]


IGNORED = "Penstock-Ignored-Fields"
_MOST_SHOWN, _LONGEST = 16, 100  # of names in a header or a line of the log
_MOST_LOGGED = 1000
_MOST_READ = 10_000  # of unknown fields, which may all have one name


class IgnoredFields:
    """Names unknown fields in a response header, and once per client in the log; with `strict` refuses them.

    Example:
        ignored.check(body, client)
        JSONResponse(answer, headers=ignored.headers(body))
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._logged: set[tuple[str, str]] = set()

    def check(self, body: pydantic.BaseModel, client: str) -> None:
        """Log a client's unknown fields; raises `ApiError` for the first one if the server is strict."""
        names = _names(body)
        if names and self._strict:
            raise ApiError(f"{names[0]} is not a supported field; leave it out", param=re.split(r"[.\[]", names[0])[0])
        new = [name for name in names if (client, name) not in self._logged]
        if new and len(self._logged) < _MOST_LOGGED:  # a client can invent any number of names
            self._logged.update((client, name) for name in new)
            note(f"ignored fields of {client.rpartition('@')[2]}: {', '.join(new)}")

    def headers(self, body: pydantic.BaseModel) -> dict[str, str]:
        """Return the response header that names unknown fields."""
        names = _names(body)
        return {IGNORED: ", ".join(names)} if names else {}


def _names(body: pydantic.BaseModel) -> list[str]:
    """Return the first unknown fields, with indices left out, as printable ASCII."""
    names = (re.sub(r"\[\d+\]", "[]", name[:_LONGEST]) for name in islice(_unknown_fields(body), _MOST_READ))
    # a header may neither begin nor end with a space
    found = dict.fromkeys(ascii(name.strip())[1:-1] or "''" for name in names)
    return list(found)[:_MOST_SHOWN]


def _unknown_fields(body: pydantic.BaseModel, place: str = "") -> Iterator[str]:
    """Yield the paths of a body's fields that the server does not know."""
    for name in body.model_extra or ():
        yield f"{place}{name}"
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, pydantic.BaseModel):
            yield from _unknown_fields(value, f"{place}{name}.")
        for index, each in enumerate(value) if isinstance(value, list) else ():
            if isinstance(each, pydantic.BaseModel):
                yield from _unknown_fields(each, f"{place}{name}[{index}].")
