"""A body's parameters: sampling as options of `Generator.submit`, and fields that the server does not know."""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pydantic

from penstock.errors import DataError
from penstock.generate.generator import Generator
from penstock.serve.grammar import JsonGrammar
from penstock.serve.protocol import ApiError, ChatBody, CompletionBody
from penstock.serve.trial import Trial
from penstock.text import note

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
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": max(wanted("top_k") or 0, 0),
            "min_p": wanted("min_p"), "seed": seed}  # fmt: skip


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
