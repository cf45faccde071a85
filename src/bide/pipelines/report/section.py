"""Parts of a report: sections, tables and the figures of the headline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bide.pipelines.charts.drawing import Drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionTable:
    """A table of texts.

    Attributes:
        head: the names of the columns.
        rows: the cells, row by row.
        number_columns: how many columns at the end are numbers.
        is_collapsed: whether the table is collapsed until the reader opens it; it then repeats the drawing's figures.
        long_text_column: the index of a column of long texts; None without one.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    number_columns: int
    is_collapsed: bool = True
    long_text_column: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the report.

    Attributes:
        name: an id that is unique in the report, of letters and dashes.
        title: the heading.
        note: one or two sentences below the drawing, or in its place.
        draw: creates the drawing for a width; None if there is nothing to draw.
        table: the same data as a table; None without one.
        query: a query for all rows, also those that the table leaves out; empty without one.
        query_title: the title of the query.
    """

    name: str
    title: str
    note: str
    draw: Callable[[float], Drawing] | None = None
    table: SectionTable | None = None
    query: str = ""
    query_title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A figure of the headline.

    Attributes:
        name: the name of the figure.
        value: the formatted value.
        bad: whether the value indicates a problem.
    """

    name: str
    value: str
    bad: bool = False
