"""Queries of failures and their copies in an audit, in SQL for Spark and DuckDB.

The arguments are names of tables of facts. The results do not depend on the engine, because all orders are complete.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from bide.durations import MICROSECOND

CLOCK_SKEW: Final = timedelta(seconds=10)
"""The largest expected difference between the clocks of senders, the broker and endpoints."""

FINAL_REASONS: Final = ("parked", "discarded", "expired")
"""The final outcomes of a message at an endpoint, except for processed."""

COLUMNS: Final = (
    *("message_id", "type", "queue", "endpoint", "reason", "failed_at", "attempts", "exception", "text", "group"),
    *("sent", "due", "place"),
)
"""The columns of :func:`failures`, which a filter can use."""

_ATTEMPTS: Final = ("failed", "retried", "parked", "discarded")
"""The kinds of events that count as attempts."""

_OF_EVENTS: Final = ("type", "endpoint", "exception", "text", "group", "sent", "due")


def failures(failed: str, processed: str) -> str:
    """The failed messages, with the columns of :data:`COLUMNS`.

    There is one row for each message and queue, with its last outcome. Messages that wait for a retry or were processed
    in the end are left out. ``place`` is the number of the failure, with the oldest first.
    """
    columns = ", ".join(f"e.{name}" for name in _OF_EVENTS)
    key = "e.message_id, e.queue"
    last = "desc nulls last"
    return f"""
        select {", ".join(f"r.{name}" for name in COLUMNS if name != "place")},
            row_number() over (order by r.failed_at nulls first, r.message_id, r.queue) - 1 as place
        from (
            select {key}, e.kind as reason, e.ended as failed_at, {columns},
                row_number() over (
                    partition by {key} order by e.ended {last}, e.stream {last}, e.offset {last}
                ) as newest,
                cast(sum(case when e.kind in ({_texts(_ATTEMPTS)}) then 1 else 0 end) over (partition by {key})
                    as bigint) as attempts
            from (
                select f.message_id, f.queue, f.kind, f.ended, f.stream, f.offset,
                    {", ".join(f"f.{name}" for name in _OF_EVENTS)}
                from {failed} as f where f.message_id is not null and f.queue is not null
                union all
                select p.message_id, p.queue, 'processed', p.ended, p.stream, p.offset, p.type, p.endpoint,
                    cast(null as string), cast(null as string), cast(null as string), p.sent, p.due
                from {processed} as p where p.message_id is not null and p.queue is not null
            ) as e
        ) as r
        where r.newest = 1 and r.reason in ({_texts(FINAL_REASONS)})"""


def located(chosen: str, scheduled: str, delivered: str) -> str:
    """Add ``stream`` and ``offset`` of the newest copy of each failure in a tap; null if no tap has one.

    Applications may reuse a message id for another message. A copy belongs to another message if bide sent it at
    another time, or if another system sent it and it was due after the failure.

    Args:
        chosen: some of the rows of :func:`failures`.
    """
    # Retries and replays keep the time of sending, which events have in whole milliseconds and NServiceBus in finer
    # units. The first retry by bide changes the time of a message from NServiceBus.
    as_sent = f"(abs({_whole_millis('c.sent')} - {_whole_millis('t.sent')}) <= 1000)"
    same = f"case when {as_sent} or t.layout not like 'nservicebus%' then {as_sent} end"
    in_time = f"unix_micros(t.at_time) <= unix_micros(c.failed_at) + {CLOCK_SKEW // MICROSECOND}"
    # An event may have been routed to several queues, and be retried for one of them.
    is_its = "t.target = 'q:' || c.queue"
    last = "desc nulls last"
    return f"""
        select w.*, n.stream, n.offset
        from {chosen} as w
        left join (
            select m.message_id, m.queue, m.stream, m.offset,
                row_number() over (
                    partition by m.message_id, m.queue
                    order by coalesce(m.same, false) desc, coalesce(m.is_its, false) desc, m.in_time {last},
                        m.at_time {last}, m.step {last}, m.offset {last}, m.stream {last}
                ) as newest
            from (
                select c.message_id, c.queue, t.stream, t.offset, t.at_time, t.step,
                    {same} as same, {is_its} as is_its, {in_time} as in_time
                from {chosen} as c
                join ({_copies(scheduled, "scheduled", 0)} union all {_copies(delivered, "delivered", 1)}) as t
                on c.message_id = t.message_id
            ) as m
            where coalesce(m.same, m.in_time)
        ) as n
        on w.message_id = n.message_id and w.queue = n.queue and n.newest = 1"""


def _copies(table: str, seen: str, step: int) -> str:
    # The due time rather than the time of the tap, so that both taps have the same time for a message.
    return f"""
        select s.message_id, s.target, s.stream, s.offset, s.layout, s.sent, coalesce(s.due, s.{seen}) as at_time,
            {step} as step
        from {table} as s"""


def _whole_millis(time: str) -> str:
    """Round a time down to whole milliseconds, as microseconds."""
    micros = f"unix_micros({time})"
    return f"({micros} - (({micros} % 1000) + 1000) % 1000)"


def _texts(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names)
