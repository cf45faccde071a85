"""Generated tables of an audit with ties, nulls, odd names and wrong times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import parquet

from tests.spark.audit_tables import FIRST, SCHEMAS

_MOMENT: Final = pa.timestamp("us", tz="UTC")
_SCHEMAS: Final = {
    **SCHEMAS,
    "occurrences": pa.schema(
        [("target", pa.string()), ("due", _MOMENT), ("outcome", pa.string()), ("lateness_ms", pa.float64())]
    ),
    "schedules_pending": SCHEMAS["pending"],
    "undecodable": pa.schema(
        [("stream", pa.string()), ("offset", pa.int64()), ("reason", pa.string()), ("seen", _MOMENT)]
    ),
}
_WRONG: Final = (datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC))
_NAMES: Final = (
    *(f"q:{number}" for number in range(14)),
    "q:'quoted' \\n \"twice\"",
    "q:${env:HOME}",
    "q::targets",
    "q:{curly}",
    "q:Ünïcode \U0001f40b",
    "",
    None,
)
_OUTCOMES: Final = (
    *("delivered", "processed", "failed", "overdue", "scheduled") * 2,
    *("cancelled", "superseded", "skipped", "undeliverable", "unknown", None),
)
_LATE: Final = (0.0, -3.0, 0.4, 1.0, 7.0, 7.0, 10.0, 1000.0, 86_400_000.0)
"""Edges of the steps of the histogram, and values that tie."""


def write_generated(folder: Path, *, seed: int, rows: int, days: float = 3.0) -> None:
    """Write all tables with about this many messages.

    Args:
        days: the time over which the messages are spread.
    """
    chance = random.Random(seed)
    _write(folder, "messages", [_message(chance, number, days) for number in range(rows)])
    few = max(rows // 4, 3)
    for name in ("pending", "schedules_pending"):
        _write(folder, name, [_pending(chance, days) for _ in range(few)])
    failed = [_failed(chance, days) for _ in range(few)]
    # An endpoint publishes an event again when a confirm is lost.
    _write(folder, "failed", failed + failed[::3])
    _write(folder, "failures", [_failure(chance, number, days) for number in range(16)])
    _write(folder, "occurrences", [_occurrence(chance, days) for _ in range(few)])
    _write(folder, "undecodable", [_undecodable(chance, number, days) for number in range(few)])


def _write(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write a table with a folder for each of two days, as an audit does."""
    for day, part in (("2026-11-18", rows[::2]), ("2026-11-19", rows[1::2])):
        place = folder / name / f"day={day}"
        place.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(list(part), _SCHEMAS[name]), place / "part-00000.parquet")


def _time(chance: random.Random, days: float) -> datetime | None:
    """A time: often a round one, sometimes unknown, rarely wrong."""
    kind = chance.random()
    if kind < 0.05:
        return None
    if kind < 0.06:
        return chance.choice(_WRONG)
    span = timedelta(days=days)
    if kind < 0.4:
        return FIRST + span * (chance.randrange(24) / 24)
    return FIRST + timedelta(microseconds=chance.randrange(max(span // timedelta(microseconds=1), 1)))


def _lateness(chance: random.Random) -> float | None:
    if chance.random() < 0.3:
        return None
    return chance.choice(_LATE) if chance.random() < 0.5 else round(chance.lognormvariate(3, 2), 3)


def _message(chance: random.Random, number: int, days: float) -> dict[str, Any]:
    names = ("scheduled", "due", "delivered")
    # The wrong times of a client are due times only: the broker notes the others.
    times = {name: _time(chance, days) for name in names}
    times |= {name: None for name in ("scheduled", "delivered") if times[name] in _WRONG}
    return {
        **times,
        "message_id": None if chance.random() < 0.02 else f"m{number // 2}",
        "target": _name(chance),
        "type": chance.choice((*(f"T{one}" for one in range(8)), "", None, "it's")),
        "lateness_ms": None if times["delivered"] is None else _lateness(chance),
        "outcome": chance.choice(_OUTCOMES),
    }


def _name(chance: random.Random) -> str | None:
    # The first ones are chosen most often.
    return (
        _NAMES[min(int(chance.expovariate(0.2)), len(_NAMES) - 1)] if chance.random() < 0.8 else chance.choice(_NAMES)
    )


def _pending(chance: random.Random, days: float) -> dict[str, Any]:
    due = _time(chance, days) or FIRST
    hour = due.replace(minute=0, second=0, microsecond=0)
    count = chance.randrange(4)
    return {"target": _name(chance), "due_hour": hour, "count": count, "overdue": chance.randrange(count + 1)}


def _failed(chance: random.Random, days: float) -> dict[str, Any]:
    ended = _time(chance, days)
    return {
        "message_id": f"m{chance.randrange(9)}",
        "endpoint": chance.choice(("a", "b", None)),
        "kind": chance.choice(("retried", "parked", "expired", None)),
        "started": ended,
        "ended": ended,
        "text": chance.choice((None, "", "x" * 300, "é" * 239 + "\U0001f40b!", "'quoted' \\ text", "other")),
        "group": chance.choice((*(f"g{one}" for one in range(15)), None)),
    }


def _failure(chance: random.Random, number: int, days: float) -> dict[str, Any]:
    first, last = _time(chance, days) or FIRST, _time(chance, days) or FIRST
    return {
        "group": None if number == 15 else f"g{number}",
        "exception": chance.choice(("E", "F", None)),
        "endpoint": chance.choice(("a", "b", None)),
        "count": chance.randrange(1, 5),
        "messages": chance.randrange(1, 5),
        "first_seen": min(first, last),
        "last_seen": max(first, last),
        "recent": chance.randrange(3),
        "before": chance.randrange(3),
    }


def _occurrence(chance: random.Random, days: float) -> dict[str, Any]:
    return {
        "target": _name(chance),
        "due": _time(chance, days) or FIRST,
        "outcome": chance.choice(("delivered", "cancelled", "superseded", "skipped", "undeliverable", "unknown")),
        "lateness_ms": _lateness(chance),
    }


def _undecodable(chance: random.Random, number: int, days: float) -> dict[str, Any]:
    seen = _time(chance, days)
    return {
        "stream": chance.choice(("bide.events", "tap")),
        "offset": number,
        "reason": f"reason {chance.randrange(9)}",
        "seen": FIRST if seen is None or seen in _WRONG else seen,
    }
