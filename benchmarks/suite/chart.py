"""Bar charts as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Final
from xml.sax.saxutils import escape

from benchmarks.suite.results import Spread
from bide.foreign_text import visible

_WIDTH: Final = 760
_BAR: Final = 15
_BETWEEN_GROUPS: Final = 10
_TOP: Final = 58
_NOTE: Final = 18
"""Pixels that a note takes, below the heading."""

_BOTTOM: Final = 34
_RIGHT: Final = 84
_LETTER: Final = 6.9
"""Pixels of a letter, about."""

_COLOURS: Final = ("#2f6f9f", "#c98a2b", "#5c8a4a", "#8a5c8a")
_INK: Final = "#24292f"
_FAINT: Final = "#d0d7de"
_NICE: Final = (1, 2, 5, 10)
_TICKS: Final = 5


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
        series: their names; without a legend where there is only one.
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
        """Everything that it says in words, for those who cannot see it."""
        return f"{self.heading}. {self.note}" if self.note else self.heading

    def svg(self) -> str:
        """The drawing."""
        return "\n".join([*self._lines(), ""])

    def _lines(self) -> Iterator[str]:
        axis = self._axis()
        above = _TOP + (_NOTE if self.note else 0)
        height = above + sum(_height(group) for group in self.groups) + _BOTTOM
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="12" role="img">'
        )
        yield f"<title>{escape(visible(self.title))}</title>"
        yield f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
        yield _text(16, 24, self.heading, weight="bold", size=14)
        if self.note:
            yield _text(16, 24 + _NOTE, self.note)
        yield from self._legend(above)
        for tick in axis.ticks:
            place = axis.place(tick)
            yield f'<path d="M{place:.1f} {above - 4}V{height - _BOTTOM}" stroke="{_FAINT}"/>'
            yield _text(place, height - _BOTTOM + 16, _shown(tick), anchor="middle")
        top = float(above)
        for group in self.groups:
            yield from self._group(group, axis, top)
            top += _height(group)
        yield "</svg>"

    def _legend(self, above: int) -> Iterator[str]:
        if len(self.series) < 2:
            return
        place = 16.0
        for number, name in enumerate(self.series):
            yield f'<rect x="{place:.1f}" y="{above - 24}" width="11" height="11" fill="{_COLOURS[number]}"/>'
            yield _text(place + 16, above - 14, name)
            place += 34 + _LETTER * len(name)

    def _group(self, group: Group, axis: _Axis, top: float) -> Iterator[str]:
        drawn = [(number, spread) for number, spread in enumerate(group.spreads) if spread is not None]
        middle = top + _BAR * len(drawn) / 2 + 4
        yield _text(axis.left - 8, middle, group.label, anchor="end")
        for row, (number, spread) in enumerate(drawn):
            y = top + row * _BAR
            width = max(axis.place(spread.median) - axis.left, 1.0)
            yield (
                f'<rect x="{axis.left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR - 2}" '
                f'fill="{_COLOURS[number]}"/>'
            )
            low, high, centre = axis.place(spread.low), axis.place(spread.high), y + (_BAR - 2) / 2
            if high - low >= 1:
                yield f'<path d="M{low:.1f} {centre:.1f}H{high:.1f}" stroke="{_INK}" stroke-width="1.5"/>'
            yield _text(max(axis.left + width, high) + 6, centre + 4, f"{spread.median:,.{self.digits}f}")

    def _axis(self) -> _Axis:
        spreads = [one for group in self.groups for one in group.spreads if one is not None]
        left = 24 + _LETTER * max(len(group.label) for group in self.groups)
        high = max(one.high for one in spreads)
        if not self.logarithmic:
            return _Axis(left, 0.0, high, _linear_ticks(high), logarithmic=False)
        over_zero = (value for one in spreads for value in (one.low, one.median, one.high) if value > 0)
        low = 10.0 ** floor(log10(min(over_zero)))
        ticks = [10.0**power for power in range(round(log10(low)), ceil(log10(high)) + 1)]
        return _Axis(left, low, max(high, ticks[-1], low * 10), ticks, logarithmic=True)


@dataclass(frozen=True, slots=True)
class _Axis:
    left: float
    low: float
    high: float
    ticks: Sequence[float]
    logarithmic: bool

    def place(self, value: float) -> float:
        """Where a value is, in pixels from the left."""
        if self.logarithmic:
            part = log10(max(value, self.low) / self.low) / log10(self.high / self.low)
        else:
            part = value / self.high
        return self.left + part * (_WIDTH - _RIGHT - self.left)


def _linear_ticks(high: float) -> list[float]:
    """Zero and its round multiples up to the highest value, about five of them."""
    rough = high / _TICKS
    magnitude = 10.0 ** floor(log10(rough))
    step = next(nice * magnitude for nice in _NICE if nice * magnitude >= rough)
    return [step * number for number in range(floor(high / step) + 1)]


def _height(group: Group) -> int:
    return _BAR * sum(one is not None for one in group.spreads) + _BETWEEN_GROUPS


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" font-size="{size}" '
        f'fill="{_INK}">{escape(visible(text))}</text>'
    )
