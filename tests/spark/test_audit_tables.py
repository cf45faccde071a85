"""Facts from messages, and the tables of an audit, as functions of data frames."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812 (the usual name)

from bide.durations import from_milliseconds
from bide.pipelines.audit import facts, tables
from bide.pipelines.audit.folder import Folder
from bide.spark.columns import STREAM_COLUMNS, table_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
TODAY = NOON.date()
READ = table_schema(STREAM_COLUMNS, include_headers=True)
LAYOUTS = {"tap": "celery"}


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def ms(seconds: float) -> int:
    return round(at(seconds).timestamp() * 1000)


def tapped(spark: SparkSession, *given: dict[str, Any]) -> DataFrame:
    """Messages as the data source reads them."""
    rows = []
    for offset, one in enumerate(given):
        row = {"value": b"12345", "stream": "tap", "offset": offset, "timestamp": NOON, **one}
        for column, header in (("due", "bide-due"), ("scheduled", "bide-sent")):
            if header in (row.get("headers") or {}):
                row[column] = from_milliseconds(int(row["headers"][header]))
        rows.append(tuple(row.get(name) for name in READ.names))
    return spark.createDataFrame(rows, READ)


def written(frame: DataFrame) -> DataFrame:
    """The rows as a table that was written: otherwise each query on it would plan and read all that it is made of."""
    return frame.localCheckpoint()


def values_of(frame: DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    """Values in a fixed order; times as seconds since noon, whatever the machine's zone."""
    kinds = dict(frame.dtypes)
    shown = [f"(unix_micros({c}) / 1e6 - {NOON.timestamp()}) as {c}" if kinds[c] == "timestamp" else f"`{c}`"
             for c in columns]  # fmt: skip
    return sorted((tuple(row) for row in frame.selectExpr(*shown).collect()), key=repr)


def digits(seconds: int) -> str:
    return ".".join(f"{seconds:028b}")


def native(message_id: str, *, due: float, sent: float = -1, **more: Any) -> dict[str, Any]:
    headers = {"bide-to": "q:orders", "bide-due": str(ms(due)), "bide-sent": str(ms(sent)), **more.pop("headers", {})}
    return {"message_id": message_id, "routing_key": "orders", "headers": headers, **more}


def happened(kind: str, message_id: str | None, *, ended: float, **more: Any) -> dict[str, Any]:
    event = {"endpoint": "shop", "queue": "orders", "attempt": 1, "retries": 0, "started": ms(ended - 0.2), **more}
    event |= {"event": kind, "message_id": message_id, "delivered": ms(ended - 0.3), "ended": ms(ended)}
    return {"value": json.dumps({name: value for name, value in event.items() if value is not None}).encode()}


def ended(spark: SparkSession, *given: tuple[str, float, str]) -> DataFrame:
    """Occurrences of schedules: message id, due time, and outcome."""
    rows = [
        {
            "message_id": name,
            "target": "q:orders",
            "due": at(due),
            "ended": NOON,
            "outcome": outcome,
            "day": NOON.date(),
        }
        for name, due, outcome in given
    ]
    schema = facts.SCHEMAS["occurrences"]
    return spark.createDataFrame([tuple(row.get(name) for name in schema.names) for row in rows], schema)


def test_facts_are_read_from_the_headers_of_each_system(spark: SparkSession) -> None:
    """bide's headers first, then those of their own systems, and the routing key where there is nothing else."""
    net = {
        "NServiceBus.MessageId": "net",
        "NServiceBus.TimeSent": "2026-11-21 11:59:59:250000 Z",
        "NServiceBus.Transport.RabbitMQ.DelayInSeconds": "9",
        "NServiceBus.EnclosedMessageTypes": "Shop.OrderPlaced, Shop.Messages, Version=1.0.0.0;Shop.Other",
    }
    net_again = {**net, "NServiceBus.MessageId": "net-again", "NServiceBus.Retries": "1"}
    net_due = {"NServiceBus.MessageId": "net-due", "NServiceBus.DeliverAt": "2026-11-21 11:59:50:000000 Z"}
    back = {"bide-operator-retries": "1"}
    task = {"id": "task-1", "task": "shop.remind", "eta": "2026-11-21T14:01:10.500000+02:00", "argsrepr": "()"}
    messages = tapped(
        spark,
        native("clock", due=30, headers={"bide-to": "x:shop"}, routing_key="order.created", exchange="bide.v1.in.s"),
        {"routing_key": digits(70) + ".tasks", "headers": task},
        {"routing_key": digits(9) + ".billing.orders", "headers": net, "type": ""},
        {"message_id": "other", "routing_key": digits(9) + ".orders", "headers": {"NServiceBus.DeliverAt": "soon"}},
        {"message_id": "word-x", "routing_key": digits(5) + ".~x:a%2Eb.order.created"},
        {"message_id": "word-q", "routing_key": digits(1 << 27) + ".~q:a%2Eb%25"},
        native("again", due=86_400, type="Shop.Reminder", headers={"bide-retries": "2", "bide-first-due": str(ms(-5))}),
        native("odd", due=5, headers={"bide-retries": "x", "NServiceBus.TimeSent": "yesterday", "eta": "later"}),
        native("back", due=86_400, headers={**back, "bide-first-due": str(ms(-5))}),
        native("back, never delayed", due=86_400, headers=back),
        {"routing_key": digits(9) + ".orders", "headers": net_again},
        {"routing_key": digits(9) + ".orders", "headers": net_again | net_due},
    )
    columns = ("message_id", "target", "exchange", "routing_key", "type", "sent", "due", "first_due", "retries")
    found = {row[0]: row[1:] for row in values_of(facts.scheduled(messages, LAYOUTS), *columns)}
    assert found == {
        "clock": ("x:shop", "shop", "order.created", None, -1, 30, 30, 0),
        "task-1": ("q:tasks", "", "tasks", "shop.remind", None, 70.5, 70.5, 0),
        "net": ("q:billing.orders", "", "billing.orders", "Shop.OrderPlaced", -0.75, 8.25, 8.25, 0),
        "other": ("q:orders", "", "orders", None, None, 9, 9, 0),
        "word-x": ("x:a.b", "a.b", "order.created", None, None, 5, 5, 0),
        "word-q": ("q:a.b%", "", "a.b%", None, None, 1 << 27, 1 << 27, 0),
        "again": ("q:orders", "", "orders", "Shop.Reminder", -1, 86_400, -5, 2),
        "odd": ("q:orders", "", "orders", None, -1, 5, 5, 0),
        "back": ("q:orders", "", "orders", None, -1, 86_400, -5, 0),
        "back, never delayed": ("q:orders", "", "orders", None, -1, 86_400, None, 0),
        "net-again": ("q:orders", "", "orders", "Shop.OrderPlaced", -0.75, 9, None, 1),
        "net-due": ("q:orders", "", "orders", "Shop.OrderPlaced", -0.75, 9, -10, 1),
    }
    later = facts.delivered(messages.withColumn("timestamp", F.expr("timestamp + interval 71 seconds")), LAYOUTS)
    late = {row[0]: row[1:] for row in values_of(later, "message_id", "due", "lateness_ms", "day", "layout", "size")}
    today = date(2026, 11, 21)
    assert late["clock"] == (30, 41_000, today, "celery", 5)
    assert late["task-1"] == (70.5, 500, today, "celery", 5)
    assert late["other"] == (None, None, today, "celery", 5), "the key of a delivered message contains no time"
    assert late["again"][2] == late["back"][2] == today, "the day of the sender's due time, not of the copy's"
    assert late["back, never delayed"][2] == today, "the day on which it was sent"
    assert late["net-due"][:2] == (None, None), "the due time of .NET's retry is unknown"


def test_times_out_of_range_are_ignored(spark: SparkSession, tmp_path: Path) -> None:
    """An invalid header of one message does not fail the audit of the others."""
    nanoseconds, year_10000, year_0 = "1795240800000000000", "253402300800000", "-62135596800001"
    net = {"NServiceBus.TimeSent": "2026-11-21 11:59:59:250000 Z"}
    endless = {**net, "NServiceBus.Transport.RabbitMQ.DelayInSeconds": "1000000000000"}
    late = {**endless, "NServiceBus.TimeSent": "9999-12-31 23:59:59:000000 Z"}
    late["NServiceBus.Transport.RabbitMQ.DelayInSeconds"] = "9"
    messages = tapped(
        spark,
        *(
            native(f"{name} {value}", due=5, headers={name: value})
            for name in ("bide-sent", "bide-first-due")
            for value in (nanoseconds, year_10000, year_0)
        ),
        {"message_id": "endless", "routing_key": digits(9) + ".orders", "headers": endless},
        {"message_id": "late", "routing_key": digits(9) + ".orders", "headers": late},
        {"routing_key": digits(9) + ".tasks", "headers": {"id": "task", "task": "t", "eta": "+12026-11-21T12:00:00Z"}},
        native("first of all", due=5, headers={"bide-sent": "-62135596800000"}),
    )
    found = facts.scheduled(messages, LAYOUTS)
    year_9999, year_1 = (
        datetime(*day, tzinfo=UTC).timestamp() - NOON.timestamp() for day in ((9999, 12, 31), (1, 1, 1))
    )
    expected = {
        **{f"bide-sent {value}": (None, 5, 5) for value in (nanoseconds, year_10000, year_0)},
        **{f"bide-first-due {value}": (-1, 5, 5) for value in (nanoseconds, year_10000, year_0)},
        "endless": (-0.75, 9, 9),
        "late": (year_9999 + 86_399, 9, 9),
        "task": (None, 9, 9),
        "first of all": (year_1, 5, 5),
    }
    assert {row[0]: row[1:] for row in values_of(found, "message_id", "sent", "due", "first_due")} == expected
    assert found.select(F.collect_set("day")).collect()[0][0] == [date(2026, 11, 21)]
    folder = Folder(str(tmp_path))
    for table, make in (("scheduled", facts.scheduled), ("delivered", facts.delivered)):
        folder.append(make(messages, LAYOUTS), table, 0)
        assert folder.read(spark, table, facts.SCHEMAS[table]).count() == len(expected)

    events = facts.events(
        tapped(
            spark,
            happened("processed", "m", ended=2, sent=int(nanoseconds), due=int(year_10000), started=int(year_0)),
            {"value": json.dumps({"event": "processed", "message_id": "n", "ended": int(year_10000)}).encode()},
        )
    )
    columns = ("message_id", "sent", "due", "started", "ended", "day")
    assert values_of(facts.processed(events), *columns) == [("m", None, None, None, 2, date(2026, 11, 21))]


def test_days_are_those_of_utc(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Pacific/Auckland")
    try:
        messages = tapped(spark, native("a", due=-43_200.001), native("b", due=-43_200), native("c", due=43_199))
        found = dict(values_of(facts.scheduled(messages, LAYOUTS), "message_id", "day"))
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert found == {"a": date(2026, 11, 20), "b": date(2026, 11, 21), "c": date(2026, 11, 21)}


def test_each_message_has_one_row_in_any_order_of_facts(spark: SparkSession) -> None:
    """Its complete history, in any order of its facts, with duplicates."""
    again = {"bide-retries": "1", "bide-first-due": str(ms(10))}
    back = {"bide-operator-retries": "1", "bide-first-due": str(ms(10))}
    # It had no due time before the operator retried it.
    back_alone = {"bide-operator-retries": "1"}
    other = {"message_id": "other", "routing_key": digits(9) + ".orders"}
    scheduled = [
        native("done", due=10),
        native("back", due=10),
        native("back", due=86_410, headers=back, timestamp=at(12)),
        native("retry", due=10),
        native("retry", due=20, headers=again, timestamp=at(11)),
        native("waits", due=90),
        native("gone", due=10),
        native("seen", due=10),
        native("fan", due=10, headers={"bide-to": "x:shop"}),
        native("first unseen", due=86_410, headers=back, timestamp=at(12)),
        native("first at once", due=86_410, headers=back_alone, timestamp=at(12)),
        other,
    ]
    delivered = [
        native("done", due=10, timestamp=at(10.02)),
        native("back", due=10, timestamp=at(10.03)),
        native("back", due=86_410, headers=back, timestamp=at(86_410.5)),
        native("retry", due=10, timestamp=at(10.05)),
        native("retry", due=20, headers=again, timestamp=at(20.5)),
        native("seen", due=10, timestamp=at(10.01)),
        native("fan", due=10, timestamp=at(10.01)),
        native("first unseen", due=86_410, headers=back, timestamp=at(86_410.5)),
        native("first at once", due=86_410, headers=back_alone, timestamp=at(86_410.5)),
        other | {"timestamp": at(9.04)},
    ]
    due, sent = ms(10), ms(-1)
    events = [
        happened("processed", "done", ended=10.5, due=due, sent=sent, message_type="reminder"),
        happened("parked", "back", ended=11, due=due, sent=sent, exception="ValueError", group="g"),
        happened("processed", "back", ended=86_411, due=due, sent=sent),
        happened("duplicate", "done", ended=30, due=due, sent=sent, started=None),
        happened("failed", "retry", ended=10.5, due=due, sent=sent, exception="ValueError", group="g"),
        happened("retried", "retry", ended=10.9, due=due, sent=sent, attempt=2, exception="ValueError", group="g"),
        happened("processed", "retry", ended=21, due=due, sent=sent, retries=1),
        happened("parked", "fan", ended=11, due=due, sent=sent, exception="KeyError", group="h"),
        happened("processed", "fan", ended=12, due=due, sent=sent, endpoint="mail"),
        happened("processed", "at once", ended=3, sent=ms(1)),
        {"value": b"not an event"},
        {"value": b"not UTF-8: \xff"},
    ]

    occurrences = [
        ("done", 10.0, "delivered"),
        ("cancelled", 90.0, "cancelled"),
        ("replaced", 80.0, "superseded"),
        ("replaced", 85.0, "delivered"),
        ("replaced", 95.0, "cancelled"),
        ("set aside", 5.0, "undeliverable"),
    ]

    def table(*order: int) -> list[tuple[Any, ...]]:
        told_events = written(facts.events(tapped(spark, *(events * len(order))[:: order[-1]])))
        found = tables.messages(
            written(facts.scheduled(tapped(spark, *scheduled[:: order[0]]), LAYOUTS)),
            written(facts.delivered(tapped(spark, *delivered[:: order[0]]), LAYOUTS)),
            written(facts.processed(told_events)),
            written(facts.failed(told_events)),
            ended(spark, *occurrences[:: order[0]]),
            now=at(30),
        )
        assert found.dtypes == [(one.name, one.dataType.simpleString()) for one in tables.MESSAGES_SCHEMA]
        return values_of(
            found,
            *("message_id", "target", "type", "scheduled", "due", "lateness_ms", "attempts", "outcome", "endpoint"),
            *("critical_ms", "processing_ms", "delivery_ms"),
        )

    once = table(1, 1)
    assert once == [
        ("at once", "q:orders", None, None, None, None, 1, "processed", "shop", 2000, 200, 1800),
        ("back", "q:orders", None, 0, 10, 30, 2, "processed", "shop", 86_401_000, 200, 86_400_800),
        ("cancelled", "q:orders", None, None, 90, None, 0, "cancelled", None, None, None, None),
        ("done", "q:orders", "reminder", 0, 10, 20, 1, "processed", "shop", 500, 200, 300),
        ("fan", "x:shop", None, 0, 10, 10, 2, "parked", "shop", None, None, None),
        ("first at once", "q:orders", None, None, None, None, 0, "delivered", None, None, None, None),
        ("first unseen", "q:orders", None, None, 10, None, 0, "delivered", None, None, None, None),
        ("gone", "q:orders", None, 0, 10, None, 0, "overdue", None, None, None, None),
        ("other", "q:orders", None, 0, 9, 40, 0, "delivered", None, None, None, None),
        ("replaced", "q:orders", None, None, 80, None, 0, "delivered", None, None, None, None),
        ("retry", "q:orders", None, 0, 10, 50, 3, "processed", "shop", 11_000, 200, 10_800),
        ("seen", "q:orders", None, 0, 10, 10, 0, "delivered", None, None, None, None),
        ("set aside", "q:orders", None, None, 5, None, 0, "undeliverable", None, None, None, None),
        ("waits", "q:orders", None, 0, 90, None, 0, "scheduled", None, None, None, None),
    ]
    assert table(-1, -1) == once, "in the opposite order, each event twice"


def test_pending_messages_are_counted_by_target_and_hour(spark: SparkSession) -> None:
    nowhere = {"message_id": "nowhere", "routing_key": "orders", "headers": {"bide-due": str(ms(4))}}
    sent = tapped(
        spark,
        *(native(f"m-{number}", due=number) for number in range(20)),
        native("twice", due=3600),
        native("twice", due=7200),
        native("late", due=3605),
        nowhere,
        {"message_id": None, "routing_key": digits(5) + ".orders"},
    )
    come = tapped(
        spark, *(native(f"m-{number}", due=number) for number in range(12)), native("twice", due=3600), nowhere
    )
    scheduled = written(facts.scheduled(sent, LAYOUTS))
    delivered = written(facts.delivered(come, LAYOUTS))
    assert values_of(scheduled.where("message_id = 'nowhere'"), "target", "due") == [(None, 4)]
    nothing = tapped(spark).transform(facts.events)
    none = (written(facts.processed(nothing)), written(facts.failed(nothing)), ended(spark))

    def counted(seconds: float) -> DataFrame:
        now = at(seconds)
        found = tables.messages(scheduled, delivered, *none, now=now)
        return written(tables.pending_parts(written(found.withColumn("batch", F.lit(3))), now=now))

    parts = counted(25)
    # 12 to 15 are due for ten seconds and more.
    assert values_of(parts, "due", "count", "overdue") == [(10, 8, 4), (3600, 1, 0), (7200, 1, 0)]
    assert values_of(tables.pending(parts), "target", "due_hour", "count", "overdue") == [
        ("q:orders", 0, 8, 4),
        ("q:orders", 3600, 1, 0),
        ("q:orders", 7200, 1, 0),
    ]
    today = date(2026, 11, 21)
    assert values_of(tables.newly_overdue(parts, now=at(29)), "day") == []
    found = values_of(tables.newly_overdue(parts, now=at(30)), "day", "batch")
    assert found == [(today, 3)], "all of a slice are overdue, and four were"
    assert values_of(tables.newly_overdue(counted(30), now=at(3000)), "day") == [], (
        "what is known to be overdue is not counted again"
    )


def test_lateness_is_aggregated_by_minute_and_target(spark: SparkSession) -> None:
    released = [native(f"m-{number}", due=61, timestamp=at(61 + number / 1000)) for number in range(101)]
    released += [native("x", due=119.9, timestamp=at(200)), native("y", due=120, timestamp=at(120.5))]
    released.append(native("again", due=62, timestamp=at(99), headers={"bide-retries": "1"}))
    back = {"bide-operator-retries": "1"}
    released.append(native("back", due=63, timestamp=at(199), headers={**back, "bide-first-due": str(ms(10))}))
    released.append(native("back, never delayed", due=63, timestamp=at(299), headers=back))
    found = tables.lateness(facts.delivered(tapped(spark, *released), LAYOUTS))
    later, first = values_of(found, "minute", "target", "count", "p50_ms", "p95_ms", "p99_ms", "max_ms")
    assert later == (120, "q:orders", 1, 500, 500, 500, 500)
    assert first[:3] == (60, "q:orders", 102)
    assert first[3:] == pytest.approx((50.5, 95.95, 99.99, 80_100))


def test_failures_are_grouped(spark: SparkSession) -> None:
    def fails(message_id: str | None, ended: float, **more: Any) -> dict[str, Any]:
        return happened("failed", message_id, ended=ended, due=ms(0), exception="ValueError", group="g", **more)

    events = facts.events(
        tapped(
            spark,
            *(fails("a", 60 * minute) for minute in (1, 2, 59, 61, 62)),
            *(fails("b", 60 * minute, retries=minute) for minute in (61, 61, 118)),
            fails("c", -9_000),
            *(fails(None, 60 * 118 + second) for second in (1, 2)),
            happened("expired", "d", ended=7_000, due=ms(0)),
            happened("parked", "d", ended=60, due=ms(0), exception="KeyError", group="h", endpoint="mail"),
        )
    )
    parts = tables.failures_parts(facts.failed(events))
    columns = ("group", "exception", "endpoint", "count", "messages", "first_seen", "last_seen", "recent", "before")
    assert values_of(tables.failures(parts), *columns, "trend") == [
        ("g", "ValueError", "shop", 10, 5, -9_000, 7_082, 7, 2, 3.5),
        ("h", "KeyError", "mail", 1, 1, 60, 60, 0, 1, 0.0),
    ]
