"""Drawings as data: marks that :mod:`~bide.pipelines.charts.svg` converts to SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]

CHARACTER_WIDTH: Final = 0.58
"""The approximate width of a letter, as a fraction of the font size."""

BOLD_CHARACTER_WIDTH: Final = 0.7
"""The approximate width of a bold letter, as a fraction of the font size."""


class Role(StrEnum):
    """The meaning of a colour. The colour itself depends on the light or dark mode of the reader."""

    INK = "ink"
    FAINT = "faint"
    GRID = "grid"
    IN = "in"
    OUT = "out"
    WAITING = "waiting"
    BAD = "bad"
    MARK = "mark"
    POINTED = "pointed"
    """Invisible until the pointer is over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rectangle.

    Attributes:
        tip: the text that is shown while the pointer is over the rectangle.
    """

    x: float
    y: float
    width: float
    height: float
    role: Role
    tip: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line through points."""

    points: tuple[Point, ...]
    role: Role
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """A translucent polygon."""

    points: tuple[Point, ...]
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A line of text; *y* is its baseline."""

    x: float
    y: float
    text: str
    role: Role = Role.INK
    size: float = 12
    anchor: Anchor = "start"
    bold: bool = False


Mark = Bar | Line | Area | Label


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Marks on a rectangle, from back to front.

    Attributes:
        title: a description for screen readers.
    """

    title: str
    width: float
    height: float
    marks: tuple[Mark, ...]

    def data_marks(self) -> Iterator[Bar | Area | Line]:
        """The marks that represent data, without texts and grid."""
        for mark in self.marks:
            if not isinstance(mark, Label) and mark.role not in (Role.GRID, Role.FAINT, Role.INK, Role.POINTED):
                yield mark


def stacked(drawings: Sequence[Drawing], *, title: str, margin: float) -> Drawing:
    """Stack drawings vertically, with a margin around and between them."""
    marks: list[Mark] = []
    top = margin
    for drawing in drawings:
        marks += (_moved(mark, margin, top) for mark in drawing.marks)
        top += drawing.height + margin
    width = max(drawing.width for drawing in drawings) + 2 * margin
    return Drawing(title=title, width=width, height=top, marks=tuple(marks))


def _moved(mark: Mark, right: float, down: float) -> Mark:
    match mark:
        case Bar() | Label():
            return replace(mark, x=mark.x + right, y=mark.y + down)
        case Line() | Area():
            return replace(mark, points=tuple((x + right, y + down) for x, y in mark.points))


def shortened(text: str, width: float, *, size: float = 12, bold: bool = False) -> str:
    """Shorten a text to a width, with an ellipsis at the end."""
    letters = max(int(width / ((BOLD_CHARACTER_WIDTH if bold else CHARACTER_WIDTH) * size)), 1)
    return text if len(text) <= letters else text[: letters - 1].rstrip() + "…"
