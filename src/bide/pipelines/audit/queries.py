"""Queries of the computed tables of an audit, in the SQL that Spark and DuckDB share.

The arguments are names of tables. The rows of a message are computed from all its facts. So the results do not depend
on when, how often, or in which order the facts arrive. They do not depend on the engine either: rows that are equal in
an ``order by`` give the same result in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, Protocol

from bide.durations import to_microseconds

BATCH: Final = "batch"
"""The column with the number of the round that wrote a row. Days are partitioned by it, so that a round replaces only
small parts of a day."""

DELIVERY_GRACE: Final = timedelta(seconds=10)
"""A message is overdue if it is not delivered this long after its due time."""

SLICE_SECONDS: Final = 10
"""Pending messages are counted by slices of the due time. This is the length of a slice; hours are sums of slices."""

TREND_WINDOW: Final = timedelta(hours=1)
"""The length of the windows ``recent`` and ``before`` in the table of failures."""

SCHEDULES: Final = "schedules"
"""The layout of messages that the schedule log has, unless a tap recorded the message earlier."""

_SEVERITY: Final = ("processed", "retried", "failed", "expired", "discarded", "parked")
"""Kinds of events by severity. If a message went to several endpoints, the most severe one is its outcome."""

_EVENT_ORDER: Final = ("failed", "retried", "processed", "expired", "discarded", "parked")
"""Kinds of events in the order in which they happen, for events of the same millisecond."""

_END_ORDER: Final = ("skipped", "superseded", "cancelled", "unknown", "delivered", "undeliverable")
"""Outcomes of occurrences. If several have the same message id, the last one in this order is the outcome."""

_PERCENTILES: Final = (50, 95, 99)
_NEVER: Final = -9_000_000_000_000_000_000
"""Microseconds that are earlier than all times. A value without a time counts as the earliest one."""

_IS_FIRST: Final = "(coalesce(f.retries, 0) = 0 and f.due is not distinct from f.first_due)"
"""Whether a fact is of the original message, rather than of a retry by an endpoint or a copy by an operator.

A copy by an operator has no count of retries, but its due time differs from the first due time.
"""


class SqlForms(Protocol):
    """SQL that the engines write differently. Both have the functions ``unix_micros`` and ``timestamp_micros``."""

    @property
    def unnest(self) -> str:
        """The function that makes a row of each element of a list."""
        ...

    def last_due(self, waiting: str) -> str:
        """The last due time in a list of structures."""
        ...

    def struct(self, **fields: str) -> str:
        """A value with these fields."""
        ...

    def list_of_structs(self, **fields: str) -> str:
        """A list of values with these fields, ordered by them; null comes first."""
        ...


def messages(
    scheduled: str,
    delivered: str,
    processed: str,
    failed: str,
    occurrences: str,
    *,
    now: datetime,
    forms: SqlForms,
) -> str:
    """The table ``messages``, with one row for each message id and day, from the facts of any number of days.

    Args:
        now: the time until which the facts were read.
    """
    nothing = (
        "cast(null as timestamp) as started, cast(null as timestamp) as ended, cast(null as string) as kind, "
        "cast(null as string) as endpoint, 0 as attempts"
    )
    earliest = ", ".join(
        f"min({forms.struct(seen=f'coalesce(unix_micros(p.seen), {_NEVER})', value=f'p.{name}')}) "
        f"filter (where p.{name} is not null) as first_{name}"
        for name in ("target", "type", "layout")
    )
    # As in NServiceBus: only processed messages have durations, and waiting until the due time does not count.
    durations = ", ".join(
        f"case when outcome = 'processed' then {_milliseconds(until, since)} end as {name}"
        for name, since, until in (
            ("critical_ms", "coalesce(due, sent)", "ended"),
            ("processing_ms", "started", "ended"),
            ("delivery_ms", "coalesce(due, sent)", "started"),
        )
    )
    return f"""
        with parts as (
            select f.message_id, f.day, f.target, f.type, f.layout, f.sent,
                case when {_IS_FIRST} then f.scheduled end as scheduled, f.first_due as due,
                cast(null as timestamp) as delivered, f.scheduled as seen, 1 as sends, 0 as deliveries,
                0 as ending, {nothing}
            from {scheduled} as f where f.message_id is not null
            union all
            select f.message_id, f.day, f.target, f.type, f.layout, f.sent,
                cast(null as timestamp), f.first_due,
                case when {_IS_FIRST} then f.delivered end, f.delivered, 0, 1,
                0, {nothing}
            from {delivered} as f where f.message_id is not null
            union all
            select o.message_id, o.day, o.target, o.type, '{SCHEDULES}', cast(null as timestamp),
                cast(null as timestamp), o.due,
                cast(null as timestamp), coalesce(o.ended, o.due), 0, 0,
                {_rank(_END_ORDER, "o.outcome")}, {nothing}
            from {occurrences} as o where o.message_id is not null
            union all
            select e.message_id, e.day, e.target, e.type, cast(null as string), e.sent,
                cast(null as timestamp), e.due,
                cast(null as timestamp), e.seen, 0, 0,
                0, e.started, e.ended, e.kind, e.endpoint, e.attempts
            from ({_outcomes(processed, failed)}) as e
        ),
        found as (
            select p.message_id, p.day, {earliest},
                min(p.sent) as sent, min(p.scheduled) as scheduled, min(p.due) as due, min(p.delivered) as delivered,
                sum(p.sends) as sends, sum(p.deliveries) as deliveries, max(p.ending) as ending,
                max(p.started) as started, max(p.ended) as ended, max(p.kind) as kind, max(p.endpoint) as endpoint,
                cast(sum(p.attempts) as int) as attempts
            from parts as p group by p.message_id, p.day
        ),
        waits as ({_waiting(scheduled, delivered, forms)}),
        decided as (
            select f.*, w.waiting,
                coalesce(
                    f.kind,
                    case when f.sends > f.deliveries
                        then case when {overdue("w.last_due", now)} then 'overdue' else 'scheduled' end end,
                    {_name_of_rank(_END_ORDER, "f.ending")},
                    'delivered'
                ) as outcome
            from found as f left join waits as w on f.message_id = w.message_id and f.day = w.day
        )
        select message_id, first_target.value as target, first_type.value as type, first_layout.value as layout,
            sent, scheduled, due, delivered, {_milliseconds("delivered", "due")} as lateness_ms, attempts, outcome,
            endpoint, started, ended, {durations}, waiting, day
        from decided"""


def mark_overdue(messages: str, columns: Sequence[str], *, now: datetime, forms: SqlForms) -> str:
    """The columns of messages, with the outcome of those that have become overdue without new facts.

    Args:
        messages: the table ``messages``, with the batch of each row.
        now: the time until which the facts were read.
    """
    is_late = f"m.outcome = 'scheduled' and {overdue(forms.last_due('m.waiting'), now)}"
    outcome = f"case when {is_late} then 'overdue' else m.outcome end as outcome"
    chosen = (outcome if name == "outcome" else f"m.{name}" for name in columns)
    return f"select {', '.join(chosen)} from {messages} as m"


def pending_parts(messages: str, *, now: datetime, forms: SqlForms) -> str:
    """Counts of pending messages by target and slice of the due time, for each day and batch.

    Args:
        messages: the table ``messages``, with the batch of each row.
        now: the time until which the facts were read.
    """
    piece = _floor("one.due", SLICE_SECONDS)
    return f"""
        select one.target as target, {piece} as due, count(*) as count,
            count(*) filter (where {overdue("one.due", now)}) as overdue, day, {BATCH}
        from (select m.day, m.{BATCH}, {forms.unnest}(m.waiting) as one from {messages} as m) as waiting
        group by one.target, {piece}, day, {BATCH}"""


def pending(parts: str) -> str:
    """The table ``pending``, from the parts of all days."""
    hour = _floor("p.due", 3600)
    return f"""
        select p.target as target, {hour} as due_hour, cast(sum(p.count) as bigint) as count,
            cast(sum(p.overdue) as bigint) as overdue
        from {parts} as p group by p.target, {hour}"""


def newly_overdue(parts: str, *, now: datetime) -> str:
    """The ``day`` and ``batch`` of messages that have become overdue since *parts* were written."""
    last = to_microseconds(now - DELIVERY_GRACE - timedelta(seconds=SLICE_SECONDS))
    return f"""
        select distinct p.day, p.{BATCH} from {parts} as p
        where p.due <= timestamp_micros({last}) and p.overdue < p.count"""


def lateness(delivered: str) -> str:
    """The table ``lateness``, by the minute in which messages were due.

    Deliveries of retries by an endpoint, and of copies by an operator, do not count. Percentiles are interpolated.
    """
    key = "minute, target, day"
    places = {share: f"(top * {share / 100}e0)" for share in _PERCENTILES}
    bounds = ", ".join(
        f"max(case when place = {which}({place}) then lateness_ms end) as {which}_{share}"
        for share, place in places.items()
        for which in ("floor", "ceil")
    )
    percentiles = ", ".join(
        f"case when floor_{share} = ceil_{share} then floor_{share} else "
        f"(ceil({place}) - {place}) * floor_{share} + ({place} - floor({place})) * ceil_{share} end as p{share}_ms"
        for share, place in places.items()
    )
    return f"""
        select minute, target, count, {percentiles}, max_ms, day
        from (
            select {key}, top, count(*) as count, max(lateness_ms) as max_ms, {bounds}
            from (
                select {key}, lateness_ms,
                    row_number() over (partition by {key} order by lateness_ms) - 1 as place,
                    count(*) over (partition by {key}) - 1 as top
                from ({with_due_minute(delivered)}) as released
            ) as ranked
            group by {key}, top
        ) as bounded"""


def with_due_minute(delivered: str) -> str:
    """The facts that the table ``lateness`` counts, with the ``minute`` in which each message was due."""
    return f"""
        select f.*, {_floor("f.due", 60)} as minute from {delivered} as f
        where {_IS_FIRST} and f.lateness_ms is not null"""


def failures_parts(failed: str) -> str:
    """Failures by group and minute, for each day. ``messages`` counts a message in the minute of its first failure."""
    same = "cause, exception, endpoint"
    minute = _floor("n.ended", 60)
    # Each failure without a message id counts as a separate message.
    return f"""
        select n.cause as group, n.exception as exception, n.endpoint as endpoint, {minute} as minute,
            count(*) as count,
            count(*) filter (where n.message_id is null or n.place = 1) as messages,
            min(n.ended) as first_seen, max(n.ended) as last_seen, n.day as day
        from (
            select {same}, day, message_id, ended,
                row_number() over (partition by {same}, message_id, day order by ended) as place
            from (
                select {_EVENT_KEY}, min(f.group) as cause, min(f.exception) as exception
                from {failed} as f where f.kind <> 'expired' and f.exception is not null
                group by {_EVENT_KEY}
            ) as once
        ) as n
        group by n.cause, n.exception, n.endpoint, {minute}, n.day"""


def failures(parts: str) -> str:
    """The table ``failures``, from the parts of all days.

    ``recent`` counts the failures in the last hour with facts, ``before`` those in the hour before. ``trend`` is their
    ratio: 2.0 for twice as many, null if there were none before.
    """
    hour = int(TREND_WINDOW.total_seconds()) * 1_000_000
    age = "(unix_micros(newest) - unix_micros(minute))"
    return f"""
        select cause as group, exception, endpoint, count, messages, first_seen, last_seen, recent,
            before_that as before, cast(recent as double) / nullif(cast(before_that as double), 0) as trend
        from (
            select cause, exception, endpoint,
                cast(sum(number) as bigint) as count, cast(sum(messages) as bigint) as messages,
                min(first_seen) as first_seen, max(last_seen) as last_seen,
                cast(sum(case when {age} < {hour} then number else 0 end) as bigint) as recent,
                cast(sum(case when {age} >= {hour} and {age} < {2 * hour} then number else 0 end) as bigint)
                    as before_that
            from (
                select p.group as cause, p.exception, p.endpoint, p.minute, p.count as number, p.messages, p.first_seen,
                    p.last_seen, latest.newest
                from {parts} as p cross join (select max(l.minute) as newest from {parts} as l) as latest
            ) as dated
            group by cause, exception, endpoint
        ) as counted"""


def overdue(due: str, now: datetime) -> str:
    """Whether a due time was over for :data:`DELIVERY_GRACE` or longer at the time *now*."""
    return f"{due} <= timestamp_micros({to_microseconds(now - DELIVERY_GRACE)})"


_EVENT_KEY: Final = "f.message_id, f.day, f.endpoint, f.kind, f.retries, f.attempt, f.started, f.ended"
"""The columns that are equal in duplicates of an event. An endpoint publishes an event again if a confirm is lost."""


def _outcomes(processed: str, failed: str) -> str:
    """One row for each message that endpoints have handled, with the most severe outcome among the endpoints."""
    both = " union all ".join(
        f"select b.message_id, b.day, b.endpoint, {kind} as kind, b.retries, b.attempt, b.started, b.ended, b.queue, "
        f"b.sent, b.due, b.delivered, b.type from {table} as b where b.message_id is not null"
        for table, kind in ((processed, "'processed'"), (failed, "b.kind"))
    )
    last = "desc nulls last"
    return f"""
        select w.message_id, w.day,
            max(case when w.place = 1 then w.kind end) as kind,
            max(case when w.place = 1 then w.ended end) as ended,
            max(case when w.place = 1 then w.started end) as started,
            max(case when w.place = 1 then w.endpoint end) as endpoint,
            sum(w.attempts) as attempts, min(w.sent) as sent, min(w.due) as due, max(w.type) as type,
            'q:' || min(w.queue) as target, min(w.seen) as seen
        from (
            select n.*, row_number() over (
                partition by n.message_id, n.day
                order by {_rank(_SEVERITY, "n.kind")} {last}, n.ended {last}, n.started {last}, n.endpoint {last}
            ) as place
            from (
                select r.message_id, r.day, r.endpoint,
                    max(case when r.place = 1 then r.kind end) as kind,
                    max(case when r.place = 1 then r.ended end) as ended,
                    max(case when r.place = 1 then r.started end) as started,
                    min(r.sent) as sent, min(r.due) as due, min(r.queue) as queue, max(r.type) as type,
                    min(r.delivered) as seen, count(r.started) as attempts
                from (
                    select d.*, row_number() over (
                        partition by d.message_id, d.day, d.endpoint
                        order by d.ended {last}, {_rank(_EVENT_ORDER, "d.kind")} {last}, d.started {last}
                    ) as place
                    from (
                        select {_EVENT_KEY}, min(f.queue) as queue, min(f.sent) as sent, min(f.due) as due,
                            min(f.delivered) as delivered, max(f.type) as type
                        from ({both}) as f group by {_EVENT_KEY}
                    ) as d
                ) as r
                group by r.message_id, r.day, r.endpoint
            ) as n
        ) as w
        group by w.message_id, w.day"""


def _waiting(scheduled: str, delivered: str, forms: SqlForms) -> str:
    """The targets and due times of each message that are scheduled and not delivered, and the last of these times.

    Messages without such times are left out. A message that was scheduled several times, because of a retry or a
    duplicate publish, is delivered as many times. The deliveries are matched with the earliest due times.
    """
    return f"""
        select s.message_id, s.day, max(s.due) as last_due,
            {forms.list_of_structs(target="s.target", due="s.due")} as waiting
        from (
            select f.message_id, f.day, f.target, f.due,
                row_number() over (partition by f.message_id, f.day, f.target order by f.due) as place
            from {scheduled} as f where f.message_id is not null and f.due is not null
        ) as s
        left join (
            select f.message_id, f.day, f.target, count(*) as deliveries
            from {delivered} as f where f.message_id is not null group by f.message_id, f.day, f.target
        ) as a
        on s.message_id = a.message_id and s.day = a.day and s.target is not distinct from a.target
        where s.place > coalesce(a.deliveries, 0)
        group by s.message_id, s.day"""


def _floor(time: str, seconds: int) -> str:
    """Round a time down to a multiple of *seconds* since 1970 in UTC, whatever the time zone of the session is."""
    width, micros = seconds * 1_000_000, f"unix_micros({time})"
    return f"timestamp_micros({micros} - (({micros} % {width}) + {width}) % {width})"


def _milliseconds(until: str, since: str) -> str:
    return f"(unix_micros({until}) - unix_micros({since})) / 1000e0"


def _rank(names: Sequence[str], column: str) -> str:
    cases = " ".join(f"when '{name}' then {rank}" for rank, name in enumerate(names, 1))
    return f"case {column} {cases} else 0 end"


def _name_of_rank(names: Sequence[str], rank: str) -> str:
    """The name of a rank from :func:`_rank`; null for 0."""
    cases = " ".join(f"when {number} then '{name}'" for number, name in enumerate(names, 1))
    return f"case {rank} {cases} end"
