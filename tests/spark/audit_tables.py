"""Example tables of an audit: three days of a shop that sends reminders."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import parquet

FIRST: Final = datetime(2026, 11, 18, 6, 0, tzinfo=UTC)
LAST: Final = FIRST + timedelta(days=3)

_MOMENT: Final = pa.timestamp("us", tz="UTC")
SCHEMAS: Final[Mapping[str, pa.Schema]] = {
    "messages": pa.schema(
        [
            *((name, pa.string()) for name in ("message_id", "target", "type")),
            *((name, _MOMENT) for name in ("sent", "scheduled", "due", "delivered")),
            ("lateness_ms", pa.float64()),
            ("attempts", pa.int32()),
            ("outcome", pa.string()),
        ]
    ),
    "pending": pa.schema(
        [("target", pa.string()), ("due_hour", _MOMENT), ("count", pa.int64()), ("overdue", pa.int64())]
    ),
    "failures": pa.schema(
        [
            *((name, pa.string()) for name in ("group", "exception", "endpoint")),
            *((name, pa.int64()) for name in ("count", "messages")),
            *((name, _MOMENT) for name in ("first_seen", "last_seen")),
            *((name, pa.int64()) for name in ("recent", "before")),
            ("trend", pa.float64()),
        ]
    ),
    "failed": pa.schema(
        [
            *((name, pa.string()) for name in ("message_id", "endpoint", "kind")),
            ("started", _MOMENT),
            ("ended", _MOMENT),
            *((name, pa.string()) for name in ("exception", "text", "group")),
        ]
    ),
}

_TARGETS: Final = (
    ("q:orders", 50),
    ("q:reviews", 24),
    ("x:shop", 14),
    ("q:invoices", 8),
    ("q:night-audit", 3),
    ("q:odd", 1),
)
_TYPES: Final = (("SendReminder", 5), ("ExpireCart", 8), ("AskForReview", 10))
"""Types, each with the last digits of the numbers of its messages: below this number, and not of a type before."""

_FAILURES: Final = (
    ("Timeout", "payments", "no answer from the bank within 30 s", 400, 0.0, 1.0),
    ("KeyError", "orders", "'customer_id'", 130, 0.55, 0.7),
    ("IntegrityError", "invoices", "duplicate key value violates the constraint invoices_pkey", 60, 0.2, 0.95),
    ("ValidationError", "reviews", "rating must be 1 to 5, not 11", 9, 0.8, 1.0),
)

Row = Mapping[str, Any]


def write(folder: Path, name: str, rows: Sequence[Row], *, schema: str = "") -> None:
    """Write a table of the audit; columns that a row does not name are null in it.

    Args:
        schema: that of another table than the one of this name.
    """
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(list(rows), SCHEMAS[schema or name]), place / "part-00000.parquet")


def write_all(folder: Path, *, messages: int, seed: int = 1) -> None:
    """Write the tables of ``number`` messages."""
    chance = random.Random(seed)
    rows = [_message(number, chance) for number in range(messages)]
    write(folder, "messages", rows)
    write(folder, "pending", pending_of(rows))
    failed = [one for values in _FAILURES for one in _failed(chance, *values)]
    write(folder, "failed", failed)
    write(folder, "failures", failures_of(failed))


def message(number: int, *, target: str, scheduled: datetime, due: datetime, late: float) -> dict[str, Any]:
    """A message that is delivered *late* ms after it is due, unless that is after :data:`LAST`."""
    delivered = due + timedelta(milliseconds=late)
    over = delivered <= LAST
    outcome = "processed" if over and number % 3 else "delivered" if over else "overdue" if due < LAST else "scheduled"
    return {
        "message_id": f"m{number}",
        "target": target,
        "scheduled": scheduled,
        "due": due,
        "delivered": delivered if over else None,
        "lateness_ms": late if over else None,
        "outcome": outcome,
    }


def pending_of(messages: Sequence[Row]) -> list[Row]:
    """What the audit makes of messages that wait."""
    counts: dict[tuple[str, datetime], list[int]] = {}
    for one in messages:
        if one["outcome"] in ("scheduled", "overdue"):
            hour = one["due"].replace(minute=0, second=0, microsecond=0)
            pair = counts.setdefault((one["target"], hour), [0, 0])
            pair[0] += 1
            pair[1] += one["outcome"] == "overdue"
    return [
        {"target": target, "due_hour": hour, "count": count, "overdue": overdue}
        for (target, hour), (count, overdue) in counts.items()
    ]


def failures_of(failed: Sequence[Row]) -> list[Row]:
    """What the audit makes of failures."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for one in failed:
        groups.setdefault((one["group"], one["endpoint"]), []).append(one)
    last = max((one["ended"] for one in failed), default=LAST)
    hour = timedelta(hours=1)
    found: list[Row] = []
    for (group, endpoint), rows in groups.items():
        ages = [last - one["ended"] for one in rows]
        found.append(
            {
                "group": group,
                "exception": rows[0]["exception"],
                "endpoint": endpoint,
                "count": len(rows),
                "messages": len({one["message_id"] for one in rows}),
                "first_seen": min(one["ended"] for one in rows),
                "last_seen": max(one["ended"] for one in rows),
                "recent": sum(age <= hour for age in ages),
                "before": sum(hour < age <= 2 * hour for age in ages),
            }
        )
    return found


def _message(number: int, chance: random.Random) -> Row:
    names, weights = zip(*_TARGETS, strict=True)
    target = chance.choices(names, weights)[0]
    # Busy by day, quiet by night.
    while True:
        scheduled = FIRST + (LAST - FIRST) * chance.random()
        if chance.random() < (1.0 if 8 <= scheduled.hour < 20 else 0.25):
            break
    if target == "q:reviews":
        due = scheduled + timedelta(days=2, minutes=chance.randrange(60))
    elif target == "q:night-audit":
        due = (scheduled + timedelta(days=1)).replace(hour=3, minute=0, second=0, microsecond=0)
    else:
        due = scheduled + timedelta(seconds=60 + chance.expovariate(1 / 10_800))
    late = chance.lognormvariate(2.1, 0.55)
    if due.hour == 3 and due.minute < 5:
        late *= 12
    if target == "x:shop" and chance.random() < 0.004:
        late += 86_400_000
    kind = next(name for name, share in _TYPES if number % 10 < share)
    return message(number, target=target, scheduled=scheduled, due=due, late=late) | {"type": kind}


def _failed(
    chance: random.Random, kind: str, endpoint: str, text: str, count: int, begin: float, end: float
) -> list[Row]:
    whole = LAST - FIRST
    times = [FIRST + whole * (begin + (end - begin) * chance.betavariate(3, 2)) for _ in range(count)]
    return [
        {
            "message_id": f"f{kind}{number // 3}",
            "endpoint": endpoint,
            "kind": "retried" if number % 3 else "parked",
            "started": ended - timedelta(milliseconds=200),
            "ended": ended,
            "exception": kind,
            "text": text,
            "group": f"{kind} in {endpoint}",
        }
        for number, ended in enumerate(times)
    ]
