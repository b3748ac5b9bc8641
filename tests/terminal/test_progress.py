"""The line that says what is being done: there on a terminal, and nowhere else."""

import io

from rich.console import Console

from penstock.terminal.progress import working


def test_it_says_what_is_done_and_then_is_gone() -> None:
    file = io.StringIO()
    with working("measuring [links]", Console(file=file, force_terminal=True, width=60)) as say:
        say("measuring the model")
    assert "measuring the model" in file.getvalue()
    assert file.getvalue().endswith("\x1b[1A\x1b[2K"), "the line is taken away"


def test_without_a_terminal_nothing_is_said() -> None:
    file = io.StringIO()
    with working("measuring", Console(file=file)) as say:
        say("more")
    assert file.getvalue() == ""
