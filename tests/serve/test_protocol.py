"""The OpenAPI document: every field, every error status and every media type that the server uses."""

import json
from typing import Any

from penstock.serve.openapi import openapi
from tests.serve.test_strangers import WRONG


def test_every_field_has_a_place_in_the_document() -> None:
    document = openapi("0", texts=True)
    fields = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert {next(iter(change)) for change, _ in WRONG} <= fields.keys()
    json.dumps(document)


def test_document_has_media_types_of_each_path() -> None:
    assert media_types("/v1/completions", texts=True) == (
        {"application/json"},
        {"application/json", "text/event-stream"},
    )
    assert media_types("/v1/classify", texts=False) == (
        {"application/octet-stream", "multipart/form-data"},
        {"application/json"},
    )


def media_types(path: str, *, texts: bool) -> tuple[set[str], set[str]]:
    post: dict[str, Any] = openapi("0", texts=texts)["paths"][path]["post"]
    assert "408" in post["responses"]
    return set(post["requestBody"]["content"]), set(post["responses"]["200"]["content"])
