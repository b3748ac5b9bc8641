"""The line that says what is being done: there on a terminal, and nowhere else."""

import io
import time

from rich.console import Console

from penstock.terminal.progress import how_far, telling, working


def test_it_says_what_is_done_and_then_is_gone() -> None:
    file = io.StringIO()
    with working("measuring [links]", Console(file=file, force_terminal=True, width=60)) as say:
        say("measuring the model")
    assert "measuring the model" in file.getvalue()
    assert file.getvalue().endswith("\x1b[1A\x1b[2K"), "the line is taken away"


def test_without_a_terminal_nothing_is_said_at_first() -> None:
    file = io.StringIO()
    with working("measuring", Console(file=file)) as say:
        say("more")
    assert file.getvalue() == ""


def test_without_a_terminal_a_line_comes_every_so_often() -> None:
    file = io.StringIO()
    lines = iter(range(100))
    with telling(lambda: f"{next(lines)} of [100]", Console(file=file, markup=False), every_s=0.02):
        deadline = time.monotonic() + 5.0
        while file.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    said = file.getvalue().splitlines()
    assert said[:2] == ["0 of [100]", "1 of [100]"]
    time.sleep(0.1)
    assert file.getvalue().splitlines() == said, "it has ended"


def test_on_a_terminal_no_line_comes() -> None:
    file = io.StringIO()
    with telling(lambda: "never", Console(file=file, force_terminal=True), every_s=0.01):
        time.sleep(0.1)
    assert file.getvalue() == ""


def test_how_far_it_is() -> None:
    assert how_far(0, 10, "images", 3.0) == "0 of 10 images"
    assert how_far(5, 10, "images", 10.0) == "5 of 10 images, 0.5 images/s, about 10 s left"
    assert how_far(10, 1000, "steps", 20.0) == "10 of 1000 steps, 0.5 steps/s, about 33 min left"
