"""Names are shown, never obeyed: on a terminal, in a table, in a spreadsheet."""

import ast
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

import penstock
from penstock.terminal.console import PlainConsole
from penstock.text import guard_cell, note, plain, plain_cell, say, unguard_cell

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b31m\r\u202e[red]b[/nothing]"


def test_controls_are_written_out() -> None:
    assert plain("a\x1b[2J\x07\x9b\u202e\x7f\n") == r"a\x1b[2J\x07\x9b\u202e\x7f\x0a"
    assert plain("ünï 日本 \U0001f600 [x]") == "ünï 日本 \U0001f600 [x]"
    assert plain(b"no \xff text".decode(errors="surrogateescape")) == r"no \xff text"
    assert plain("two\nlines\x1b", lines=True) == "two\nlines\\x1b"


@given(st.text())
def test_any_text_is_printable(text: str) -> None:
    shown = plain(text)
    shown.encode()
    assert all(ord(c) >= 0x20 and not 0x7F <= ord(c) < 0xA0 for c in shown)


def test_lines_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"one\n{HOSTILE}")
    note("one\ntwo\x1b")
    out, err = capsys.readouterr()
    assert out.count("\n") == 2
    assert not set(out) & {"\x1b", "\x07", "\x9b", "\r", "\u202e"}
    assert err == "note: one\\x0atwo\\x1b\n"


def test_tables_and_prints_of_a_console() -> None:
    file = io.StringIO()
    console = PlainConsole(file=file, width=120)
    table = Table("device")
    table.add_row(HOSTILE)
    console.print(table)
    console.print(HOSTILE)
    shown = file.getvalue()
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\r", "\u202e"}
    assert shown.count("[red]b[/nothing]") == 2, "what looks like markup is text"


@given(st.text())
def test_a_guarded_cell_is_read_as_it_was(text: str) -> None:
    assert unguard_cell(guard_cell(text)) == text
    assert not guard_cell(text).startswith(("=", "+", "-", "@", "\t", "\r"))


def test_numbers_are_no_formulas() -> None:
    assert [plain_cell(text) for text in ("-3.2%", "+12 ms", "-1e-05", "14 ms", "-cmd|x", "+1+1", "=1")] == [
        "-3.2%", "+12 ms", "-1e-05", "14 ms", "'-cmd|x", "'+1+1", "'=1",
    ]  # fmt: skip


def test_source_prints_only_through_the_console() -> None:
    """What a verb prints goes through `say`, `note` or a `PlainConsole`, whatever is written next."""
    root = Path(penstock.__file__).parent
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"print", "typer.echo", "Console"} or file.name == "text.py", f"{file}: {called}"
