"""The page: one file that works offline, with keyboards, screen readers, phones and dark mode.

Names of hosts, devices and models are untrusted and always treated as text: the template escapes its values; the
figures' data is escaped for plotly, which interprets some HTML, and for the script element that contains it; and the
page's content security policy allows only the scripts embedded here.
"""

import base64
import hashlib
import html
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import UsageError
from penstock.report.page.figures import Figure
from penstock.report.page.tables import Table, show
from penstock.text import plain

_ASSETS = Path(__file__).parent / "assets"
# the tags in our own texts for plotly; all other text that looks like a tag is part of a name
_MARKUP = re.compile(r"&lt;(br|extra|/extra)&gt;")


@dataclass(frozen=True, slots=True)
class Text:
    """Paragraphs under a title."""

    key: str
    title: str
    lines: Sequence[str]


def make_page(
    title: str, lead: Sequence[str], figures: Sequence[Figure], tables: Sequence[Table], texts: Sequence[Text]
) -> str:
    """Write the page.

    Raises `UsageError` if jinja2, or plotly, whose script is embedded, is not installed.
    """
    try:
        import jinja2
        import markupsafe
    except ImportError:
        raise UsageError("the page needs jinja2; install penstock[report]") from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: plain(value) if type(value) is str else value,
    )
    environment.filters |= {"show": show, "trusted": markupsafe.Markup}
    document = _data([{"key": f.key, "data": f.data, "layout": f.layout, "journeys": f.journeys} for f in figures])
    scripts = [_inline(script) for script in (_asset("before.js"), _plotly(), _asset("page.js"))]
    # a digest of the text, which an untrusted name in the text cannot contain
    nonce = _digest(title + document)
    return environment.get_template("page.html").render(
        title=title, lead=lead, figures=figures, tables=tables, texts=texts,
        style=_asset("page.css"), data=document, scripts=scripts, nonce=nonce, policy=_policy(scripts, nonce),
    )  # fmt: skip


def _policy(scripts: Sequence[str], nonce: str) -> str:
    """Return a policy that allows these scripts by digest and styles by nonce, and no external resources."""
    digests = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {digests}; style-src 'nonce-{nonce}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(value: Any) -> str:
    """Encode JSON so that no text in it can end the script element or become markup."""
    text = json.dumps(_for_plotly(value))  # all non-ASCII is escaped as \\u, including JavaScript's line terminators
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _for_plotly(value: Any) -> Any:
    """Escape texts for plotly, which interprets some HTML in all texts; our own tags are kept."""
    if isinstance(value, str):
        return _MARKUP.sub(r"<\1>", html.escape(plain(value), quote=False))
    if isinstance(value, dict):
        return {key: _for_plotly(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_plotly(item) for item in value]
    return value


def _inline(script: str) -> str:
    """Escape text in a script that would end the element or begin a comment."""
    return re.sub("<(?=/script)", r"<\\", script, flags=re.IGNORECASE).replace("<!--", "<\\!--")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _plotly() -> str:
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise UsageError("the page needs plotly; install penstock[report]")
    return (Path(found.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
