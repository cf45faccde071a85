"""Drawings as plain data: marks, which :mod:`~bide.pipelines.charts.svg` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]

LETTER: Final = 0.58
"""Width of a letter, about, as a part of the size of the text."""

BOLD_LETTER: Final = 0.7


class Role(StrEnum):
    """What a colour stands for. Which colour that is depends on where it is shown, by day or by night."""

    INK = "ink"
    FAINT = "faint"
    GRID = "grid"
    IN = "in"
    OUT = "out"
    WAITING = "waiting"
    BAD = "bad"
    MARK = "mark"
    POINTED = "pointed"
    """Not to be seen before a pointer rests on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rectangle.

    Attributes:
        tip: shown while a pointer rests on it.
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
    """A translucent face, closed from the last point to the first."""

    points: tuple[Point, ...]
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A line of text, on its base line."""

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
    """Marks on a face, from the back to the front.

    Attributes:
        title: what it shows, for those who do not see it.
    """

    title: str
    width: float
    height: float
    marks: tuple[Mark, ...]

    def data(self) -> Iterator[Bar | Area | Line]:
        """The marks that stand for something, without texts and grid."""
        for mark in self.marks:
            if not isinstance(mark, Label) and mark.role not in (Role.GRID, Role.FAINT, Role.INK, Role.POINTED):
                yield mark


def stacked(drawings: Sequence[Drawing], *, title: str, margin: float) -> Drawing:
    """Drawings below one another, with a margin around and between them."""
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
    """As much of a text as fits into a width, with an ellipsis where it does not."""
    letters = max(int(width / ((BOLD_LETTER if bold else LETTER) * size)), 1)
    return text if len(text) <= letters else text[: letters - 1].rstrip() + "…"
