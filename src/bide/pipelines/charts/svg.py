"""Conversion of drawings to SVG elements and files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import Final

from bide.foreign_text import visible
from bide.pipelines.charts.drawing import Area, Bar, Drawing, Label, Line, Mark, Point
from bide.pipelines.charts.palette import file_rules

NARROW_BELOW: Final = 560
"""Width in pixels below which a file shows its narrow drawing."""


def document(wide: Drawing, narrow: Drawing | None = None, *, name: str) -> str:
    """The text of an SVG file that follows the light or dark mode of the reader.

    Args:
        wide: the drawing.
        narrow: the drawing for a phone; None to show *wide* there too. Both need the same aspect ratio, because a
            browser uses the aspect ratio of *wide* for both.
        name: an id of letters and dashes.
    """
    width, height = _number(wide.width), _number(wide.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{escape_html(wide.title)}</title>",
        "<style>",
        *file_rules(),
        'text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }',
        "polyline { fill: none; stroke-linejoin: round }",
    ]
    if narrow is not None:
        lines += [
            ".narrow { display: none }",
            f"@media (max-width: {NARROW_BELOW}px) {{ .wide {{ display: none }} .narrow {{ display: inline }} }}",
        ]
    lines += ["</style>", '<rect class="paper" width="100%" height="100%"/>']
    lines.append(svg(wide, name=f"{name}-wide", classes="wide"))
    if narrow is not None:
        lines.append(svg(narrow, name=f"{name}-narrow", classes="narrow"))
    return "\n".join([*lines, "</svg>", ""])


def svg(drawing: Drawing, *, name: str, classes: str = "") -> str:
    """An SVG element for an HTML page.

    Args:
        drawing: the drawing.
        name: an id that is unique on the page.
        classes: CSS classes of the element.
    """
    return "\n".join(_lines(drawing, name, classes))


def _lines(drawing: Drawing, name: str, classes: str) -> Iterator[str]:
    yield (
        f'<svg class="{classes}" role="img" aria-labelledby="{name}" '
        f'viewBox="0 0 {_number(drawing.width)} {_number(drawing.height)}">'
    )
    yield f'<title id="{name}">{escape_html(drawing.title)}</title>'
    for mark in drawing.marks:
        yield _element(mark)
    yield "</svg>"


def _element(mark: Mark) -> str:
    match mark:
        case Bar():
            start = (
                f'<rect class="f-{mark.role}" x="{_number(mark.x)}" y="{_number(mark.y)}" '
                f'width="{_number(mark.width)}" height="{_number(mark.height)}"'
            )
            return f"{start}><title>{escape_html(mark.tip)}</title></rect>" if mark.tip else f"{start}/>"
        case Line():
            dashes = ' stroke-dasharray="4 3"' if mark.dashed else ""
            return (
                f'<polyline class="s-{mark.role}" stroke-width="{_number(mark.width)}"{dashes} '
                f'points="{_points(mark.points)}"/>'
            )
        case Area():
            return f'<polygon class="a-{mark.role}" points="{_points(mark.points)}"/>'
        case Label():
            weight = ' font-weight="600"' if mark.bold else ""
            anchor = "" if mark.anchor == "start" else f' text-anchor="{mark.anchor}"'
            return (
                f'<text class="f-{mark.role}" x="{_number(mark.x)}" y="{_number(mark.y)}" '
                f'font-size="{_number(mark.size)}"{weight}{anchor}>{escape_html(mark.text)}</text>'
            )


def escape_html(value: str) -> str:
    """Escape a text for HTML, with control characters made visible."""
    return escape(visible(value, keep="\n\t"))


def _points(points: Iterable[Point]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _number(value: float) -> str:
    """Format a number with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")
