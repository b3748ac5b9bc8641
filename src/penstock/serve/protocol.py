"""Request bodies of OpenAI's completions and chat, their limits and their errors."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from penstock.errors import PenstockError

_CONTEXT_TOO_LONG = "context_length_exceeded"
MOST_CHOICES = 128  # answers of one call, for all of its prompts together
_MOST_STOPS = 16
_MOST_NAMES = 1024  # of an object, before its values are checked
_SHOWN = 60  # characters of a client's own words in a message


class ApiError(PenstockError):
    """An error response: a status, a message and the field at fault."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def document(self) -> dict[str, Any]:
        """Return the response body, in OpenAI's form."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def too_long(message: str, param: str) -> ApiError:
    """Return the error for a prompt and an answer that exceed the context."""
    return ApiError(message, param=param, code=_CONTEXT_TOO_LONG)


def _checked_number(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > _MOST_NAMES:
        raise ValueError(f"at most {_MOST_NAMES} names; got {len(value)}")
    return value


class _Body(pydantic.BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Leave out fields that are null: they mean the default."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in _checked_number(given).items() if value is not None}


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: token counts in every chunk
    include_obfuscation: bool | None = None  # padding against traffic analysis; never sent


def _whole(value: Any) -> Any:
    """Accept 7.0 for 7, as JSON Schema does."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _must_be_empty(value: Any) -> Any:
    if value or type(value) in {int, float}:
        raise ValueError("not supported; leave it out")
    return value


def _must_be_text(kind: str) -> str:
    if kind != "text":
        raise ValueError(f"parts of type {kind[:_SHOWN]!r} are not supported; send parts of type 'text'")
    return kind


def _must_be_known(role: str) -> str:
    if role not in {"system", "developer", "user", "assistant"}:
        raise ValueError(f"role {role[:_SHOWN]!r} is not supported; send system, developer, user or assistant")
    return role


def _shape(value: Any) -> str | None:
    """Return the alternative that a value is meant as, so that an error is about this one alone."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    kinds = {int: "<tokens>", float: "<tokens>", list: "<token lists>"}
    return kinds.get(type(value[0]), "<list>") if value else "<list>"


def _one_of(words: str, *lists: str) -> Discriminator:
    def choose(value: Any) -> str | None:
        found = _shape(value)
        return found if found in {None, "<text>", *lists} else "<list>"

    return Discriminator(choose, custom_error_type="shape", custom_error_message=f"must be {words}")


_Int = Annotated[int, BeforeValidator(_whole)]
_False = Annotated[bool, AfterValidator(_must_be_empty), WithJsonSchema({"const": False})]
# fields that would change the answer: only values that ask for nothing are taken
_Later = Annotated[Any, AfterValidator(_must_be_empty), WithJsonSchema({"enum": [None, False, "", [], {}]})]
_Token = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_TokenId = Annotated[_Int, Field(ge=0)]
_Few = BeforeValidator(_checked_number)
_FIRST = Field(fail_fast=True)  # a list ends at its first error: each of the others would be written out
_Tokens = Annotated[list[_TokenId], _FIRST, Field(min_length=1)]
_Likeliest = Annotated[_Int, Field(ge=0, le=20)]
_Limit = Annotated[_Int, Field(ge=-1, lt=2**31)]  # -1: up to the context's end
_Stop = Annotated[str, Field(max_length=1000)]
_Stops = Annotated[
    Annotated[_Stop, Tag("<text>")] | Annotated[list[_Stop], _FIRST, Field(max_length=_MOST_STOPS), Tag("<list>")],
    _one_of("text or a list of texts"),
]
_Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], _FIRST, Field(min_length=1, max_length=MOST_CHOICES), Tag("<list>")]
    | Annotated[_Tokens, Tag("<tokens>")]
    | Annotated[list[_Tokens], _FIRST, Field(max_length=MOST_CHOICES), Tag("<token lists>")],
    _one_of("text, tokens, or a list of either", "<tokens>", "<token lists>"),
]


class JsonSchema(_Body):
    """The schema that an answer must match."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_Body):
    """Text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None  # llama.cpp's place for it

    def schema_of_answer(self) -> Mapping[str, Any] | None:
        """Return the schema of the answer, or None for text."""
        if self.type == "text":
            return None
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ApiError("response_format.json_schema: required for type 'json_schema'", param="response_format")
        found = self.json_schema.schema_ if self.json_schema is not None else None
        found = found if found is not None else self.schema_
        return found if found is not None else {} if self.json_schema is not None else {"type": "object"}


class _Sampling(_Body):
    """Sampling parameters of both endpoints: OpenAI's, then vLLM's extensions."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[_Int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[_Int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[_Token, Annotated[float, Field(ge=-100, le=100)]], _Few] | None = None
    response_format: ResponseFormat | None = None
    top_k: Annotated[_Int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    min_tokens: Annotated[_Int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[list[_TokenId], _FIRST, Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    # accepted and ignored: nothing is stored
    user: str | None = None
    metadata: Annotated[dict[str, str], _Few] | None = None
    store: _False | None = None
    # would change the answer
    guided_json: _Later = None
    guided_regex: _Later = None
    guided_choice: _Later = None
    guided_grammar: _Later = None
    structured_outputs: _Later = None
    grammar: _Later = None
    json_schema: _Later = None
    allowed_token_ids: _Later = None
    bad_words: _Later = None
    use_beam_search: _Later = None


class CompletionBody(_Sampling):
    """POST /v1/completions."""

    prompt: _Prompt
    max_tokens: _Limit | None = None
    logprobs: _Likeliest | None = None
    echo: bool | None = None
    best_of: Annotated[_Int, Field(ge=1)] | None = None
    suffix: _Later = None


class TextPart(_Body):
    """A part of a message; only text is supported."""

    type: Annotated[str, AfterValidator(_must_be_text), WithJsonSchema({"const": "text"})]
    text: str


class RefusalPart(_Body):
    """The refusal in an earlier answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The refusal, as a part of the message."""
        return self.refusal


def _kind_of_part(value: Any) -> str:
    return "<refusal>" if isinstance(value, dict) and value.get("type") == "refusal" else "<text>"


_Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")], Discriminator(_kind_of_part)
]
_Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[_Part], _FIRST, Tag("<list>")], _one_of("text or a list of parts")
]


class ChatMessage(_Body):
    """One message of a chat, also as clients keep an earlier answer."""

    role: Annotated[
        str, AfterValidator(_must_be_known), WithJsonSchema({"enum": ["system", "developer", "user", "assistant"]})
    ]
    content: Annotated[_Content | None, Field(validate_default=True)] = None
    name: str | None = None
    refusal: str | None = None
    # of an earlier answer; without effect
    annotations: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: _Later = None
    function_call: _Later = None
    audio: _Later = None

    @pydantic.field_validator("content")
    @classmethod
    def _needed(cls, content: Any, about: pydantic.ValidationInfo) -> Any:
        if content is None and about.data.get("role", "assistant") != "assistant":
            raise ValueError(f"required for role {about.data['role']!r}")
        return content

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        return {"role": "system" if self.role == "developer" else self.role, "content": content or self.refusal or ""}


class _Chat(_Body):
    """Messages, and how the model's template writes them."""

    messages: Annotated[list[ChatMessage], _FIRST, Field(min_length=1, max_length=10_000)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: _Later = None
    documents: _Later = None
    tools: _Later = None


class ChatBody(_Sampling, _Chat):
    """POST /v1/chat/completions."""

    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    logprobs: bool | None = None
    top_logprobs: _Likeliest | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: _Later = None
    audio: _Later = None
    modalities: Annotated[list[Literal["text"]], _FIRST] | None = None


class TokenizeBody(_Chat):
    """POST /v1/tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], _FIRST, Field(min_length=1, max_length=10_000)] | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    """POST /v1/detokenize."""

    model: str | None = None
    tokens: Annotated[list[_TokenId], _FIRST]


_AnyBody = TypeVar("_AnyBody", bound=_Body)


def parse_body(kind: type[_AnyBody], data: bytes) -> _AnyBody:
    """Parse a request body; raises `ApiError` 400 naming the first invalid field, its index and the reason."""
    try:
        return kind.model_validate_json(data)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        reason = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise ApiError(f"the body is not a valid request: {reason}") from None
        raise ApiError(f"{_place(first['loc'])}: {reason}", param=str(first["loc"][0])) from None


def _place(steps: tuple[int | str, ...]) -> str:
    """Return the path of a field, without the alternatives of a union.

    >>> _place(("messages", 1, "content", "<list>", 0, "type"))
    'messages[1].content[0].type'
    """
    words = [f"[{step}]" if isinstance(step, int) else f".{step[:_SHOWN]}" for step in steps if str(step)[:1] != "<"]
    return " ".join("".join(words).removeprefix(".").split())
