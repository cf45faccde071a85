"""HTML page of a report: a single file without external resources."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from importlib.resources import files
from typing import Final

from bide.pipelines.charts import texts
from bide.pipelines.charts.palette import rules
from bide.pipelines.charts.svg import escape_html, svg
from bide.pipelines.report import content
from bide.pipelines.report.figures import Figures
from bide.pipelines.report.page_data import page_data
from bide.pipelines.report.section import Section, SectionTable

WIDE: Final = 976
MEDIUM: Final = 680
NARROW: Final = 358

_POLICY_WITHOUT_SCRIPT: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The content security policy of a page without a script: even if a message contains HTML, a browser loads nothing and
runs no script. :func:`_policy` also allows the script of the page, by its hash."""


def page(figures: Figures, *, title: str = "Delayed delivery") -> str:
    """The report as an HTML page."""
    return "\n".join([*_lines(figures, title), ""])


def _lines(figures: Figures, title: str) -> Iterator[str]:
    yield "<!doctype html>"
    yield '<html lang="en">'
    yield "<head>"
    yield '<meta charset="utf-8">'
    # Without any message, there is nothing to filter.
    filters = figures.filters if figures.flow is not None and figures.flow.scheduled else None
    script = "" if filters is None else _file("page.js")
    yield f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape_html(title)}</title>"
    yield f"<style>\n{_style()}</style>"
    yield "</head>"
    yield "<body>"
    yield "<header>"
    yield f"<h1>{escape_html(title)}</h1>"
    yield f'<p class="faint">{escape_html(_period(figures))}</p>'
    yield f'<p class="lead">{escape_html(content.summary(figures))}</p>'
    yield "</header>"
    yield "<main>"
    yield '<dl class="cards">'
    for card in content.cards(figures):
        bad = ' class="bad"' if card.bad else ""
        yield f"<div{bad}><dt>{escape_html(card.name)}</dt><dd>{escape_html(card.value)}</dd></div>"
    yield "</dl>"
    for section in content.sections(figures):
        yield from _section(section)
    yield "</main>"
    yield f'<footer><p class="faint">Made by bide from {escape_html(figures.folder)}. All times are UTC.</p></footer>'
    if filters is not None:
        yield f'<script type="application/json" id="data">{page_data(figures, filters)}</script>'
        yield f"<script>{script}</script>"
    yield "</body>"
    yield "</html>"


def _policy(script: str) -> str:
    if not script:
        return _POLICY_WITHOUT_SCRIPT
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return f"{_POLICY_WITHOUT_SCRIPT}; script-src 'sha256-{digest}'"


def _style() -> str:
    return "\n".join([*rules(), _file("style.css")])


def _file(name: str) -> str:
    return files("bide.pipelines.report").joinpath(name).read_text(encoding="utf-8")


def _period(figures: Figures) -> str:
    head = figures.headline
    if head is None or head.since is None:
        return figures.folder
    return f"{texts.moment(head.since)} to {texts.moment(head.until)} UTC"


def _section(section: Section) -> Iterator[str]:
    yield f'<section id="{section.name}" aria-labelledby="{section.name}-title">'
    yield f'<h2 id="{section.name}-title">{escape_html(section.title)}</h2>'
    if section.draw is None:
        yield f'<p class="faint">{escape_html(section.note)}</p>'
    else:
        yield "<figure>"
        for kind, width in (("wide", WIDE), ("medium", MEDIUM), ("narrow", NARROW)):
            yield svg(section.draw(width), name=f"{section.name}-{kind}", classes=kind)
        yield f"<figcaption>{escape_html(section.note)}</figcaption>"
        yield "</figure>"
    if section.table is not None:
        yield from _table(section.table, section.title)
    if section.query:
        yield f"<details><summary>{escape_html(section.query_title)}</summary>"
        yield f'<pre tabindex="0"><code>{escape_html(section.query)}</code></pre></details>'
    yield "</section>"


def _table(table: SectionTable, title: str) -> Iterator[str]:
    if table.is_collapsed:
        yield "<details><summary>The same as a table</summary>"
    # tabindex makes the scrolling element accessible by keyboard.
    classes = "scroll" if table.is_collapsed else "scroll open"
    yield f'<div class="{classes}" tabindex="0" role="region" aria-label="{escape_html(title)}, table">'
    yield "<table>"
    yield "<thead><tr>"
    first_number = len(table.head) - table.number_columns
    for place, name in enumerate(table.head):
        yield f'<th scope="col"{_class_attribute(place, first_number)}>{escape_html(name)}</th>'
    yield "</tr></thead>"
    yield "<tbody>"
    for row in table.rows:
        cells = [f'<th scope="row">{escape_html(row[0])}</th>']
        for place, cell in enumerate(row[1:], 1):
            kind = _class_attribute(place, first_number, table.long_text_column)
            cells.append(f'<td{kind} data-name="{escape_html(table.head[place])}">{escape_html(cell)}</td>')
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody>"
    yield "</table>"
    yield "</div>"
    if table.is_collapsed:
        yield "</details>"


def _class_attribute(place: int, first_number: int, long_text_column: int | None = None) -> str:
    return ' class="number"' if place >= first_number else ' class="long"' if place == long_text_column else ""
