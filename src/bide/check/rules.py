"""The promises of bide as SQL queries, which return the messages that break them.

The same queries run in DuckDB and in Spark. ``{lateness}`` stands for the lateness that is allowed outside faults, in
microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BROKER_TICK: Final = 1_000
"""Microseconds. RabbitMQ counts whole milliseconds, so a wait may be one millisecond too short."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A promise.

    Attributes:
        name: one word.
        promise: the statement that holds if the query returns no rows.
        query: returns run, id, place, workload, and ``off`` of :class:`bide.check.judgement.BrokenPromise`.
    """

    name: str
    promise: str
    query: str


VIEWS: Final = (
    # One row for each message and queue. A retry that was recorded several times has several due times.
    """
    CREATE OR REPLACE TEMPORARY VIEW expectation AS
    SELECT run, id, place, min(workload) AS workload, min(role) AS role,
           max(CASE WHEN expected = 'delivered' THEN 1 ELSE 0 END) AS must,
           min(CASE WHEN expected = 'nothing' THEN 1 ELSE 0 END) AS must_not,
           min(sent_at) AS sent_at, min(due) AS due, max(due) AS last_due, max(due_error) AS due_error,
           max(attempts) AS attempts, min(routing_key) AS routing_key, min(body) AS body, min(headers) AS headers
    FROM sent GROUP BY run, id, place
    """,
    """
    CREATE OR REPLACE TEMPORARY VIEW arrival AS
    SELECT run, id, place, count(*) AS copies, min(received_at) AS first_at, max(received_at) AS last_at,
           sum(CASE WHEN redelivered THEN 1 ELSE 0 END) AS redelivered
    FROM delivered WHERE place <> 'undeliverable' GROUP BY run, id, place
    """,
    # Periods in which messages may be late. Faults that follow each other closely share one period.
    """
    CREATE OR REPLACE TEMPORARY VIEW disturbance AS
    WITH ordered AS (
        SELECT run, began, settled,
               max(settled) OVER (PARTITION BY run ORDER BY began, settled
                                  ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
        FROM faults WHERE late
    ), numbered AS (
        SELECT run, began, settled,
               sum(CASE WHEN began <= before + {lateness} THEN 0 ELSE 1 END)
                   OVER (PARTITION BY run ORDER BY began, settled
                         ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS island
        FROM ordered
    )
    SELECT run, min(began) AS began, max(settled) AS settled FROM numbered GROUP BY run, island
    """,
    # Arrivals that exceed the allowed lateness, which counts from the due time or from the end of a period of faults.
    """
    CREATE OR REPLACE TEMPORARY VIEW overdue AS
    SELECT run, id, place, workload, role, first_at - due AS off FROM (
        SELECT e.run, e.id, e.place, e.workload, e.role, max(a.first_at) AS first_at, max(e.last_due) AS due,
               max(d.settled) AS settled
        FROM expectation e
        JOIN arrival a ON a.run = e.run AND a.id = e.id AND a.place = e.place
        LEFT JOIN disturbance d
               ON d.run = e.run AND d.began <= e.last_due + {lateness} AND d.settled >= e.last_due
        WHERE a.first_at > e.last_due + {lateness}
        GROUP BY e.run, e.id, e.place, e.workload, e.role
    ) AS candidate WHERE first_at > greatest(due, coalesce(settled, due)) + {lateness}
    """,
    f"""
    CREATE OR REPLACE TEMPORARY VIEW early AS
    SELECT e.run, e.id, e.place, e.workload, max(e.due - e.due_error - {BROKER_TICK} - a.first_at) AS off,
           coalesce(sum(f.clock_step), 0) AS allowed
    FROM expectation e
    JOIN arrival a ON a.run = e.run AND a.id = e.id AND a.place = e.place
    LEFT JOIN faults f ON f.run = e.run AND f.clock_step > 0 AND f.began <= a.first_at AND f.settled >= e.sent_at
    WHERE a.first_at < e.due - e.due_error - {BROKER_TICK}
    GROUP BY e.run, e.id, e.place, e.workload
    """,
    """
    CREATE OR REPLACE TEMPORARY VIEW forbidden AS
    SELECT e.run, e.id, e.place, e.workload, count(*) AS off
    FROM expectation e JOIN delivered d ON d.run = e.run AND d.id = e.id AND d.place = e.place
    WHERE e.must_not = 1 GROUP BY e.run, e.id, e.place, e.workload
    """,
    """
    CREATE OR REPLACE TEMPORARY VIEW missing AS
    SELECT e.run, e.id, e.place, e.workload, e.role, 0 AS off FROM expectation e
    WHERE e.must = 1 AND NOT EXISTS (
        SELECT 1 FROM delivered d
        WHERE d.run = e.run AND d.id = e.id AND (d.place = e.place OR d.place = 'undeliverable'))
    """,
)
"""Views that the rules read, in the order in which they have to be created."""

_COLUMNS: Final = "run, id, place, workload, off"

RULES: Final = (
    Rule(
        "lost",
        "confirmed messages were delivered, undeliverable or cancelled",
        f"SELECT {_COLUMNS} FROM missing WHERE workload <> 'gate' AND role <> 'neighbour'",
    ),
    Rule(
        "early",
        "nothing was early by more than the error of a node's clock",
        f"SELECT {_COLUMNS} FROM early WHERE off > allowed",
    ),
    Rule(
        "late",
        "outside faults, nothing was later than the bound",
        f"SELECT {_COLUMNS} FROM overdue WHERE role = 'message'",
    ),
    Rule(
        "twice",
        "nothing came twice, except as documented",
        """
        SELECT e.run, e.id, e.place, e.workload, a.copies AS off
        FROM arrival a JOIN expectation e ON e.run = a.run AND e.id = a.id AND e.place = a.place
        WHERE a.copies - a.redelivered > 1 AND e.attempts = 1 AND NOT (e.workload = 'gate' AND e.role = 'blocked')
          AND NOT EXISTS (
            SELECT 1 FROM faults f
            WHERE f.run = a.run AND f.twice AND f.began <= a.last_at AND f.settled >= e.sent_at
              AND (f.kind <> 'kill-process' OR f.what LIKE concat(e.workload, '-%')))
        """,
    ),
    Rule(
        "refused",
        "refused messages were never delivered",
        f"SELECT {_COLUMNS} FROM forbidden WHERE workload <> 'gate'",
    ),
    Rule(
        "changed",
        "bodies, routing keys and headers were equal",
        """
        SELECT e.run, e.id, e.place, e.workload, count(*) AS off
        FROM expectation e JOIN delivered d ON d.run = e.run AND d.id = e.id AND d.place = e.place
        WHERE d.body <> e.body OR d.headers <> e.headers OR d.routing_key <> e.routing_key
        GROUP BY e.run, e.id, e.place, e.workload
        """,
    ),
    Rule(
        "strange",
        "no queue received a message that was not sent to it",
        """
        SELECT a.run, a.id, a.place, '' AS workload, a.copies AS off FROM arrival a
        WHERE NOT EXISTS (
            SELECT 1 FROM sent s WHERE s.run = a.run AND s.id = a.id AND s.place = a.place)
        """,
    ),
    Rule(
        "schedules",
        "each schedule was delivered, cancelled or replaced as its answer said",
        f"""
        SELECT {_COLUMNS} FROM forbidden WHERE workload = 'gate'
        UNION ALL SELECT {_COLUMNS} FROM missing WHERE workload = 'gate'
        UNION ALL SELECT run, id, place, workload, 0 AS off FROM sent WHERE expected = 'impossible'
        """,
    ),
    Rule(
        "neighbours",
        "a bad target harmed no message to another target",
        f"""
        SELECT {_COLUMNS} FROM overdue WHERE role = 'neighbour'
        UNION ALL SELECT {_COLUMNS} FROM missing WHERE role = 'neighbour'
        """,
    ),
)

SUMMARY: Final = """
    SELECT e.workload, count(*) AS sent, sum(e.must) AS confirmed, sum(e.must_not) AS refused,
           count(a.id) AS delivered, coalesce(sum(CASE WHEN a.copies > 1 THEN 1 ELSE 0 END), 0) AS twice,
           coalesce(max(a.first_at - e.due), 0) AS latest
    FROM expectation e LEFT JOIN arrival a ON a.run = e.run AND a.id = e.id AND a.place = e.place
    GROUP BY e.workload ORDER BY e.workload
"""
"""The rows of :class:`bide.check.judgement.WorkloadFigures`."""

FAULTS: Final = "SELECT kind, count(*) AS number FROM faults GROUP BY kind ORDER BY kind"

UNDELIVERABLE: Final = "SELECT count(DISTINCT id) AS number FROM delivered WHERE place = 'undeliverable'"

BY_CLOCK: Final = "SELECT count(*) AS number, coalesce(max(off), 0) AS most FROM early WHERE off <= allowed"
"""Messages that were early because the clock of a node was wrong."""

DUE_ERROR: Final = "SELECT coalesce(max(due_error), 0) AS most FROM sent"
