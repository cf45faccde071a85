"""The longest waits of publishers and consumers, as SQL queries over a history.

A queue without traffic is not unavailable: time counts while a publish to the queue is under way, or while a message
for it is due. Messages of the role ``blocked``, such as those to a full queue, do not count.
"""

from __future__ import annotations

from typing import Final

SHORTEST_WAIT: Final = 100_000
"""Microseconds. Shorter waits count as none."""

VIEWS: Final = (
    # A wait ends when a publish to the queue is confirmed or fails. It began with the confirm before, or with the first
    # of the publishes that were still under way, whichever is later.
    f"""
    CREATE OR REPLACE TEMPORARY VIEW confirm_wait AS
    SELECT run, 'unconfirmed' AS what, greatest(since, coalesce(before, since)) AS began, ended_at AS ended
    FROM (
        SELECT run, ended_at,
               max(CASE WHEN outcome = 'confirmed' THEN ended_at END)
                   OVER (PARTITION BY run, place ORDER BY ended_at
                         ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before,
               min(sent_at) OVER (PARTITION BY run, place ORDER BY ended_at
                                  ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS since
        FROM sent WHERE ended_at IS NOT NULL AND role <> 'blocked'
    ) AS ordered WHERE ended_at - greatest(since, coalesce(before, since)) > {SHORTEST_WAIT}
    """,
    f"""
    CREATE OR REPLACE TEMPORARY VIEW publish_wait AS
    SELECT run, 'slowest' AS what, sent_at AS began, ended_at AS ended FROM sent
    WHERE ended_at - sent_at > {SHORTEST_WAIT} AND role <> 'blocked'
    """,
    # The same for the arrivals of messages that are due.
    f"""
    CREATE OR REPLACE TEMPORARY VIEW delivery_wait AS
    SELECT run, 'undelivered' AS what, greatest(since, coalesce(before, since)) AS began, first_at AS ended
    FROM (
        SELECT a.run, a.first_at,
               max(a.first_at) OVER (PARTITION BY a.run, a.place ORDER BY a.first_at
                                     ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before,
               min(e.last_due) OVER (PARTITION BY a.run, a.place ORDER BY a.first_at
                                     ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS since
        FROM arrival a JOIN expectation e ON e.run = a.run AND e.id = a.id AND e.place = a.place
        WHERE e.must = 1 AND e.role <> 'blocked'
    ) AS ordered WHERE first_at - greatest(since, coalesce(before, since)) > {SHORTEST_WAIT}
    """,
    """
    CREATE OR REPLACE TEMPORARY VIEW wait AS
    SELECT * FROM confirm_wait UNION ALL SELECT * FROM publish_wait UNION ALL SELECT * FROM delivery_wait
    """,
)
"""Views that the query reads, in the order in which they have to be created, after those of the rules."""

LONGEST_WAITS: Final = """
    SELECT during, coalesce(max(CASE WHEN what = 'unconfirmed' THEN length END), 0) AS unconfirmed,
           coalesce(max(CASE WHEN what = 'slowest' THEN length END), 0) AS slowest,
           coalesce(max(CASE WHEN what = 'undelivered' THEN length END), 0) AS undelivered
    FROM (
        SELECT DISTINCT kind AS during, '' AS what, 0 AS length FROM faults
        UNION ALL SELECT '' AS during, '' AS what, 0 AS length
        UNION ALL
        SELECT coalesce(f.kind, '') AS during, w.what, w.ended - w.began AS length
        FROM wait w LEFT JOIN faults f ON f.run = w.run AND f.began <= w.ended AND f.ended >= w.began
    ) AS found GROUP BY during ORDER BY during
"""
"""The rows of :class:`bide.check.judgement.LongestWaits`."""
