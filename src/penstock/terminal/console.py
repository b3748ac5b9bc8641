"""A console for tables and progress that prevents names from controlling the terminal."""

from typing import Any

from rich.console import Console
from rich.text import Text

from penstock.text import plain


class PlainConsole(Console):
    """A console that shows text literally: control characters are escaped, and markup is not interpreted.

    Example:
        PlainConsole(stderr=True).print(f"{host} has left")
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **settings})

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert text to a renderable; called for tables, cells and plain prints."""
        return super().render_str(plain(text, lines=True), **options)
