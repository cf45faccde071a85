"""Text and tables folded to the width of a terminal, between words where possible."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

_PART: Final = re.compile(r"[^./:,_-]*[./:,_-]*")
"""A part of a name or a routing key, with the separators after it."""

_GAP: Final = "  "
_NARROWEST: Final = 20
"""The fewest columns for a text beside its heading. If fewer are left, the text starts below the heading."""


def fold(text: str, width: int) -> list[str]:
    """Fold a text into lines of at most this width.

    Lines end between words. A word that is longer than a line is broken after a dot or another separator, and elsewhere
    only if one of its parts is longer than a line.
    """
    lines: list[str] = []
    line = ""
    for space, word in _words(text):
        if line and len(line) + len(space) + len(word) > width:
            lines.append(line)
            line = ""
        line += (space if line else "") + word
        while len(line) > width:
            end = _break(line, width)
            lines.append(line[:end].rstrip())
            line = line[end:].lstrip()
    return [*lines, line] if line or not lines else lines


def _words(text: str) -> Iterator[tuple[str, str]]:
    """Each word, and the spaces before it."""
    return ((found[1], found[2]) for found in re.finditer(r"( *)([^ ]+)", text))


def _break(line: str, width: int) -> int:
    """The place at which to break a line that is too long: after the last separator that fits."""
    end = 0
    for part in _PART.finditer(line):
        if part.end() > width:
            break
        end = max(end, part.end())
    return end or width


def hanging(text: str, indent: int, width: int) -> list[str]:
    """Fold a text whose first *indent* columns are a heading. These columns are empty in the other lines."""
    if len(text) <= width:
        return [text]
    if width - indent < _NARROWEST:
        return [text[:indent].rstrip(), *(_GAP + line for line in fold(text[indent:], width - len(_GAP)))]
    first, *others = fold(text[indent:], width - indent)
    return [text[:indent] + first, *(" " * indent + line for line in others)]


def table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Fold a table into lines of at most this width. Its first row is the heading.

    If the longest words of all columns do not fit on one line, each row becomes a block with one cell on each line.
    """
    columns = range(len(rows[0]))
    least = [max(len(word) for row in rows for word in (row[column].split() or [""])) for column in columns]
    spare = width - sum(least) - len(_GAP) * (len(least) - 1)
    if spare < 0:
        return _blocks(rows, width)
    heading, *others = rows
    widths = least
    # Spare columns of the terminal go to table columns whose cells would be folded, then to those whose headings would.
    for wanting in (others, rows):
        for column in columns:
            more = min(spare, max(0, *(len(row[column]) - widths[column] for row in wanting)))
            widths[column] += more
            spare -= more
    rule = [["-" * one for one in widths]]
    return [line for row in ([heading], rule, others) for one in row for line in _row_lines(one, widths)]


def _row_lines(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    cells = [fold(cell, width) for cell, width in zip(row, widths, strict=True)]
    for number in range(max(map(len, cells))):
        parts = (cell[number] if number < len(cell) else "" for cell in cells)
        yield _GAP.join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()


def _blocks(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    names, *others = rows
    indent = max(map(len, names)) + len(_GAP)
    lines: list[str] = []
    for row in others:
        if lines:
            lines.append("")
        for name, cell in zip(names, row, strict=True):
            lines += hanging(name.ljust(indent) + cell, indent, width)
    return lines
