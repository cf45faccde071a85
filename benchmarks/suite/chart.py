"""Bar charts of benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Final

from benchmarks.suite.results import Spread
from bide.pipelines.charts.axes import legend
from bide.pipelines.charts.drawing import CHARACTER_WIDTH, Bar, Drawing, Label, Line, Mark, Role
from bide.pipelines.charts.scale import LinearScale, LogarithmicScale
from bide.pipelines.charts.svg import document

_WIDTH: Final = 760
_BAR: Final = 15
_BETWEEN_GROUPS: Final = 10
_TOP: Final = 58
_NOTE: Final = 18
"""Pixels that a note takes, below the heading."""

_BOTTOM: Final = 34
_RIGHT: Final = 84
_SERIES: Final = (Role.IN, Role.OUT)
_TICKS: Final = 4


@dataclass(frozen=True, slots=True)
class Group:
    """What stands under one label: a bar for each series that has a value.

    Attributes:
        spreads: one per series, None where there is none.
    """

    label: str
    spreads: Sequence[Spread | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Horizontal bars: the median, and a line from the lowest to the highest value.

    Attributes:
        heading: with the unit.
        note: a sentence below the heading, if there is something to say.
        series: their names, two at most; without a legend where there is only one.
        groups: from the top down; at least one value must be over zero.
        digits: of the numbers, after the decimal point.
        logarithmic: for values of very different size. The axis then begins at a power of ten.
    """

    heading: str
    note: str = ""
    series: Sequence[str]
    groups: Sequence[Group]
    digits: int = 0
    logarithmic: bool = False

    @property
    def title(self) -> str:
        """All its values as text, for screen readers."""
        return f"{self.heading}. {self.note}" if self.note else self.heading

    def svg(self) -> str:
        """The drawing, as a file."""
        return document(self.drawing(), name="chart")

    def drawing(self) -> Drawing:
        """The chart."""
        across = self._axis()
        above = _TOP + (_NOTE if self.note else 0)
        height = above + sum(_height(group) for group in self.groups) + _BOTTOM
        marks: list[Mark] = [Label(x=16, y=24, text=self.heading, size=14, bold=True)]
        if self.note:
            marks.append(Label(x=16, y=24 + _NOTE, text=self.note))
        if len(self.series) > 1:
            marks += legend(list(zip(self.series, _SERIES, strict=True)), x=16, y=above - 14)
        for tick in self._ticks(across):
            x = across.place(tick)
            marks.append(Line(points=((x, above - 4), (x, height - _BOTTOM)), role=Role.GRID))
            marks.append(Label(x=x, y=height - _BOTTOM + 16, text=_shown(tick), role=Role.FAINT, anchor="middle"))
        top = float(above)
        for group in self.groups:
            marks += self._group(group, across, top)
            top += _height(group)
        return Drawing(title=self.title, width=_WIDTH, height=height, marks=tuple(marks))

    def _group(self, group: Group, across: LinearScale | LogarithmicScale, top: float) -> Iterator[Mark]:
        drawn = [(role, spread) for role, spread in zip(_SERIES, group.spreads, strict=False) if spread is not None]
        yield Label(x=across.start - 8, y=top + _BAR * len(drawn) / 2 + 4, text=group.label, anchor="end")
        for row, (role, spread) in enumerate(drawn):
            y = top + row * _BAR
            centre = y + (_BAR - 2) / 2
            width = max(across.place(spread.median) - across.start, 1.0)
            yield Bar(x=across.start, y=y, width=width, height=_BAR - 2, role=role)
            low, high = across.place(spread.low), across.place(spread.high)
            if high - low >= 1:
                yield Line(points=((low, centre), (high, centre)), role=Role.MARK, width=1.5)
            yield Label(x=max(across.start + width, high) + 6, y=centre + 4, text=f"{spread.median:,.{self.digits}f}")

    def _axis(self) -> LinearScale | LogarithmicScale:
        spreads = [one for group in self.groups for one in group.spreads if one is not None]
        left = 24 + CHARACTER_WIDTH * 12 * max(len(group.label) for group in self.groups)
        right = float(_WIDTH - _RIGHT)
        high = max(one.high for one in spreads)
        if not self.logarithmic:
            return LinearScale(0.0, high, left, right)
        over_zero = (value for one in spreads for value in (one.low, one.median, one.high) if value > 0)
        low = 10.0 ** floor(log10(min(over_zero)))
        return LogarithmicScale(low, max(10.0 ** ceil(log10(high)), low * 10), left, right)

    def _ticks(self, across: LinearScale | LogarithmicScale) -> list[float]:
        if isinstance(across, LinearScale):
            return across.ticks(_TICKS, least=0.0)
        return [10.0**power for power in range(round(log10(across.low)), round(log10(across.high)) + 1)]


def _height(group: Group) -> int:
    return _BAR * sum(one is not None for one in group.spreads) + _BETWEEN_GROUPS


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"
