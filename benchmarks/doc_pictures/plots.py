"""SVG drawings of the figures.

A file has each drawing twice, as the report's page does: for a desk, and for a phone with letters as large. Both are
of one shape, since a browser lays a page out by the shape of a picture before it looks into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor, log10
from typing import Final

from benchmarks.doc_pictures.figures import Audited, Campaign, Level, Replayed
from bide.pipelines.charts import texts
from bide.pipelines.charts.axes import TICK_SIZE, Frame, bar_outline, filled_area, legend, value_axis
from bide.pipelines.charts.drawing import BOLD_CHARACTER_WIDTH, Bar, Drawing, Label, Line, Mark, Point, Role
from bide.pipelines.charts.scale import LinearScale, LogarithmicScale
from bide.pipelines.charts.svg import NARROW_BELOW, document

WIDE: Final = 760
NARROW: Final = 380

_LEFT: Final = 52
_RIGHT: Final = 14
_TOP: Final = 30
_BETWEEN: Final = 34
_AXIS: Final = 20
_BOTTOM: Final = 42
_TICKS: Final = (5, 10, 15, 30, 60, 120, 300, 600)
_TICK_WIDTH: Final = 52
_LEVELS: Final = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds", "c": "hundredths"}
_SINCE: Final = "minutes since the first message was sent"


def campaign(found: Campaign, *, width: float) -> Drawing:
    """What came, on what had to come; and what the broker held meanwhile."""
    height = 0.62 * width
    upper, lower = _frames(width, height, 2)
    end = found.every * len(found.due)
    across = LinearScale(0, end, upper.left, upper.right)
    places = _places(across, 0, found.every, len(found.due))
    up = LinearScale(0, max(*found.due, *found.received, 1), upper.bottom, upper.top)
    marks: list[Mark] = [*_elapsed(across, upper), *value_axis(up, up.ticks(3), upper, texts.brief)]
    marks += filled_area(bar_outline([up.place(one) for one in found.received], places), up.place(0), Role.OUT)
    marks += _dashed(found.due, up, places)
    marks += _heading([("received", Role.OUT), ("due", Role.MARK)], f"messages per {found.every:g} s", upper)
    up = LinearScale(0, max(*found.waiting, 1), lower.bottom, lower.top)
    marks += [*_elapsed(across, lower), *value_axis(up, up.ticks(3), lower, texts.brief)]
    marks += filled_area(bar_outline([up.place(one) for one in found.waiting], places), up.place(0), Role.WAITING)
    marks += _heading([("waiting on the broker", Role.WAITING)], "messages", lower)
    sent = Label(x=across.place(found.sent_in) + 8, y=lower.top + 18, text=f"all sent after {found.sent_in:.1f} s")
    marks += [sent, *_elapsed_texts(across, lower, _SINCE)]
    title = "Messages that were due and received over time, and how many waited on the broker"
    return Drawing(title=title, width=width, height=height, marks=tuple(marks))


def audited(found: Audited, *, width: float) -> Drawing:
    """Outcomes of messages, and lateness of deliveries, by due time."""
    height = 0.62 * width
    upper, lower = _frames(width, height, 2)
    count = len(found.processed)
    across = LinearScale(found.first, found.first + found.every * count, upper.left, upper.right)
    marks: list[Mark] = [*_elapsed(across, upper)]
    layers = (found.processed, found.parked, found.waiting)
    up = LinearScale(0, max(*(sum(one) for one in zip(*layers, strict=True)), 1), upper.bottom, upper.top)
    marks += value_axis(up, up.ticks(3), upper, texts.brief)
    gap = 1 if width > NARROW_BELOW else 0.5
    for number, column in enumerate(zip(*layers, strict=True)):
        start, end = (across.place(found.first + found.every * edge) for edge in (number, number + 1))
        base = 0
        for value, role in zip(column, (Role.IN, Role.BAD, Role.WAITING), strict=True):
            if value:
                top = up.place(base + value)
                marks.append(Bar(x=start, y=top, width=end - start - gap, height=up.place(base) - top, role=role))
            base += value
    entries = [("processed", Role.IN), ("parked", Role.BAD), ("waiting", Role.WAITING)]
    marks += _heading(entries, f"per {found.every:g} s", upper)
    percentiles = ((found.p50, Role.IN), (found.p95, Role.OUT), (found.p99, Role.BAD))
    known = [max(one, 1.0) for values, _ in percentiles for one in values if one is not None]
    low = 10.0 ** floor(log10(min(known, default=1.0)))
    high = 10.0 ** max(ceil(log10(max(known, default=1.0))), round(log10(low)) + 1)
    scale = LogarithmicScale(low, high, lower.bottom, lower.top)
    marks += [*_elapsed(across, lower), *value_axis(scale, scale.ticks(14), lower, texts.milliseconds)]
    for values, role in percentiles:
        for piece in _pieces(values, found, across, scale):
            marks.append(Line(points=piece, role=role, width=1.75))
    marks += _heading(
        [("p50", Role.IN), ("p95", Role.OUT), ("p99", Role.BAD)], f"late, per {found.late_every:g} s", lower
    )
    x = across.place(min(max(found.until, across.low), across.high))
    for frame in (upper, lower):
        marks.append(Line(points=((x, frame.top), (x, frame.bottom)), role=Role.MARK, width=1.25, dashed=True))
    marks += _elapsed_texts(across, lower, f"due, {_SINCE}")
    title = "Outcomes of messages, and lateness of deliveries, by due time"
    return Drawing(title=title, width=width, height=height, marks=tuple(marks))


def replayed(found: Replayed, *, width: float) -> Drawing:
    """When messages failed, and when they were back: on axes of the same size."""
    height = 0.62 * width
    frames = _frames(width, height, 2, between=_BETWEEN + _AXIS)
    longest = found.every * max(len(found.parked), len(found.due))
    highest = max(*found.parked, *found.due, *found.received, 1)
    marks: list[Mark] = []
    for frame, first, filling, role in (
        (frames[0], found.parked_from, found.parked, Role.BAD),
        (frames[1], found.back_from, found.received, Role.OUT),
    ):
        across = LinearScale(first, first + longest, frame.left, frame.right)
        up = LinearScale(0, highest, frame.bottom, frame.top)
        places = _places(across, first, found.every, len(filling))
        marks += [*_elapsed(across, frame), *value_axis(up, up.ticks(3), frame, texts.brief)]
        marks += filled_area(bar_outline([up.place(one) for one in filling], places), up.place(0), role)
        if role is Role.OUT:
            marks += _dashed(found.due, up, places)
        marks += _elapsed_texts(across, frame, _SINCE if role is Role.OUT else "")
    marks += _heading([("failed, and parked", Role.BAD)], f"messages per {found.every:g} s", frames[0])
    entries = [("received again", Role.OUT), ("due", Role.MARK)]
    marks += _heading(entries, f"per {found.every:g} s", frames[1])
    title = "Messages that failed over time, and below, when they were due and received again"
    return Drawing(title=title, width=width, height=height, marks=tuple(marks))


def planned(levels: Sequence[Level], *, width: float) -> Drawing:
    """The measured and the planned number of messages of each level."""
    height = 0.78 * width
    marks: list[Mark] = []
    end = max(one.at[-1] for one in levels)
    frames = _frames(width, height, len(levels))
    for frame, one in zip(frames, levels, strict=True):
        across = LinearScale(0, end, frame.left, frame.right)
        up = LinearScale(0, max(*one.measured, *one.planned, 1), frame.bottom, frame.top)
        outline, plan = (
            tuple((across.place(at), up.place(value)) for at, value in zip(one.at, values, strict=True))
            for values in (one.measured, one.planned)
        )
        marks += [*_elapsed(across, frame), *value_axis(up, up.ticks(2), frame, texts.brief)]
        marks += filled_area(outline, up.place(0), Role.WAITING)
        marks.append(Line(points=plan, role=Role.MARK, width=1.5, dashed=True))
        name = f"level {one.name}" if width <= NARROW_BELOW else f"level {one.name}, {_LEVELS[one.name]}"
        marks.append(Label(x=frame.left, y=frame.top - 11, text=name, bold=True))
        marks.append(_unit("held" if width <= NARROW_BELOW else "messages held", frame))
        if frame is frames[0]:
            x = frame.left + BOLD_CHARACTER_WIDTH * 12 * len(name) + 14
            marks += legend([("measured", Role.WAITING), ("planned", Role.MARK)], x=x, y=frame.top - 11)
        if frame is frames[-1]:
            marks += _elapsed_texts(across, frame, _SINCE)
    title = "Messages that each level held over time, measured and planned"
    return Drawing(title=title, width=width, height=height, marks=tuple(marks))


def picture(name: str, draw: Callable[[float], Drawing]) -> str:
    """A file of SVG, which is drawn anew where it is shown small.

    Args:
        name: of letters and dashes.
    """
    return document(draw(WIDE), draw(NARROW), name=name)


def _frames(width: float, height: float, count: int, *, between: float = _BETWEEN) -> list[Frame]:
    """Plots below one another, as high as there is room for."""
    tall = (height - _TOP - _BOTTOM - (count - 1) * between) / count
    tops = [_TOP + number * (tall + between) for number in range(count)]
    return [Frame(left=_LEFT, right=width - _RIGHT, top=top, bottom=top + tall) for top in tops]


def _places(across: LinearScale, first: float, every: float, count: int) -> list[float]:
    return [across.place(first + every * number) for number in range(count + 1)]


def _dashed(values: Sequence[int], up: LinearScale, places: Sequence[float]) -> Iterator[Mark]:
    """The planned values as a dashed line, without the parts along the axis."""
    run: list[int] = []
    for number, value in enumerate([*values, 0]):
        if value:
            run.append(number)
        elif run:
            edges = places[run[0] : run[-1] + 2]
            outline = bar_outline([up.place(values[one]) for one in run], edges)
            points = ((edges[0], up.place(0)), *outline, (edges[-1], up.place(0)))
            yield Line(points=points, role=Role.MARK, width=1.25, dashed=True)
            run = []


def _pieces(
    values: Sequence[float | None], found: Audited, across: LinearScale, scale: LogarithmicScale
) -> Iterator[tuple[Point, ...]]:
    """Lines through the known values, broken at gaps."""
    points: list[Point] = []
    for number, value in enumerate([*values, None]):
        if value is not None:
            edges = (found.first + found.late_every * edge for edge in (number, number + 1))
            points += [(min(across.place(edge), across.end), scale.place(value)) for edge in edges]
        elif points:
            yield tuple(points)
            points = []


def _ticks(across: LinearScale) -> list[float]:
    """Seconds that are written under an axis."""
    most = (across.end - across.start) / _TICK_WIDTH
    step = next((one for one in _TICKS if (across.high - across.low) / one <= most), _TICKS[-1])
    return [float(step * number) for number in range(ceil(across.low / step), floor(across.high / step) + 1)]


def _elapsed(across: LinearScale, frame: Frame) -> Iterator[Mark]:
    for value in _ticks(across):
        x = across.place(value)
        yield Line(points=((x, frame.top), (x, frame.bottom)), role=Role.GRID)


def _elapsed_texts(across: LinearScale, frame: Frame, title: str) -> Iterator[Mark]:
    """Times under an axis, and below them what they are."""
    for value in _ticks(across):
        text = f"{int(value) // 60}:{int(value) % 60:02}"
        # The last one may stand at the edge of the picture.
        x = min(across.place(value), frame.right - 2)
        yield Label(x=x, y=frame.bottom + 16, text=text, role=Role.FAINT, size=TICK_SIZE, anchor="middle")
    middle = (frame.left + frame.right) / 2
    if title:
        yield Label(x=middle, y=frame.bottom + 34, text=title, role=Role.FAINT, size=TICK_SIZE, anchor="middle")


def _heading(entries: Sequence[tuple[str, Role]], unit: str, frame: Frame) -> Iterator[Mark]:
    """Over a plot, what its colours and the values on its left are."""
    yield from legend(entries, x=frame.left, y=frame.top - 11)
    yield _unit(unit, frame)


def _unit(text: str, frame: Frame) -> Label:
    return Label(x=frame.right, y=frame.top - 11, text=text, role=Role.FAINT, anchor="end")
