"""Plots of a report, drawn for the width of a phone or of a desktop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby
from math import ceil, floor, log10
from typing import Final

from bide.pipelines.charts import texts
from bide.pipelines.charts.axes import Frame, bar_outline, duration_axis, filled_area, legend, time_axis, value_axis
from bide.pipelines.charts.drawing import (
    BOLD_CHARACTER_WIDTH,
    CHARACTER_WIDTH,
    Bar,
    Drawing,
    Label,
    Line,
    Mark,
    Point,
    Role,
    shortened,
)
from bide.pipelines.charts.scale import LinearScale, LogarithmicScale, TimeScale, add_spans, widened
from bide.pipelines.report.figures import (
    FailureFigures,
    FailureGroup,
    FlowFigures,
    Headline,
    LatenessBin,
    ScheduleCounts,
    ScheduleFigures,
    TargetFigures,
)
from bide.pipelines.report.pending_figures import PendingFigures, PendingTarget
from bide.runtime.wording import quantity

_LEFT: Final = 52
_RIGHT: Final = 12
_AXIS: Final = 38
_NARROW: Final = 600
_FEWEST: Final = 12
"""The smallest number of spans on a time axis, so that the bars of a short time range are narrow."""


def flow(found: FlowFigures, *, width: float) -> Drawing:
    """Scheduled messages upwards, delivered ones downwards; below, the number of waiting messages."""
    half, gap, lower = (96, 40, 84) if width > _NARROW else (80, 40, 70)
    frame = Frame(left=_LEFT, right=width - _RIGHT, top=30, bottom=30 + 2 * half)
    times = _times(found, frame)
    places = [times.place(found.first + found.width * number) for number in range(len(found.scheduled) + 1)]
    highest = max(*found.scheduled, *found.delivered, 1)
    middle = frame.top + half
    up, down = LinearScale(0, highest, middle, frame.top), LinearScale(0, highest, middle, frame.bottom)
    marks: list[Mark] = [*time_axis(times, frame)]
    for scale in (up, down):
        marks += value_axis(scale, [one for one in scale.ticks(2) if one], frame, texts.brief)
    marks += filled_area(bar_outline([up.place(one) for one in found.scheduled], places), middle, Role.IN)
    marks += filled_area(bar_outline([down.place(one) for one in found.delivered], places), middle, Role.OUT)
    marks.append(Line(points=((frame.left, middle), (frame.right, middle)), role=Role.FAINT))
    marks += _flow_tips(found, places, frame)
    every = texts.span(found.width)
    marks += legend([("scheduled", Role.IN), ("delivered", Role.OUT)], x=frame.left, y=16)
    marks.append(Label(x=frame.right, y=16, text=f"per {every}", role=Role.FAINT, anchor="end"))
    top = frame.bottom + gap + 24
    below = Frame(left=frame.left, right=frame.right, top=top, bottom=top + lower)
    marks += _waiting(found, times, places, below)
    return Drawing(
        title=f"Messages scheduled and delivered per {every}, and how many were waiting",
        width=width,
        height=below.bottom + _AXIS,
        marks=tuple(marks),
    )


def _flow_tips(found: FlowFigures, places: Sequence[float], frame: Frame) -> Iterator[Mark]:
    for number, (scheduled, delivered) in enumerate(zip(found.scheduled, found.delivered, strict=True)):
        if scheduled or delivered:
            start = texts.moment(found.first + found.width * number)
            yield Bar(
                x=places[number],
                y=frame.top,
                width=places[number + 1] - places[number],
                height=frame.bottom - frame.top,
                role=Role.POINTED,
                tip=f"{start}: {scheduled:,} scheduled, {delivered:,} delivered",
            )


def _waiting(found: FlowFigures, times: TimeScale, places: Sequence[float], frame: Frame) -> Iterator[Mark]:
    waiting = found.waiting()
    scale = LinearScale(min(0, *waiting), max(*waiting, 1), frame.bottom, frame.top)
    yield from time_axis(times, frame)
    yield from value_axis(scale, scale.ticks(2), frame, texts.brief)
    yield from filled_area(bar_outline([scale.place(one) for one in waiting], places), scale.place(0), Role.WAITING)
    yield from legend([("waiting", Role.WAITING)], x=frame.left, y=frame.top - 12)


def lateness(found: Sequence[LatenessBin], headline: Headline, *, width: float) -> Drawing:
    """A histogram of lateness, with its percentiles."""
    height = 250 if width > _NARROW else 230
    frame = Frame(left=_LEFT, right=width - _RIGHT, top=48, bottom=height - _AXIS)
    ratio = found[-1].high / max(found[-1].low, found[-1].high / 10)
    # The range below one millisecond is drawn as wide as the others.
    low = min(one.low or one.high / ratio for one in found)
    across = LogarithmicScale(low, max(found[-1].high, low * 100), frame.left, frame.right)
    up = LinearScale(0, max(one.count for one in found), frame.bottom, frame.top)
    marks: list[Mark] = [*value_axis(up, up.ticks(3), frame, texts.brief)]
    marks += duration_axis(across, frame)
    for one in found:
        if one.count:
            start, end = across.place(one.low), across.place(one.high)
            top = min(up.place(one.count), frame.bottom - 1)
            marks.append(
                Bar(
                    x=start + 0.5,
                    y=top,
                    width=max(end - start - 1, 1),
                    height=frame.bottom - top,
                    role=Role.OUT,
                    tip=f"{lateness_range(one)}: {quantity(one.count, 'message')}",
                )
            )
    marks += _percentiles(headline, across, frame)
    marks.append(
        Label(x=(frame.left + frame.right) / 2, y=height - 4, text="late", role=Role.FAINT, size=11, anchor="middle")
    )
    return Drawing(title="How late messages were delivered", width=width, height=height, marks=tuple(marks))


def _percentiles(headline: Headline, across: LogarithmicScale, frame: Frame) -> Iterator[Mark]:
    """Vertical lines at the percentiles, with labels that are moved apart so that they do not overlap."""
    free = frame.left
    entries = (("p50", headline.p50), ("p95", headline.p95), ("p99", headline.p99))
    for number, (name, value) in enumerate(entries):
        if value is None:
            continue
        x = across.place(max(value, across.low))
        text = f"{name} {texts.milliseconds(value)}"
        room = CHARACTER_WIDTH * 12 * len(text)
        last = sum(
            CHARACTER_WIDTH * 12 * len(f"{later} {texts.milliseconds(one)}") + 10
            for later, one in entries[number + 1 :]
        )
        start = min(max(x - room / 2, free), frame.right - room - last)
        yield Line(points=((x, frame.top - 8), (x, frame.bottom)), role=Role.MARK, width=1.5, dashed=True)
        yield Line(points=((start + room / 2, frame.top - 22), (x, frame.top - 8)), role=Role.FAINT)
        yield Label(x=start, y=frame.top - 28, text=text, bold=name == "p99")
        free = start + room + 10


def lateness_range(bin_: LatenessBin) -> str:
    """The range of lateness in words."""
    if not bin_.low:
        return f"less than {texts.milliseconds(bin_.high)}"
    return f"{texts.milliseconds(bin_.low)} to {texts.milliseconds(bin_.high)}"


def lateness_over_time(found: FlowFigures, *, width: float) -> Drawing:
    """Median and 99th percentile of the lateness over time."""
    height = 200
    frame = Frame(left=_LEFT, right=width - _RIGHT, top=30, bottom=height - _AXIS)
    times = _times(found, frame)
    known = [max(one, 1.0) for values in (found.p50, found.p99) for one in values if one is not None]
    low = 10.0 ** floor(log10(min(known)))
    high = 10.0 ** max(ceil(log10(max(known))), round(log10(low)) + 1)
    scale = LogarithmicScale(low, high, frame.bottom, frame.top)
    marks: list[Mark] = [*time_axis(times, frame), *value_axis(scale, scale.ticks(24), frame, texts.milliseconds)]
    for values, role in ((found.p50, Role.IN), (found.p99, Role.BAD)):
        for piece in _pieces(values):
            outline: list[Point] = []
            for number, value in piece:
                start = times.place(found.first + found.width * number)
                y = scale.place(max(value, low))
                outline += [(start, y), (times.place(found.first + found.width * (number + 1)), y)]
            marks.append(Line(points=tuple(outline), role=role, width=1.75))
    marks += legend([("p50", Role.IN), ("p99", Role.BAD)], x=frame.left, y=16)
    every = texts.span(found.width)
    marks.append(Label(x=frame.right, y=16, text=f"per {every}", role=Role.FAINT, anchor="end"))
    return Drawing(title=f"Lateness per {every}", width=width, height=height, marks=tuple(marks))


def _pieces(values: Sequence[float | None]) -> Iterator[list[tuple[int, float]]]:
    """Runs of consecutive values, with their indexes."""
    for known, run in groupby(enumerate(values), key=lambda one: one[1] is not None):
        if known:
            yield [(number, value) for number, value in run if value is not None]


def targets(found: Sequence[TargetFigures], *, width: float) -> Drawing:
    """For each target, a bar from the median lateness to the 99th percentile, and a line to the maximum."""
    known = [
        (one, (one.p50, one.p99, one.max))
        for one in found
        if one.p50 is not None and one.p99 is not None and one.max is not None
    ]
    row = 34
    frame = Frame(left=16, right=width - 24, top=34, bottom=34 + row * len(known))
    low = 10.0 ** floor(log10(max(min(values[0] for _, values in known), 1.0)))
    high = 10.0 ** ceil(log10(max(*(values[2] for _, values in known), low * 10)))
    across = LogarithmicScale(low, high, frame.left, frame.right)
    tops = [frame.top + number * row + 18 for number in range(len(known))]
    panels = [Frame(left=frame.left, right=frame.right, top=top, bottom=top + row - 18) for top in tops]
    marks: list[Mark] = [*duration_axis(across, frame, panels=panels)]
    for number, (one, values) in enumerate(known):
        y = frame.top + number * row + 14
        name = in_words(one.name)
        p50, p99, top = (across.place(value) for value in values)
        shown = zip(("p50", "p99", "latest"), map(texts.milliseconds, values), strict=True)
        tip = f"{name}: {', '.join(f'{what} {value}' for what, value in shown)}"
        marks += [
            Label(x=frame.left, y=y, text=shortened(name, frame.right - frame.left)),
            Line(points=((p99, y + 10), (top, y + 10)), role=Role.BAD, width=1.5),
            Bar(x=p50, y=y + 6, width=max(p99 - p50, 2), height=8, role=Role.OUT, tip=tip),
            Bar(x=p50 - 1, y=y + 4, width=3, height=12, role=Role.IN, tip=tip),
            Bar(x=top - 1, y=y + 6, width=3, height=8, role=Role.BAD, tip=tip),
        ]
    marks += legend([("p50", Role.IN), ("to p99", Role.OUT), ("to the latest", Role.BAD)], x=frame.left, y=16)
    return Drawing(title="Lateness by target", width=width, height=frame.bottom + 24, marks=tuple(marks))


def pending(found: PendingFigures, *, now: datetime | None, width: float) -> Drawing:
    """Pending messages of each target by due time, with overdue ones in another colour.

    Args:
        now: a time to mark with a dashed line; None for no line.
    """
    tall, gap = (72, 30) if width > _NARROW else (60, 32)
    whole = Frame(left=_LEFT, right=width - _RIGHT, top=28, bottom=28 + len(found.targets) * (tall + gap))
    bottoms = [whole.top + (number + 1) * (tall + gap) for number in range(len(found.targets))]
    panels = [Frame(left=whole.left, right=whole.right, top=one - tall, bottom=one) for one in bottoms]
    times = _times(found, whole)
    highest = max(max(max(one.counts, default=0) for one in found.targets), 1)
    marks: list[Mark] = [*time_axis(times, whole, panels=panels)]
    marks += legend([("due later", Role.IN), ("overdue", Role.BAD)], x=whole.left, y=14)
    marks.append(Label(x=whole.right, y=14, text=f"per {texts.span(found.width)}", role=Role.FAINT, anchor="end"))
    for one, frame in zip(found.targets, panels, strict=True):
        marks += _pending_target(found, one, times, frame, highest)
        if now is not None and times.first < now < times.last:
            x = times.place(now)
            marks.append(Line(points=((x, frame.top), (x, frame.bottom)), role=Role.MARK, width=1.25, dashed=True))
    return Drawing(
        title=f"Pending messages by target and due time, per {texts.span(found.width)}",
        width=width,
        height=whole.bottom + _AXIS,
        marks=tuple(marks),
    )


def _pending_target(
    found: PendingFigures, one: PendingTarget, times: TimeScale, frame: Frame, highest: int
) -> Iterator[Mark]:
    up = LinearScale(0, highest, frame.bottom, frame.top)
    yield from value_axis(up, [tick for tick in up.ticks(2) if tick], frame, texts.brief)
    name = target_name(found, one)
    counts = f"{one.pending:,}" + (f", {one.pending_overdue:,} overdue" if one.pending_overdue else "")
    room = frame.right - frame.left - CHARACTER_WIDTH * 12 * len(counts) - 12
    yield Label(x=frame.left, y=frame.top - 8, text=shortened(name, room, bold=True), bold=True)
    role = Role.BAD if one.pending_overdue else Role.FAINT
    yield Label(x=frame.right, y=frame.top - 8, text=counts, role=role, anchor="end")
    for number, (count, overdue) in enumerate(zip(one.counts, one.overdue, strict=True)):
        if not count:
            continue
        start, wide = _span_bar(times, found, number)
        # At least 1.5 pixels, so that the smallest bar is visible.
        top = min(up.place(count), frame.bottom - 1.5)
        base = frame.bottom - (frame.bottom - top) * overdue / count
        tip = f"{name}, due from {texts.moment(found.first + found.width * number)}: {count:,}, {overdue:,} overdue"
        if base > top:
            yield Bar(x=start, y=top, width=wide, height=base - top, role=Role.IN, tip=tip)
        if overdue:
            yield Bar(x=start, y=base, width=wide, height=frame.bottom - base, role=Role.BAD, tip=tip)
    yield Line(points=((frame.left, frame.bottom), (frame.right, frame.bottom)), role=Role.FAINT)


def _times(found: FlowFigures | PendingFigures | ScheduleFigures | FailureFigures, frame: Frame) -> TimeScale:
    """The time axis of a plot."""
    first, last = widened(found.first, found.last, found.width, fewest=_FEWEST)
    return TimeScale(first, last, frame.left, frame.right)


def _span_bar(
    times: TimeScale, found: PendingFigures | ScheduleFigures | FailureFigures, number: int
) -> tuple[float, float]:
    """The left edge and the width of the bar of a span; bars are a pixel apart if there is room."""
    start, end = (times.place(add_spans(found.first, found.width, edge)) for edge in (number, number + 1))
    return start, max(end - start - (1 if end - start > 3 else 0), 1)


def target_name(found: PendingFigures | ScheduleFigures, one: PendingTarget | ScheduleCounts) -> str:
    """The name of a target in words, or the number of targets if this entry stands for all others."""
    if found.others and one is found.targets[-1]:
        return quantity(found.others, "other target")
    return in_words(one.name)


def in_words(name: str) -> str:
    """The name of a target in words: ``q:mail`` is ``queue mail``."""
    kind, colon, rest = name.partition(":")
    if colon and kind in ("q", "x"):
        return f"{'queue' if kind == 'q' else 'exchange'} {rest}"
    return name or "unknown"


_SCHEDULE_PARTS: Final = (
    ("undeliverable or unknown", Role.BAD, ("undeliverable", "unknown")),
    ("cancelled, superseded or skipped", Role.IN, ("cancelled", "superseded", "skipped")),
    ("delivered", Role.OUT, ("delivered",)),
)


def schedules(found: ScheduleFigures, *, width: float) -> Drawing:
    """Ended occurrences by due time, as bars with a part for each kind of outcome."""
    narrow = width <= _NARROW
    frame = Frame(left=_LEFT, right=width - _RIGHT, top=64 if narrow else 30, bottom=214 if narrow else 200)
    times = _times(found, frame)
    up = LinearScale(0, max(one.total for one in found.spans), frame.bottom, frame.top)
    marks: list[Mark] = [*time_axis(times, frame)]
    marks += value_axis(up, [tick for tick in up.ticks(4) if tick], frame, texts.brief)
    parts = [part for part in _SCHEDULE_PARTS if any(found.total.outcomes[name] for name in part[2])]
    for number, (label, role, _) in enumerate(reversed(parts)) if narrow else ():
        marks += legend([(label, role)], x=frame.left, y=16 + 17 * number)
    if not narrow:
        marks += legend([(label, role) for label, role, _ in reversed(parts)], x=frame.left, y=16)
        every = f"per {texts.span(found.width)}"
        marks.append(Label(x=frame.right, y=16, text=every, role=Role.FAINT, anchor="end"))
    for number, one in enumerate(found.spans):
        start, wide = _span_bar(times, found, number)
        listed = ", ".join(f"{count:,} {name}" for name, count in one.outcomes.items() if count)
        tip = f"due from {texts.moment(found.first + found.width * number)}: {listed}"
        bottom, count = frame.bottom, 0
        for _, role, names in parts:
            if more := sum(one.outcomes[name] for name in names):
                count += more
                # At least 1.5 pixels, so that the smallest part is visible.
                top = min(up.place(count), bottom - 1.5)
                marks.append(Bar(x=start, y=top, width=wide, height=bottom - top, role=role, tip=tip))
                bottom = top
    marks.append(Line(points=((frame.left, frame.bottom), (frame.right, frame.bottom)), role=Role.FAINT))
    return Drawing(
        title=f"Ended occurrences of schedules by due time, per {texts.span(found.width)}",
        width=width,
        height=frame.bottom + _AXIS,
        marks=tuple(marks),
    )


def failures(found: FailureFigures, *, width: float) -> Drawing:
    """For each group of failures, the number of failures over time."""
    row = 62
    frame = Frame(left=16, right=width - 16, top=8, bottom=8 + row * len(found.groups))
    times = _times(found, frame)
    tops = [frame.top + number * row for number in range(len(found.groups))]
    panels = [Frame(left=frame.left, right=frame.right, top=top + 24, bottom=top + row - 6) for top in tops]
    marks: list[Mark] = [*time_axis(times, frame, panels=panels)]
    for group, panel in zip(found.groups, panels, strict=True):
        marks += _group(found, group, times, panel)
    return Drawing(
        title="Groups of failures, from the first to the last of each",
        width=width,
        height=frame.bottom + _AXIS,
        marks=tuple(marks),
    )


def _group(found: FailureFigures, group: FailureGroup, times: TimeScale, frame: Frame) -> Iterator[Mark]:
    count_text = f"{group.count:,}"
    room = frame.right - frame.left - BOLD_CHARACTER_WIDTH * 13 * len(count_text) - 12
    # The namespace of a .NET exception would leave too little room for the name of the class.
    name = group_name(group).rpartition(".")[2] or group_name(group)
    if group.endpoint:
        name += f", {group.endpoint}"
    yield Label(x=frame.left, y=frame.top - 10, text=shortened(name, room, bold=True), bold=True)
    yield Label(x=frame.right, y=frame.top - 10, text=count_text, size=13, bold=True, anchor="end")
    base = frame.bottom
    yield Line(points=((frame.left, base), (frame.right, base)), role=Role.GRID)
    first, last = (
        min(max(times.place(one), frame.left), frame.right - 3) for one in (group.first_seen, group.last_seen)
    )
    yield Line(points=((first, base), (max(last, first + 3), base)), role=Role.BAD, width=2)
    highest = max(group.counts, default=0)
    for number, count in enumerate(group.counts):
        if count:
            start, wide = _span_bar(times, found, number)
            tall = max(count / highest * (frame.bottom - frame.top), 2)
            tip = f"from {texts.moment(found.first + found.width * number)}: {quantity(count, 'failure')}"
            yield Bar(x=start, y=base - tall, width=wide, height=tall, role=Role.BAD, tip=tip)


def group_name(group: FailureGroup) -> str:
    """The exception of a group, or else its name."""
    return group.exception or group.name or "unknown"


def trend(group: FailureGroup) -> str:
    """The trend of a group in the last two hours, in words."""
    if group.recent == group.before:
        return "stopped" if not group.recent else f"steady, {group.recent:,}/h"
    return f"{'rising' if group.recent > group.before else 'falling'}, {group.before:,}/h to {group.recent:,}/h"
