"""The line that says what is being done: there on a terminal, and nowhere else."""

import contextlib
import io
import re
import sys
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from penstock.terminal.live import FitProgress
from penstock.terminal.progress import how_far, telling, working


def wait_for(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not met() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert met()


def test_activity_line_is_removed_at_the_end() -> None:
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


def test_without_a_terminal_each_phase_that_lasts_is_a_line() -> None:
    file = io.StringIO()
    with working("placing", Console(file=file), first_s=0.1, every_s=0.4) as say:
        with working("capturing"):
            wait_for(lambda: "capturing" in file.getvalue())
        say("briefly")
        say("sending")
        wait_for(lambda: "still sending" in file.getvalue())
    said = file.getvalue().splitlines()
    assert said[:2] == ["capturing", "sending"]
    assert re.fullmatch(r"still sending, \d+ s so far", said[2])


def test_a_nested_context_changes_the_line_that_is_there() -> None:
    file = io.StringIO()
    with working("placing the stages", Console(file=file, force_terminal=True, width=60)):
        with working("starting the workers") as say:
            say("sending weights")
        assert file.getvalue().count("\x1b[?25l") == 1, "the cursor is hidden once"
        time.sleep(0.3)
    assert file.getvalue().count("\x1b[?25l") == 1
    last = file.getvalue().rsplit("0:00:0", 1)[0].rsplit("\n", 1)[-1]
    assert "placing the stages" in last


def test_process_that_is_not_shown_prints_nothing() -> None:
    file = io.StringIO()
    with working("placing", Console(file=file, force_terminal=True), shown=False) as say:
        say("more")
    assert file.getvalue() == ""


@pytest.mark.parametrize(("value", "shown"), [("0", False), ("1", True), (None, True)])
def test_progress_can_be_turned_off(value: str | None, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    if value is None:
        monkeypatch.delenv("PENSTOCK_PROGRESS")
    else:
        monkeypatch.setenv("PENSTOCK_PROGRESS", value)
    file = io.StringIO()
    with contextlib.redirect_stderr(file), working("placing"), contextlib.redirect_stderr(io.StringIO()):
        print("a failed export", file=sys.stderr)  # a capture takes what torch writes, and leaves the line alone
        time.sleep(0.3)
    assert (file.getvalue().count("placing") > 1) == shown
    assert bool(file.getvalue()) == shown


def test_phases_of_a_training_replace_the_word_of_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("PENSTOCK_PROGRESS")
    file = io.StringIO()
    with contextlib.redirect_stderr(file), FitProgress(4, "images", shown=True) as bar:
        with working("measuring the model"):
            wait_for(lambda: "measuring the model" in file.getvalue())
        assert "loss" not in file.getvalue()
        bar.advance(loss=0.5, rate=3.0)
        wait_for(lambda: "loss 0.5000, 3.0 images/s" in file.getvalue())
    assert file.getvalue().count("\x1b[?25l") == 1


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


def test_terminal_gets_no_periodic_lines() -> None:
    file = io.StringIO()
    with telling(lambda: "never", Console(file=file, force_terminal=True), every_s=0.01):
        time.sleep(0.1)
    assert file.getvalue() == ""


def test_progress_line_has_rate_and_time_left() -> None:
    assert how_far(0, 10, "images", 3.0) == "0 of 10 images"
    assert how_far(5, 10, "images", 10.0) == "5 of 10 images, 0.5 images/s, about 10 s left"
    assert how_far(10, 1000, "steps", 20.0) == "10 of 1000 steps, 0.5 steps/s, about 33 min left"
