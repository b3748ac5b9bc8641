"""Text token by token is the text of all tokens, and a stop string is never shown in part."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.generate.request import TextDecoder
from tests.fewer import examples
from tests.generate.tokens import tokenizer

TOKENIZER = tokenizer()


def parts(tokens: list[int], stops: list[str]) -> tuple[list[str], TextDecoder]:
    decoder = TextDecoder(TOKENIZER, stops)
    found = []
    for token in tokens:
        found.append(decoder.add(token))
        if decoder.stopped:
            break
    return [*found, decoder.end()], decoder


@settings(max_examples=examples(200))
@given(st.text(max_size=40))
def test_parts_join_to_the_text(text: str) -> None:
    tokens = TOKENIZER(text)["input_ids"]
    found, _ = parts(tokens, [])
    assert "".join(found) == TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert not any(part.endswith("\ufffd") for part in found[:-1])


@settings(max_examples=examples(200))
@given(st.text("abc \n\u00e9", max_size=30), st.lists(st.text("abc \n\u00e9", min_size=1, max_size=4), max_size=3))
def test_stop_string_is_never_shown(text: str, stops: list[str]) -> None:
    tokens = TOKENIZER(text)["input_ids"]
    found, decoder = parts(tokens, stops)
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert decoder.stopped == bool(ends)
    if not ends:
        assert "".join(found) == text
        return
    shown = "".join(found)
    # a token may have more than one stop in it: what is shown is before all of them
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)


@pytest.mark.parametrize("text", ["é€😀", "a😀b"])
def test_characters_are_never_split(text: str) -> None:
    tokens = TOKENIZER(text)["input_ids"]
    assert len(tokens) > len(text)
    found, _ = parts(tokens, [])
    assert [part for part in found if part] == list(text)


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    tokens = TOKENIZER("a😀")["input_ids"][:-1]
    found, _ = parts(tokens, [])
    assert "".join(found) == TOKENIZER.decode(tokens)
