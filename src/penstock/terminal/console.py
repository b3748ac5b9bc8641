"""A console for tables and progress in which nothing in a name is obeyed by the terminal."""

from typing import Any

from rich.console import Console
from rich.text import Text

from penstock.text import plain


class PlainConsole(Console):
    """A console that shows texts as they are: controls are written out, and what looks like markup is none.

    Example:
        PlainConsole(stderr=True).print(f"{host} has left")
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **settings})

    def render_str(self, text: str, **options: Any) -> Text:
        """Turn text into what is drawn; tables, cells and plain prints all come here."""
        return super().render_str(plain(text, lines=True), **options)
