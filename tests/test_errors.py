"""Whatever a message quotes, it is one line that a terminal shows as it is."""

import pytest

from penstock.errors import PenstockError, PlanError, RunError


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain", "plain"),
        ("naïve – ×", "naïve – ×"),
        ("two\nlines", "two\\nlines"),
        ("\x1b[2Jcleared", "\\x1b[2Jcleared"),
        ("\u202eturned", "\\u202eturned"),
        ("", ""),
    ],
)
def test_error_message_is_one_printable_line(given: str, shown: str) -> None:
    assert str(PlanError(given)) == shown


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    text = str(RunError(f"begin {'n' * 10_000} end"))
    assert text.startswith("begin n")
    assert text.endswith("n end")
    assert len(text) < 1600


def test_every_error_type_is_printed_in_one_line() -> None:
    def all_of(kind: type[PenstockError]) -> list[type[PenstockError]]:
        return [kind, *(inner for sub in kind.__subclasses__() for inner in all_of(sub))]

    assert len(all_of(PenstockError)) >= 14
    assert {str(kind("a\nb")) for kind in all_of(PenstockError)} == {"a\\nb"}
