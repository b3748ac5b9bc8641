"""Request bodies of OpenAI's completions and chat, their limits and their errors."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema

from penstock.errors import PenstockError

_CONTEXT_TOO_LONG = "context_length_exceeded"
MOST_CHOICES = 128  # answers of one call, for all of its prompts together
_MOST_STOPS = 16


class ApiError(PenstockError):
    """An error response: a status, a message and the field at fault."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
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


class _Body(pydantic.BaseModel):
    # an unknown field must not be ignored silently
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: token counts in every chunk
    include_obfuscation: bool | None = None  # padding against traffic analysis; never sent


def _whole(value: Any) -> Any:
    """Accept 7.0 for 7, as JSON Schema does."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _must_be_false(value: bool) -> bool:
    if value:
        raise ValueError("not supported; leave it out")
    return value


_Int = Annotated[int, BeforeValidator(_whole)]
_False = Annotated[bool, AfterValidator(_must_be_false), WithJsonSchema({"const": False})]
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_Token = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_TokenId = Annotated[_Int, Field(ge=0)]
_Likeliest = Annotated[_Int, Field(ge=0, le=20)]


class _Sampling(_Body):
    """Sampling parameters of both endpoints: OpenAI's, then vLLM's extensions."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[_Int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[_Int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=_MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[_Token, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    top_k: Annotated[_Int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    min_tokens: Annotated[_Int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    # accepted and ignored: nothing is stored
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: _False | None = None


class CompletionBody(_Sampling):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
        | Annotated[list[_TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[_TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MOST_CHOICES)]
    )
    max_tokens: Annotated[_Int, Field(ge=0, lt=2**31)] | None = None
    logprobs: _Likeliest | None = None
    echo: bool | None = None
    best_of: Annotated[_Int, Field(ge=1)] | None = None
    suffix: None = None


class TextPart(_Body):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None
    refusal: None = None

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class JsonSchema(_Body):
    """The schema that an answer must match."""

    name: str = "answer"
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool | None = None


class ResponseFormat(_Body):
    """Text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(_Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_tokens: Annotated[_Int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[_Int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: _Likeliest | None = None
    response_format: ResponseFormat | None = None
    # accepted only if empty; otherwise rejected by name
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    modalities: list[Literal["text"]] | None = None


_AnyBody = TypeVar("_AnyBody", bound=_Body)


def parse_body(kind: type[_AnyBody], data: bytes) -> _AnyBody:
    """Parse a request body; raises `ApiError` 400 naming the first invalid field."""
    try:
        return kind.model_validate_json(data)
    except pydantic.ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        first = problems[0]
        if not first["loc"]:
            raise ApiError(f"the body is not a valid request: {first['msg']}") from None
        param = str(first["loc"][0])
        if param in {"tools", "functions"}:
            raise ApiError(f"{param} are not supported; leave them out", param=param) from None
        if first["type"] == "extra_forbidden":
            where = ".".join(map(str, first["loc"]))
            raise ApiError(f"{where} is not a supported field; leave it out", param=param) from None
        # one problem per alternative of a union
        problem = " or ".join(dict.fromkeys(p["msg"] for p in problems if p["loc"][0] == param))
        raise ApiError(f"{param}: {problem}", param=param) from None


def openapi(version: str, *, texts: bool) -> dict[str, Any]:
    """Return the OpenAPI document of what is served."""
    error = {"description": "The error", "content": {"application/json": {"schema": _ERROR}}}
    wrong = {str(status): error for status in (400, 401, 404, 408, 413, 429, 500, 503, 504)}

    def post(
        summary: str, bodies: Mapping[str, Mapping[str, Any]], answer: str, streams: Mapping[str, Any],
        parameters: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:  # fmt: skip
        return {"post": {
            "summary": summary, "parameters": list(parameters),
            "requestBody": {"required": True, "content": {kind: {"schema": body} for kind, body in bodies.items()}},
            "responses": {"200": {"description": answer, "content": {
                "application/json": {"schema": {"type": "object"}}, **streams}}, **wrong},
        }}  # fmt: skip

    def get(summary: str, kind: str = "application/json") -> dict[str, Any]:
        schema = {"type": "object"} if kind == "application/json" else {"type": "string"}
        return {"get": {"summary": summary, "responses": {
            "200": {"description": summary, "content": {kind: {"schema": schema}}}, "401": error, "503": error,
        }}}  # fmt: skip

    paths: dict[str, Any] = {
        "/health": get("Readiness"),
        "/metrics": get("Counts for Prometheus", "text/plain"),
        "/v1/models": get("The served model"),
        "/v1/pipeline": get("Stages and their counters"),
    }
    schemas: dict[str, Any] = {}
    if texts:
        for path, kind in (("/v1/completions", CompletionBody), ("/v1/chat/completions", ChatBody)):
            schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {}) | {kind.__name__: schema}
            body = {"application/json": {"$ref": f"#/components/schemas/{kind.__name__}"}}
            paths[path] = post(kind.__doc__ or "", body, "the answer", _STREAM)
    else:
        binary = {"type": "string", "format": "binary"}
        form = {"type": "object", "properties": {"image": binary}}
        bodies: dict[str, dict[str, Any]] = {"application/octet-stream": binary, "multipart/form-data": form}
        top = {"name": "top", "in": "query", "schema": {"type": "integer", "minimum": 1, "default": 5}}
        paths["/v1/classify"] = post("Classify an image", bodies, "classes and scores", {}, [top])
    return {
        "openapi": "3.1.0", "info": {"title": "Penstock", "version": version}, "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }  # fmt: skip


_STREAM: dict[str, Any] = {"text/event-stream": {"schema": {}}}
_ERROR = {
    "type": "object", "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type"], "properties": {
        "message": {"type": "string"}, "type": {"type": "string"},
        "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
    }}},
}  # fmt: skip
