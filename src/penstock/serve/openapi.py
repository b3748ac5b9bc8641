"""The OpenAPI document of the server."""

from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from penstock.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody


def openapi(version: str, *, texts: bool) -> dict[str, Any]:
    """Return the OpenAPI document of what is served."""
    error = {"description": "The error", "content": {"application/json": {"schema": _ERROR}}}
    wrong = {str(status): error for status in (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)}

    def post(
        summary: str,
        bodies: Mapping[str, Mapping[str, Any]],
        answer: str,
        streams: Mapping[str, Any],
        parameters: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        return {"post": {
            "summary": summary, "parameters": list(parameters),
            "requestBody": {"required": True, "content": {kind: {"schema": body} for kind, body in bodies.items()}},
            "responses": {"200": {"description": answer, "content": {
                "application/json": {"schema": {"type": "object"}}, **streams}}, **wrong},
        }}  # fmt: skip

    def get(summary: str, kind: str = "application/json") -> dict[str, Any]:
        schema = {"type": "object"} if kind == "application/json" else {"type": "string"}
        return {
            "get": {
                "summary": summary,
                "responses": {
                    "200": {"description": summary, "content": {kind: {"schema": schema}}},
                    "401": error,
                    "503": error,
                },
            }
        }

    paths: dict[str, Any] = {
        "/health": get("Readiness"),
        "/metrics": get("Counts for Prometheus", "text/plain"),
        "/version": get("The server's version"),
        "/v1/models": get("The served model"),
        "/v1/pipeline": get("Stages and their counters"),
    }
    schemas: dict[str, Any] = {}
    if texts:
        for path, kind in _BODIES.items():
            schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {}) | {kind.__name__: schema}
            body = {"application/json": {"$ref": f"#/components/schemas/{kind.__name__}"}}
            streams = _STREAM if "stream" in kind.model_fields else {}
            paths[path] = post(kind.__doc__ or "", body, "the answer", streams)
    else:
        binary = {"type": "string", "format": "binary"}
        form = {"type": "object", "properties": {"image": binary}}
        bodies: dict[str, dict[str, Any]] = {"application/octet-stream": binary, "multipart/form-data": form}
        top = {"name": "top", "in": "query", "schema": {"type": "integer", "minimum": 1, "default": 5}}
        paths["/v1/classify"] = post("Classify an image", bodies, "classes and scores", {}, [top])
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "api-key"},
            },
        },
        "security": [{"key": []}, {"header": []}, {}],
    }


_BODIES: dict[str, type[pydantic.BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/tokenize": TokenizeBody,
    "/v1/detokenize": DetokenizeBody,
}
_STREAM: dict[str, Any] = {"text/event-stream": {"schema": {}}}
_ERROR = {
    "type": "object", "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type"], "properties": {
        "message": {"type": "string"}, "type": {"type": "string"},
        "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
    }}},
}  # fmt: skip
