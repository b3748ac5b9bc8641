"""The live view on a console that records, with a clock and counts of the test's own."""

import io

from rich.console import Console

from penstock.terminal.live import LiveView, StageState


def recorded(view: LiveView) -> list[str]:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(view.render())
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_live_view_has_rates_of_stages() -> None:
    now = [0.0]
    states = [
        StageState("inputs", 0, 0.0, 0, computes=False),
        StageState("stage 0", 0, 0.0, 0),
        StageState("stage 1", 0, 0.0, 0),
    ]
    view = LiveView(
        Console(file=io.StringIO(), force_terminal=True), lambda: list(states), total=100, unit="images",
        clock=lambda: now[0],
    )  # fmt: skip
    recorded(view)
    now[0] = 2.0
    states[:] = [
        StageState("inputs", 44, 0.0, 0, 25_000_000, computes=False),
        StageState("stage 0", 40, 1.8, 3, 2_500_000),
        StageState("stage 1", 38, 0.5, 1),
    ]
    view.advance(36)
    lines = recorded(view)
    assert lines[0].split() == ["stage", "busy", "waiting", "per", "second", "sends"]
    inputs, first, second = (line.replace("━", "").split() for line in lines[1:4])
    assert inputs == ["inputs", "22.0", "100", "Mbit/s"]
    assert first == ["stage", "0", "90%", "3", "20.0", "10", "Mbit/s"]
    assert second == ["stage", "1", "25%", "1", "19.0"]
    assert "36/100 images, 18.0/s, 0:04 left" in "\n".join(lines)
    now[0] = 60.0  # nothing more was said: rates are those of what was
    assert "90%" in "\n".join(recorded(view))


def test_live_table_is_removed_from_the_terminal() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    with LiveView(console, lambda: [StageState("stage 0 on board", 1, 0.1, 2)], total=3, unit="images") as view:
        view.advance(note="loss 0.5")
        view._live.refresh()
    assert "stage 0 on board" in file.getvalue()
    assert "1/3 images" in file.getvalue()
    assert "loss 0.5" in file.getvalue()


def test_without_a_terminal_one_line() -> None:
    file = io.StringIO()
    with LiveView(Console(file=file), list, total=3, unit="images") as view:
        view.advance()
    assert file.getvalue() == "a live view needs a terminal; continuing without it\n"
    with LiveView(Console(file=file), list, total=3, unit="images", shown=False) as view:
        view.advance()
    assert file.getvalue().count("\n") == 1
