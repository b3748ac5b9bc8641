"""Files of prompts as people and `penstock generate` write them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.errors import DataError, ModelError
from penstock.recipes.texts import answer_ends, open_generator, read_prompts
from penstock.spec.settings import TextSettings
from tests.generate.tokens import tokenizer

ODD = "a\u2028b\x85c\x0cd"


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("p.txt", f"one\n{ODD}\r\n\n two\n", ["one", ODD, " two"]),
        ("p.txt", "\ufeffone\n", ["one"]),
        ("p.jsonl", f'{{"prompt": {json.dumps(ODD, ensure_ascii=False)}}}\n\n', [ODD]),
        ("p.ndjson", '\ufeff{"prompt": "one"}\n{"prompt": "two", "more": 1}', ["one", "two"]),
        ("p.json", '[{"prompt": "one"},\n "two"]', ["one", "two"]),
        ("p.JSONL", '{"prompt": "one"}\n', ["one"]),
    ],
)
def test_prompts_of_a_file(name: str, content: str, prompts: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert read_prompts(tmp_path / name) == prompts


@pytest.mark.parametrize(
    ("content", "place"),
    [('{"prompt": "one"}\n{"text": "two"}', "line 2"), ("{", "line 1"), ('{"prompt": 3}', "line 1")],
)
def test_a_line_without_a_prompt_is_named(content: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(DataError, match=place):
        read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize(("own", "ends"), [(None, [0]), (7, [0, 7]), ([0, 9], [0, 9])])
def test_an_answer_ends_at_the_models_and_the_tokenizers_tokens(own: Any, ends: list[int]) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=own))
    generator = cast(Any, SimpleNamespace(model=model, tokenizer=tokenizer()))
    assert answer_ends(generator, "hf:folder") == ends


def test_a_chat_without_a_template_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    bare = tokenizer()
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # and no weights
    with pytest.raises(ModelError, match="penstock generate"):
        open_generator(TextSettings(model=f"hf:{tmp_path}"), chats=True)
