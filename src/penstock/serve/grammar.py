"""Constrained decoding of JSON by a schema, with llguidance."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from penstock.errors import DataError
from penstock.zoo.optional import optional_import


class JsonGrammar:
    """A logits processor that allows only tokens that keep the output valid JSON for a schema.

    For one request. Raises `DataError` if llguidance rejects the schema.

    Example:
        generator.submit(prompt, logits_processor=[JsonGrammar(tokenizer, {"type": "object"}, num_prompt=7)])
    """

    def __init__(self, tokenizer: Any, schema: Mapping[str, Any], num_prompt: int) -> None:
        library = optional_import("llguidance", "serve")
        grammar = library.LLMatcher.grammar_from_json_schema(json.dumps(dict(schema)))
        self._matcher = library.LLMatcher(_vocabulary(tokenizer), grammar)
        if problem := self._matcher.get_error():
            raise DataError(f"the schema is not supported: {problem.splitlines()[0]}")
        self._seen = num_prompt

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """Return scores [1, V] with minus infinity for all other tokens."""
        for token in tokens[0, self._seen :].tolist():
            self._matcher.consume_token(token)
        self._seen = tokens.shape[1]
        # 0 for tokens that are not allowed
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        forbidden = torch.ones(scores.shape[-1], dtype=torch.bool)
        forbidden[: len(allowed)] = ~allowed[: len(forbidden)]
        return scores.masked_fill(forbidden, -torch.inf)


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any) -> Any:
    return optional_import("llguidance.hf", "serve").from_tokenizer(tokenizer)
