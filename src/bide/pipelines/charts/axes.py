"""Axes, grid and legend of a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bide.pipelines.charts import texts
from bide.pipelines.charts.drawing import CHARACTER_WIDTH, Anchor, Area, Bar, Label, Line, Mark, Point, Role
from bide.pipelines.charts.scale import LinearScale, LogarithmicScale, TimeScale

TICK_SIZE: Final = 11
TICK_WIDTH: Final = 74
"""Width in pixels that is reserved for the text of a time."""

_DURATION_WIDTH: Final = 50
"""Width in pixels that is reserved for the text of a duration."""

_EDGE: Final = 10
"""How far texts may extend beyond the left and right edge of a plot, in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The position of a plot in a drawing, in pixels."""

    left: float
    right: float
    top: float
    bottom: float


def time_axis(times: TimeScale, frame: Frame, *, panels: Sequence[Frame] | None = None) -> Iterator[Mark]:
    """Times below the plot, with vertical grid lines.

    Args:
        panels: the parts of the plot that get grid lines, if there is text between the parts; None for the whole plot.
    """
    about = max(int((frame.right - frame.left) / TICK_WIDTH), 2)
    for moment, upper, lower in times.ticks(about):
        x = times.place(moment)
        for panel in (frame,) if panels is None else panels:
            yield Line(points=((x, panel.top), (x, panel.bottom)), role=Role.GRID)
        for text, below in ((upper, 16), (lower, 30)):
            if text:
                half = len(text) * CHARACTER_WIDTH * TICK_SIZE / 2
                middle = min(max(x, frame.left - _EDGE + half), frame.right + _EDGE - half)
                yield Label(
                    x=middle, y=frame.bottom + below, text=text, role=Role.FAINT, size=TICK_SIZE, anchor="middle"
                )


def value_axis(
    scale: LinearScale | LogarithmicScale, values: Sequence[float], frame: Frame, text: Callable[[float], str]
) -> Iterator[Mark]:
    """Values to the left of the plot, with horizontal grid lines."""
    for value in values:
        y = scale.place(value)
        yield Line(points=((frame.left, y), (frame.right, y)), role=Role.GRID)
        yield Label(x=frame.left - 8, y=y + 4, text=text(value), role=Role.FAINT, size=TICK_SIZE, anchor="end")


def duration_axis(scale: LogarithmicScale, frame: Frame, *, panels: Sequence[Frame] | None = None) -> Iterator[Mark]:
    """Durations below the plot, with vertical grid lines.

    Args:
        panels: the parts of the plot that get grid lines, if there is text between the parts; None for the whole plot.
    """
    for value in scale.ticks(_DURATION_WIDTH):
        x = scale.place(value)
        for panel in (frame,) if panels is None else panels:
            yield Line(points=((x, panel.top), (x, panel.bottom)), role=Role.GRID)
        text, anchor = texts.milliseconds(value), _anchor(x, frame)
        yield Label(x=x, y=frame.bottom + 16, text=text, role=Role.FAINT, size=TICK_SIZE, anchor=anchor)


def _anchor(x: float, frame: Frame) -> Anchor:
    """The anchor of a text at *x*, chosen so that a text at an edge of the plot does not extend beyond the edge."""
    return "end" if x > frame.right - _EDGE else "start" if x < frame.left + _EDGE else "middle"


def legend(entries: Sequence[tuple[str, Role]], *, x: float, y: float) -> Iterator[Mark]:
    """The meaning of the colours, in one line."""
    for text, role in entries:
        yield Bar(x=x, y=y - 9, width=10, height=10, role=role)
        yield Label(x=x + 15, y=y, text=text, role=Role.FAINT)
        x += 34 + CHARACTER_WIDTH * 12 * len(text)


def bar_outline(values: Sequence[float], places: Sequence[float]) -> tuple[Point, ...]:
    """The outline of adjacent bars.

    Args:
        values: the tops of the bars, as positions on the value axis.
        places: the left edges of the bars, and the right edge of the last one.
    """
    return tuple(
        point
        for value, start, end in zip(values, places, places[1:], strict=False)
        for point in ((start, value), (end, value))
    )


def filled_area(outline: Sequence[Point], base: float, role: Role) -> Iterator[Mark]:
    """The area between an outline and a base, with the outline on top."""
    if outline:
        yield Area(points=((outline[0][0], base), *outline, (outline[-1][0], base)), role=role)
        yield Line(points=tuple(outline), role=role, width=1.5)
