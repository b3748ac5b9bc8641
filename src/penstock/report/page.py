"""The page: one file that works without a network, for eyes, keyboards, screen readers, phones and the dark."""

import html
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import UsageError
from penstock.report.figures import Figure
from penstock.report.tables import Cell, Table, show

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #ffffff; --faint: #6a6a6a; --line: #d8d8d8;
  --soft: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181b; --faint: #a8a8a8; --line: #3a3d42; --soft: #1f2226; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin: 2rem 0 .3rem; }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; list-style: none; padding: 0; }
a { color: inherit; } a:focus-visible, summary:focus-visible, [tabindex]:focus-visible { outline: 3px solid #56b4e9; }
.skip { position: absolute; left: -99rem; } .skip:focus { left: 1rem; background: var(--paper); padding: .5rem; }
.lead { font-size: 1.1rem; } .faint { color: var(--faint); }
.figure { width: 100%; min-height: 12rem; overflow: hidden; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; } caption { text-align: left; color: var(--faint); }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .7rem .25rem 0; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; color: var(--faint); } figure { margin: 0; }
#journey { background: var(--soft); padding: .5rem .8rem; min-height: 3rem; font-size: .9rem; }
@media (max-width: 40rem) { body { padding: .6rem; font-size: 15px; } }
"""

_SCRIPT = """
const figures = JSON.parse(document.getElementById('figures').textContent);
const dark = matchMedia('(prefers-color-scheme: dark)');
const narrow = matchMedia('(max-width: 40rem)');
function layout(figure) {
  const ink = dark.matches ? '#e8e8e8' : '#1c1c1c', line = dark.matches ? '#3a3d42' : '#d8d8d8';
  const own = structuredClone(figure.layout);
  for (const axis of ['xaxis', 'yaxis'])
    own[axis] = Object.assign({gridcolor: line, zerolinecolor: line, automargin: true}, own[axis]);
  return Object.assign({paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', font: {color: ink, size: 12},
    margin: {l: 50, r: 15, t: 20, b: 50}, legend: {orientation: 'h', y: 1.02, yanchor: 'bottom'},
    hoverlabel: {align: 'left'}}, own);
}
const settings = {responsive: true, displaylogo: false, scrollZoom: true,
  modeBarButtonsToRemove: ['toImage', 'lasso2d', 'select2d']};
async function draw() {
  for (const figure of figures)
    await Plotly.react('figure-' + figure.key, figure.data, layout(figure), settings);
}
function tell(text) { document.getElementById('journey').innerHTML = text; }
draw().then(() => {
  const line = document.getElementById('figure-timeline');
  if (line) {
    line.on('plotly_hover', event => tell(event.points[0].customdata));
    const journeys = figures.find(f => f.key === 'timeline').journeys;
    let at = -1;
    line.addEventListener('keydown', event => {
      const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (!step) return;
      event.preventDefault();
      at = Math.min(journeys.length - 1, Math.max(0, at + step));
      tell(journeys[at]);
    });
  }
  document.body.dataset.drawn = 'yes';
});
dark.addEventListener('change', draw);
"""


@dataclass(frozen=True, slots=True)
class Text:
    """Sentences under a title."""

    key: str
    title: str
    lines: Sequence[str]


def make_page(
    title: str, lead: Sequence[str], figures: Sequence[Figure], tables: Sequence[Table], texts: Sequence[Text]
) -> str:
    """Write the page.

    Raises `UsageError` where plotly, whose script is bundled into it, is not installed.
    """
    sections = [(text.key, text.title, _list(text.lines)) for text in texts]
    sections += [(figure.key, figure.title, _figure(figure)) for figure in figures]
    sections += [(f"table-{t.key}", t.title, _table(t)) for t in tables]
    document = [{"key": f.key, "data": f.data, "layout": f.layout, "journeys": f.journeys} for f in figures]
    links = "".join(f'<li><a href="#{key}">{html.escape(name)}</a></li>' for key, name, _ in sections)
    body = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{html.escape(name)}</h2>{text}'
        "</section>\n"
        for key, name, text in sections
    )
    leads = "".join(f'<p class="lead">{html.escape(line)}</p>' for line in lead)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # nothing may be fetched from anywhere
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data: blob:\">"
        f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>'
        f'<a class="skip" href="#content">To the content</a><header><h1>{html.escape(title)}</h1>{leads}</header>'
        f'<nav aria-label="On this page"><ul>{links}</ul></nav>\n<main id="content">{body}</main>\n'
        f'<script type="application/json" id="figures">{_inline(json.dumps(document))}</script>\n'
        f"<script>{_inline(_plotly())}</script>\n<script>{_SCRIPT}</script></body></html>\n"
    )


def _inline(text: str) -> str:
    """Keep a script from ending, or a comment from beginning, where its own text says so."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _plotly() -> str:
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise UsageError("the page needs plotly; install penstock[report]")
    return (Path(found.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _figure(figure: Figure) -> str:
    more = (
        '<p id="journey" role="status" aria-live="polite">Point at a microbatch, or choose one with the arrow keys.</p>'
    )
    return (
        f'<figure><div class="figure" id="figure-{figure.key}" role="img" tabindex="0" '
        f'aria-label="{html.escape(figure.alt)}"></div><figcaption class="faint">{html.escape(figure.alt)}</figcaption>'
        f"</figure>{more if figure.key == 'timeline' else ''}"
        f"<details><summary>{html.escape(figure.title)} as a table</summary>{_table(figure.table)}</details>"
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in table.columns)
    rows = "".join(
        f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in table.rows
    )  # fmt: skip
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(table.title)}"><table><caption>'
        f"{html.escape(table.title)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    kind = ' class="number"' if isinstance(cell, (int, float)) else ""
    return f"<td{kind}>{html.escape(show(cell))}</td>"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"
