"""View of waiting messages: schedules by due time and target, others by level."""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from typing import Any, Final

from bide.admin.apply import message_counts
from bide.console.gates import count_led_partitions
from bide.console.parameters import Parameters
from bide.console.tap_index import TapIndex
from bide.console.taps import ask_index
from bide.console.vhost import ConsoleVhost
from bide.delay.levels import DelayLevel
from bide.durations import parse_due_time, to_milliseconds
from bide.errors import BideError, InvalidInputError, ManagementApiError
from bide.schedules.prepared import check_filter
from bide.schedules.records import ScheduleFilter
from bide.schedules.timeline import MAX_INTERVALS, OTHER_TARGETS, ScheduleTimeline, TimeGrid, largest, merged
from bide.streams.log import Address

_MAX_BARS: Final = 120
"""The number of bars of the skyline, at most; one more if the time does not begin with an interval."""

_MAX_TARGETS: Final = 7
"""The maximum number of targets with a colour of their own."""

_SECOND: Final = 1_000
_MINUTE: Final = 60 * _SECOND
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR
_WIDTHS: Final = (
    *(one * _SECOND for one in (1, 2, 5, 10, 15, 30)),
    *(one * _MINUTE for one in (1, 2, 5, 10, 15, 30)),
    *(one * _HOUR for one in (1, 2, 3, 6, 12)),
    *(one * _DAY for one in (1, 2, 7, 14, 30, 90, 365, 3650, 36500)),
)
"""Lengths of intervals in milliseconds, in units that people use."""

_DENSE: Final = 0.9
_DENSE_PART: Final = 0.15
"""If at least 90 % of the messages are due in the first 15 % of the time, the first view shows only that part."""


def filter_of(parameters: Parameters) -> ScheduleFilter:
    """The filter for schedules in a request.

    Raises:
        InvalidInputError: a condition is invalid.
    """
    names = ("prefix", "to", "exchange", "due_from", "due_before")
    given: dict[str, Any] = {name: value for name in names if (value := parameters.text(name)) is not None}
    return check_filter(**given)


async def timeline(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """The numbers of schedules by target and interval, exact, from the index of the gates.

    Without ``start`` and ``end``, the view chooses a time in which most schedules are due.
    """
    gates = await count_led_partitions(vhost)
    now = to_milliseconds(vhost.client.now())
    if not gates["ok"]:
        return {"gates": gates, "now": now}
    chosen = filter_of(parameters)
    grid = _requested_grid(parameters)
    if grid is not None:
        found = await vhost.schedules.timeline(chosen, grid)
    else:
        span = await vhost.schedules.span(chosen)
        found = await vhost.schedules.timeline(chosen, _grid_until(now, now if span is None else span[1]))
        if (dense := _dense_grid(found, now)) is not None:
            found = await vhost.schedules.timeline(chosen, dense)
    return {"gates": gates, "now": now, **_values(found)}


async def tap_timeline(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """The numbers of delayed messages without a key by target and interval, from the index of the tap.

    With ``older``, older messages are added to the index first.
    """
    now = to_milliseconds(vhost.client.now())
    chosen, grid = ScheduleFilter(target=filter_of(parameters).target, due_from=now), _requested_grid(parameters)

    def count(index: TapIndex, _: Address) -> ScheduleTimeline:
        def at(grid: TimeGrid) -> ScheduleTimeline:
            return merged(grid, largest(index.times.timeline(chosen, grid)))

        if grid is not None:
            return at(grid)
        found = at(_grid_until(now, max((one.last for one in index.times.span(chosen)), default=now)))
        return found if (dense := _dense_grid(found, now)) is None else at(dense)

    tap = await ask_index(vhost, "scheduled", count, older=parameters.flag("older"))
    return {"tap": tap.state(), "now": now, **({} if tap.answer is None else _values(tap.answer))}


def _requested_grid(parameters: Parameters) -> TimeGrid | None:
    """The intervals between ``start`` and ``end``; None without these."""
    start, end = _moment(parameters, "start"), _moment(parameters, "end")
    if (start is None) != (end is None):
        raise InvalidInputError("only one of start and end was given: give both or neither")
    if start is None or end is None:
        return None
    if end <= start:
        raise InvalidInputError(
            f"the end {parameters.text('end')} is not after the start {parameters.text('start')}: give a later end"
        )
    return grid_of(start, end)


def _grid_until(now: int, last: int) -> TimeGrid:
    return grid_of(now, max(last, now + _MINUTE) + 1)


def grid_of(start: int, end: int) -> TimeGrid:
    """Intervals of a common length that cover the time between two times in milliseconds."""
    least = -(-(end - start) // _MAX_BARS)
    width = next((one for one in _WIDTHS if one >= least), _WIDTHS[-1])
    first = start - start % width
    return TimeGrid(start=first, width=width, number=min(-(-(end - first) // width), MAX_INTERVALS))


def _dense_grid(found: ScheduleTimeline, now: int) -> TimeGrid | None:
    """The intervals of the first part of the time, if most messages are due in that part; None otherwise."""
    grid, wanted = found.grid, max(_DENSE * (found.total - found.before), 1)
    sums = [sum(column) for column in zip(*found.targets.values(), strict=True)]
    reached = 0
    for number, one in enumerate(sums[: int(len(sums) * _DENSE_PART)]):
        reached += one
        if reached >= wanted:
            return grid_of(now, grid.start + grid.width * (number + 1))
    return None


def _values(found: ScheduleTimeline) -> dict[str, Any]:
    named = [(target, numbers) for target, numbers in found.targets.items() if target != OTHER_TARGETS]
    shown, rest = named[:_MAX_TARGETS], [numbers for _, numbers in named[_MAX_TARGETS:]]
    rest += [numbers for target, numbers in found.targets.items() if target == OTHER_TARGETS]
    rows = [{"target": target, "counts": numbers, "total": sum(numbers)} for target, numbers in shown]
    if rest:
        together = [sum(column) for column in zip(*rest, strict=True)]
        rows.append({"target": None, "counts": together, "total": sum(together)})
    return {
        "start": found.grid.start,
        "width": found.grid.width,
        "number": found.grid.number,
        "targets": rows,
        "before": found.before,
        "after": found.after,
        "first": found.first,
        "last": found.last,
        "total": found.total,
    }


def _moment(parameters: Parameters, name: str) -> int | None:
    value = parameters.text(name)
    return None if value is None else max(to_milliseconds(parse_due_time(value)), 0)


async def levels(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """The numbers of messages in the queues of the delay infrastructure, by level and digit."""
    infrastructure = vhost.infrastructure
    queues = infrastructure.waiting_queues()
    names = [one.name for one in queues]
    source, why = "management", ""
    try:
        start = os.path.commonprefix(names)  # noqa: RUF071 (of names, not of paths)
        found = await vhost.api.queues(vhost.name, start)
        counts: Mapping[str, int | None] = {one.queue.name: one.messages for one in found}
    except ManagementApiError as error:
        source, why = "amqp", parameters.advise(str(error))
        try:
            counts = await message_counts(await vhost.connection(), queues)
        except BideError as other:
            return {"layout": infrastructure.name, "source": None, "why": f"{why}; {other}", "levels": [], "total": 0}
    by_wait: dict[int, int] = {}
    declared = 0
    for one in queues:
        if one.name in counts:
            declared += 1
            wait = int(one.arguments["x-message-ttl"])
            by_wait[wait] = by_wait.get(wait, 0) + (counts[one.name] or 0)
    known = infrastructure.delay_levels()
    rows = [_level(one, by_wait) for one in known.levels] if known is not None else _single_levels(by_wait)
    return {
        "layout": infrastructure.name,
        "source": source,
        "why": why,
        "levels": rows,
        "queues": declared,
        "total": sum(by_wait.values()),
    }


def _level(level: DelayLevel, by_wait: Mapping[int, int]) -> dict[str, Any]:
    counts = [by_wait.get(level.unit * digit, 0) for digit in range(1, level.highest + 1)]
    return {"name": level.name, "unit": level.unit, "highest": level.highest, "counts": counts, "total": sum(counts)}


def _single_levels(by_wait: Mapping[int, int]) -> list[dict[str, Any]]:
    """The levels of an infrastructure without digits: each queue is one."""
    return [
        {"name": "", "unit": wait, "highest": 1, "counts": [count], "total": count}
        for wait, count in sorted(by_wait.items(), reverse=True)
    ]
