"""Files of prompts as people and `penstock generate` write them."""

import json
from pathlib import Path

import pytest

from penstock.errors import DataError
from penstock.recipes.texts import read_prompts

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
)  # fmt: skip
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
