"""Queries of a report, in the SQL that Spark and DuckDB share.

The arguments are names of tables, as in :class:`~bide.pipelines.report.tables.ReportTables`. Times are whole numbers of
microseconds since the Unix epoch. The results are small for tables of any size, and do not depend on the engine: rows
are sorted by enough columns to have one order only, and percentiles are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from bide.durations import MICROSECOND, to_microseconds
from bide.pipelines.report.figures import ENDED_UNDELIVERED

PENDING_OUTCOMES: Final = ("scheduled", "overdue")
"""Outcomes of messages that are not delivered yet."""

OUTCOMES: Final = ("delivered", *ENDED_UNDELIVERED)
"""Outcomes of occurrences of schedules."""

BINS_PER_DECADE: Final = 12
"""The number of ranges of lateness per power of ten."""

ALL_SPANS: Final = -1
"""The number of the span that stands for all spans, in :func:`percentiles`."""

_PERCENTS: Final = (50, 95, 99)

_MAX_TEXT: Final = 240
"""Characters of an exception's text that are shown."""

_HOUR: Final = 3_600_000_000

# Whether a message counts for its own target, type and span (1), or for all of them (0).
_GROUPINGS: Final = ", ".join(f"({one}, {other}, {span})" for one in (0, 1) for other in (0, 1) for span in (0, 1))


def only_delayed(messages: str) -> str:
    """Only the delayed messages: endpoints also write events of messages that were not delayed."""
    return f"select * from {messages} where coalesce(due, scheduled, delivered) is not null"


def headline(messages: str) -> str:
    """All messages in one row: counts, and the first and last time."""
    return f"""
        select
            count(*) as scheduled,
            count(*) filter (where {_DELIVERED}) as delivered,
            count(*) filter (where {_is_in("m.outcome", PENDING_OUTCOMES)}) as pending,
            {_by_outcome(ENDED_UNDELIVERED)},
            count(*) filter (where m.outcome = 'overdue') as overdue,
            count(*) filter (where m.lateness_ms < 0) as early,
            least(min(m.scheduled), min(m.delivered)) as since,
            greatest(max(m.scheduled), max(m.delivered)) as until
        from {messages} as m"""


def lost_count(messages: str, before: datetime) -> str:
    """The number of overdue messages that were due before a time, in one row: ``lost``."""
    return f"select count(*) as lost from {messages} where outcome = 'overdue' and due < {to_microseconds(before)}"


def flow(messages: str, first: datetime, width: timedelta) -> str:
    """Messages per span of time: ``part`` (``scheduled`` or ``delivered``), ``span`` and ``count``."""
    return " union all ".join(
        f"""
        select '{part}' as part, {_span(part, first, width)} as span, count(*) as count
        from {messages} where {part} is not null group by {_span(part, first, width)}"""
        for part in ("scheduled", "delivered")
    )


def lateness(messages: str) -> str:
    """Delivered messages by lateness: ``bin``, the number of a range, and ``count``.

    Bin n begins at 10 ** (n / :data:`BINS_PER_DECADE`) ms; bin -1 is lateness below 1 ms.
    """
    return f"select {_BIN} as bin, count(*) as count from {messages} where lateness_ms is not null group by {_BIN}"


def targets(messages: str, limit: int) -> str:
    """A row for each target, the one with most messages first, with the number of all targets as ``targets``."""
    return f"""
        select *, count(*) over () as targets
        from (
            select
                m.target,
                count(*) as scheduled,
                count(*) filter (where {_DELIVERED}) as delivered,
                count(*) filter (where m.outcome = 'overdue') as overdue
            from {messages} as m group by m.target
        ) as counted
        order by scheduled desc, target limit {limit}"""


def types(messages: str, limit: int) -> str:
    """The known types, the one with most messages first: ``type``."""
    return f"""
        select m.type from {messages} as m where m.type <> ''
        group by m.type order by count(*) desc, m.type limit {limit}"""


def with_filter_numbers(messages: str) -> str:
    """Messages with ``target_number`` and ``type_number``: positions in the lists, from 1; 0 for what is not listed.

    The lists are the parameters ``targets`` and ``types``.
    """
    return f"""
        select m.*,
            coalesce(array_position(:targets, m.target), 0) as target_number,
            coalesce(array_position(:types, m.type), 0) as type_number
        from {messages} as m"""


def counts_by_filter(numbered: str, *, flow: tuple[datetime, timedelta], due: tuple[datetime, timedelta]) -> str:
    """Messages by ``target_number`` and ``type_number``: ``part``, ``number``, ``count`` and ``overdue``.

    The part is ``scheduled`` or ``delivered`` with the number of a span of *flow*, ``late`` with the number of a bin,
    or ``pending`` with the number of a span of *due*.

    Args:
        flow: the start and the length of the spans of scheduled and delivered messages.
        due: the start and the length of the spans of due times.
    """
    return " union all ".join(
        f"""
        select '{part}' as part, target_number, type_number, {number} as number, count(*) as count,
            count(*) filter (where outcome = 'overdue') as overdue
        from {numbered} where {condition}
        group by target_number, type_number, {number}"""
        for part, condition, number in (
            ("scheduled", "scheduled is not null", _span("scheduled", *flow)),
            ("delivered", "delivered is not null", _span("delivered", *flow)),
            ("late", "lateness_ms is not null", _BIN),
            ("pending", f"{_is_in('outcome', PENDING_OUTCOMES)} and due is not null", _span("due", *due)),
        )
    )


def percentiles(numbered: str, first: datetime, width: timedelta) -> str:
    """Percentiles of lateness for each choice of a target, a type, both or none, in each span and in all spans.

    The columns are ``target_number`` and ``type_number``, with 0 for a choice without one, ``span``, which is
    :data:`ALL_SPANS` for all spans, ``p50``, ``p95``, ``p99`` and ``max``. A percentile is the smallest lateness that
    at least this share of the messages does not exceed. Messages of equal lateness are counted first, so that few rows
    are sorted.
    """
    shares = ", ".join(f"min(case when upto * 100 >= total * {one} then late end) as p{one}" for one in _PERCENTS)
    group = "target_number, type_number, span"
    return f"""
        select {group}, {shares}, max(late) as max
        from (
            select {group}, late,
                sum(number) over (
                    partition by {group} order by late rows between unbounded preceding and current row
                ) as upto,
                sum(number) over (partition by {group}) as total
            from (
                select {group}, late, sum(number) as number
                from (
                    select
                        n.target_number * c.by_target as target_number,
                        n.type_number * c.by_type as type_number,
                        case when c.by_span = 1 then n.span else {ALL_SPANS} end as span,
                        n.late,
                        n.number
                    from (
                        select target_number, type_number, span, late, count(*) as number
                        from (
                            select target_number, type_number, lateness_ms as late,
                                {_span("delivered", first, width)} as span
                            from {numbered} where lateness_ms is not null
                        ) as measured
                        group by {group}, late
                    ) as n
                    cross join (values {_GROUPINGS}) as c(by_target, by_type, by_span)
                    where (c.by_target = 0 or n.target_number > 0)
                        and (c.by_type = 0 or n.type_number > 0)
                        and (c.by_span = 0 or n.span >= 0)
                ) as chosen
                group by {group}, late
            ) as counted
        ) as ranked
        group by {group}"""


def oldest_overdue(numbered: str, limit: int) -> str:
    """The first *limit* overdue messages by due time, for each ``target_number`` and ``type_number``."""
    return f"""
        select target_number, type_number, message_id, target, type, due
        from (
            select *, row_number() over (
                partition by target_number, type_number
                order by due asc nulls last, message_id asc nulls first, target, type
            ) as place
            from {numbered} where outcome = 'overdue'
        ) as overdue
        where place <= {limit}"""


def pending_targets(pending: str, limit: int) -> str:
    """The targets with most pending messages, with the number of all targets as ``targets``."""
    return f"""
        select target, count(*) over () as targets
        from (select p.target, sum(p.count) as waiting from {pending} as p group by p.target) as counted
        where waiting > 0
        order by waiting desc, target limit {limit}"""


def pending_times(pending: str) -> str:
    """The ``time`` of each due hour of each target, for :func:`time_range`."""
    return f"select p.due_hour as time from {pending} as p where p.count > 0 and p.due_hour is not null"


def time_range(times: str, within: tuple[int, int] | None = None) -> str:
    """The range of the column ``time`` in one row: ``first``, ``last``, ``median``, and ``low`` and ``high``.

    Nine in ten times are between ``low`` and ``high``. These and the median are times of the column, not means of two:
    the mean of a time today and one in the year 9999 would be thousands of years away from both.

    Args:
        times: a query.
        within: the first and last time to count; None to count all.
    """
    shares = ", ".join(
        f"min(case when place * 100 >= total * {share} then time end) as {name}"
        for name, share in (("low", 5), ("median", 50), ("high", 95))
    )
    condition = "time is not null" if within is None else f"time between {within[0]} and {within[1]}"
    return f"""
        select min(time) as first, max(time) as last, {shares}
        from (
            select time, row_number() over (order by time) as place, count(*) over () as total
            from ({times}) as times where {condition}
        ) as ranked"""


def pending_spans(pending: str, first: datetime, width: timedelta) -> str:
    """Pending messages by target (null for targets without a name in the list) and span: ``count`` and ``overdue``.

    The list is the parameter ``names``.
    """
    return f"""
        select target, span, sum(waiting) as count, sum(late) as overdue
        from (
            select
                case when coalesce(array_position(:names, p.target), 0) > 0 then p.target end as target,
                {_span("p.due_hour", first, width)} as span,
                p.count as waiting,
                p.overdue as late
            from {pending} as p where p.due_hour is not null
        ) as placed
        group by target, span"""


def union_all(some: str, more: str) -> str:
    """The rows of two tables with the same columns."""
    return f"select * from {some} union all select * from {more}"


def failures(table: str) -> str:
    """All failures in one row: ``total``, ``groups``, and ``timed``, the number of groups whose times are known."""
    return f"""
        select sum(f.count) as total, count(*) as groups, count(f.last_seen) as timed from {table} as f"""


def failure_time_bounds(table: str) -> str:
    """The ``time`` of the first and of the last failure of each group."""
    return f"select first_seen as time from {table} union all select last_seen as time from {table}"


def failure_groups(table: str, limit: int) -> str:
    """The groups of failures, the one with most first."""
    return f"""
        select * from {table} as f
        order by f.count desc nulls last, f.group_name, f.endpoint, f.exception limit {limit}"""


def failure_times(failed: str, first: datetime, width: timedelta) -> str:
    """Failures per span: ``group_name``, ``endpoint``, ``span``, ``count``, and the newest ``text``.

    The groups are the parameter ``groups``. Events that an endpoint published twice, because a confirm was lost, count
    once.
    """
    attempt = "message_id, group_name, endpoint, kind, started, ended"
    return f"""
        select group_name, endpoint, span, count(*) as count, max(case when place = 1 then text end) as text
        from (
            select group_name, endpoint, span, left(text, {_MAX_TEXT}) as text, row_number() over (
                partition by group_name, endpoint, span order by ended desc, text desc nulls last
            ) as place
            from (
                select {attempt}, {_span("ended", first, width)} as span, max(text) as text
                from {failed}
                where coalesce(array_position(:groups, group_name), 0) > 0 and kind <> 'expired' and ended is not null
                group by {attempt}
            ) as attempts
        ) as ranked
        group by group_name, endpoint, span"""


def schedule_targets(occurrences: str, pending: str) -> str:
    """Occurrences of schedules by target, the one with most first.

    The columns are ``target``, each of :data:`OUTCOMES`, ``pending``, ``overdue`` and the largest lateness, ``max``.
    """
    nothing = ", ".join(f"0 as {name}" for name in OUTCOMES)
    sums = ", ".join(f"sum({name}) as {name}" for name in (*OUTCOMES, "pending", "overdue"))
    return f"""
        select *
        from (
            select target, {sums}, max(late) as max
            from (
                select o.target, {_by_outcome(OUTCOMES, "o")}, 0 as pending, 0 as overdue, max(o.lateness_ms) as late
                from {occurrences} as o group by o.target
                union all
                select p.target, {nothing}, p.count as pending, p.overdue, cast(null as double) as late
                from {pending} as p
            ) as parts
            group by target
        ) as counted
        order by {" + ".join((*OUTCOMES, "pending"))} desc, target"""


def empty_occurrences(pending: str) -> str:
    """An empty table of occurrences."""
    return (
        f"select target, due_hour as due, '' as outcome, cast(null as double) as lateness_ms from {pending} where 1 = 0"
    )


def occurrence_due_times(occurrences: str) -> str:
    """The ``time`` of each due hour of ended occurrences, for :func:`time_range`."""
    return f"select distinct due - {_remainder('due', _HOUR)} as time from {occurrences}"


def schedule_spans(occurrences: str, first: datetime, width: timedelta) -> str:
    """Occurrences that have ended by span of the due time: ``span``, and each of :data:`OUTCOMES`."""
    span = _span("o.due", first, width)
    return f"select {span} as span, {_by_outcome(OUTCOMES, 'o')} from {occurrences} as o group by {span}"


def undecodable(table: str, limit: int) -> str:
    """Undecodable messages by stream and reason, most first, with the number of all messages as ``total``."""
    return f"""
        select u.*, sum(u.count) over () as total
        from (
            select stream, reason, count(*) as count, min(stream_offset) as first_offset,
                min(seen) as first_seen, max(seen) as last_seen
            from {table} group by stream, reason
        ) as u
        order by u.count desc, u.stream asc nulls first, u.reason asc nulls first limit {limit}"""


def _span(column: str, first: datetime, width: timedelta) -> str:
    """The number of the span of a time. A quotient alone would be rounded: times have more digits than a double."""
    since, size = f"({column} - ({to_microseconds(first)}))", width // MICROSECOND
    return f"cast(round(({since} - {_remainder(since, size)}) / {size}) as bigint)"


def _remainder(value: str, divisor: int) -> str:
    """The remainder of a floored division, which is never negative."""
    return f"(({value} % {divisor} + {divisor}) % {divisor})"


_BIN: Final = (
    "case when lateness_ms < 1 then -1 "
    f"else cast(floor(log10(greatest(lateness_ms, 1)) * {BINS_PER_DECADE}) as int) end"
)


def _is_in(column: str, names: Sequence[str], operator: str = "in") -> str:
    return f"coalesce({column}, '') {operator} ({', '.join(map(repr, names))})"


def _by_outcome(outcomes: Sequence[str], table: str = "m") -> str:
    return ", ".join(f"count(*) filter (where {table}.outcome = '{name}') as {name}" for name in outcomes)


_DELIVERED: Final = _is_in("m.outcome", (*PENDING_OUTCOMES, *ENDED_UNDELIVERED), "not in")
