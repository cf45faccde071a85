"""Tables of facts from taps, events and schedules, with one row per delivery or event.

The columns come from the message itself, published by bide, NServiceBus or Celery. If a message has no due time, the
delay in its routing key is used. An invalid time or delay is read as null, so that one such message does not end the
audit of all others.

Each fact has a ``day``: that of the due time that the sender gave, or else that of the time of sending. It is the same
for all facts of a message, no matter when they arrive. The tables are partitioned by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 (the usual name)
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DateType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from bide.delay.cascade_keys import HEADER_DELAY, LEVELS
from bide.delay.nservicebus import NATIVE_MESSAGE_ID
from bide.delay.protocol import HEADER_EXCHANGE, HEADER_ROUTING_KEY, HEADER_SENT, HEADER_TO
from bide.durations import EARLIEST, LATEST_MILLISECOND, to_milliseconds
from bide.recoverability.history import (
    HEADER_FIRST_DUE,
    HEADER_RETRIED_BY,
    HEADER_RETRIES,
    NSERVICEBUS_DUE,
    NSERVICEBUS_RETRIES,
    NSERVICEBUS_SENT,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_TYPES: Final[Mapping[str, DataType]] = {
    "string": StringType(),
    "int": IntegerType(),
    "long": LongType(),
    "double": DoubleType(),
    "timestamp": TimestampType(),
    "date": DateType(),
    "binary": BinaryType(),
}


def schema_of(columns: str) -> StructType:
    """A schema from names and types, separated by commas. (Spark's own parser needs a running session.)"""
    pairs = (column.split() for column in columns.split(","))
    return StructType([StructField(name, _TYPES[kind]) for name, kind in pairs])


_TAPPED: Final = "stream string, offset long, day date"

SCHEMAS: Final[Mapping[str, StructType]] = {
    name: schema_of(f"{columns}, {_TAPPED}")
    for name, columns in {
        "scheduled": "message_id string, target string, sent timestamp, scheduled timestamp, due timestamp, "
        "first_due timestamp, retries int, exchange string, routing_key string, type string, size int, layout string",
        "delivered": "message_id string, target string, sent timestamp, delivered timestamp, due timestamp, "
        "first_due timestamp, retries int, lateness_ms double, type string, size int, layout string",
        "processed": "message_id string, endpoint string, queue string, attempt int, retries int, sent timestamp, "
        "due timestamp, delivered timestamp, started timestamp, ended timestamp, type string",
        "failed": "message_id string, endpoint string, queue string, kind string, attempt int, retries int, "
        "sent timestamp, due timestamp, delivered timestamp, started timestamp, ended timestamp, exception string, "
        "text string, group string, delay_ms double, type string",
        "occurrences": "message_id string, occurrence string, schedule_id string, key string, version string, "
        "target string, type string, nominal timestamp, due timestamp, scheduled timestamp, claimed timestamp, "
        "ended timestamp, outcome string, lateness_ms double",
    }.items()
}
"""The columns of each table, in order; the tables are partitioned by ``day``."""

FAILED_KINDS: Final = ("failed", "retried", "parked", "discarded", "expired")
"""The kinds of events in the table ``failed``. A ``duplicate`` is not a failure: its message was processed before."""

UNDECODABLE: Final = schema_of(f"reason string, seen timestamp, size int, value binary, {_TAPPED}")
"""The columns of the table ``undecodable``, which has messages that are not AMQP 1.0 as raw bytes."""

_MARK: Final = "undecodable"
"""The column that :func:`mark_undecodable` adds to messages; it is passed on to their facts."""

_EVENT: Final = (
    "event string, endpoint string, queue string, message_id string, message_type string, attempt int, retries int, "
    "sent long, due long, delivered long, started long, ended long, exception string, text string, group string, "
    "delay double"
)
_DELAYED_KEY: Final = rf"(?s)^((?:[01]\.){{{LEVELS}}})(.*)$"
_TARGET_WORD: Final = r"(?s)^~([qx]):([^.]*)(?:\.(.*))?$"
_NSERVICEBUS_TIME: Final = "yyyy-MM-dd HH:mm:ss:SSSSSS X"
_DAY: Final = 86_400
_LONGEST_DELAY: Final = (1 << LEVELS) - 1
_CALENDAR: Final = (to_milliseconds(EARLIEST), LATEST_MILLISECOND)
"""The first and the last millisecond that Python can represent; Spark has earlier and later ones."""


def mark_undecodable(messages: DataFrame) -> DataFrame:
    """Add a column with the fields of the table :data:`UNDECODABLE`; it is null for messages that can be decoded.

    Args:
        messages: read by the data source ``rabbitmq`` with the option ``undecodable=raw``.
    """
    seen = F.col("timestamp").alias("seen")
    fields = F.struct(F.col(_MARK).alias("reason"), seen, F.octet_length("value").alias("size"), "value")
    return messages.withColumn(_MARK, F.when(F.col(_MARK).isNotNull(), fields))


def undecodable(facts: DataFrame) -> DataFrame:
    """The table ``undecodable``, from facts of messages with the column of :func:`mark_undecodable`."""
    found = facts.where(F.col(_MARK).isNotNull()).select(f"{_MARK}.*", "stream", "offset")
    return found.withColumn("day", day_of(F.col("seen"))).select(*UNDECODABLE.names)


def decoded(facts: DataFrame, table: str) -> DataFrame:
    """The facts of messages that can be decoded, with the columns of a table."""
    return facts.where(F.col(_MARK).isNull()).select(*SCHEMAS[table].names)


def scheduled(messages: DataFrame, layouts: Mapping[str, str]) -> DataFrame:
    """The table ``scheduled``.

    Args:
        messages: read from taps by the data source ``rabbitmq``, with headers.
        layouts: the layout of each stream of a tap.
    """
    fields = _fields(messages, layouts, arrived="scheduled")
    # The routing key has the length of the delay, which starts at the time of this tap. (For a delivered message, the
    # start is not known.)
    due = F.coalesce("due", F.col("scheduled") + F.make_dt_interval(secs=F.col("seconds")))
    fields = fields.withColumn("due", _in_calendar(due)).withColumn("first_due", _first_due())
    return _with_day(fields, "scheduled", seen=F.col("scheduled"))


def delivered(messages: DataFrame, layouts: Mapping[str, str]) -> DataFrame:
    """The table ``delivered``. The due time is null if the message does not have it.

    Args:
        messages: read from taps by the data source ``rabbitmq``, with headers.
        layouts: the layout of each stream of a tap.
    """
    fields = _fields(messages, layouts, arrived="delivered").withColumn("first_due", _first_due())
    late = (F.unix_micros("delivered") - F.unix_micros("due")) / F.lit(1000.0)
    return _with_day(fields.withColumn("lateness_ms", late), "delivered", seen=F.col("delivered"))


def events(messages: DataFrame) -> DataFrame:
    """Events of endpoints as columns; other messages are left out.

    Args:
        messages: read from the events stream by the data source ``rabbitmq``.
    """
    # try_cast, because a cast of bytes that are not UTF-8 will fail in a later Spark (SPARK-54586) and end the round.
    event = F.from_json(F.col("value").try_cast("string"), _EVENT)
    origin = ("stream", "offset", *_mark_of(messages))
    fields = messages.select(event.alias("fields"), *origin).select("fields.*", *origin)
    is_event = F.col("event").isNotNull() & F.col("ended").isNotNull()
    times = {name: _time(F.col(name)) for name in ("sent", "due", "delivered", "started", "ended")}
    return (
        fields.withColumns(times)
        .where(reduce(or_, (F.col(name).isNotNull() for name in _mark_of(messages)), is_event))
        .withColumns({"kind": F.col("event"), "type": F.col("message_type"), "delay_ms": F.col("delay")})
        .withColumn("day", day_of(F.coalesce("due", "sent", "delivered", "ended")))
    )


def processed(events: DataFrame) -> DataFrame:
    """The table ``processed``, from :func:`events`."""
    return events.where(F.col("kind") == "processed").select(*SCHEMAS["processed"].names)


def failed(events: DataFrame) -> DataFrame:
    """The table ``failed``, from :func:`events`."""
    return events.where(F.col("kind").isin(*FAILED_KINDS)).select(*SCHEMAS["failed"].names)


def day_of(time: Column) -> Column:
    """The day of a time in UTC, in any time zone of the session, so that all sessions use the same partitions."""
    return F.date_from_unix_date(F.floor(F.unix_seconds(time) / _DAY).cast("int"))


def _fields(messages: DataFrame, layouts: Mapping[str, str], *, arrived: str) -> DataFrame:
    """The fields of delayed messages, by the rules of ``bide.delay.received`` and of NServiceBus and Celery."""
    key, address = (F.regexp_extract("routing_key", _DELAYED_KEY, group) for group in (1, 2))
    word, name, rest = (F.regexp_extract("address", _TARGET_WORD, group) for group in (1, 2, 3))
    named = F.replace(F.replace(name, F.lit("%2E"), F.lit(".")), F.lit("%25"), F.lit("%"))
    parsed = messages.withColumns(
        {
            "digits": F.replace(key, F.lit("."), F.lit("")),
            "address": address,
            "task": _header("task"),
            "retries": F.coalesce(_count(HEADER_RETRIES), _count(NSERVICEBUS_RETRIES), F.lit(0)),
            "returned": F.coalesce(_count(HEADER_RETRIED_BY), F.lit(0)),
            "net_due": _in_calendar(_nservicebus_time(NSERVICEBUS_DUE)),
            "net_sent": _in_calendar(_nservicebus_time(NSERVICEBUS_SENT)),
        }
    ).withColumns({"word": word, "named": named, "rest": rest})
    cascaded = F.col("digits") != ""
    has_target = F.col("word") != ""
    to = F.when(has_target, F.concat_ws(":", "word", "named")).when(cascaded, F.concat(F.lit("q:"), F.col("address")))
    own_key = (
        F.when(F.col("word") == "q", F.col("named"))
        .when(has_target, F.col("rest"))
        .when(cascaded, F.col("address"))
        .otherwise(F.col("routing_key"))
    )
    sent = F.coalesce(_milliseconds(HEADER_SENT), "net_sent")
    delay = _header(HEADER_DELAY).try_cast("long")
    waited = F.make_dt_interval(secs=F.when(delay.between(0, _LONGEST_DELAY), delay))
    # The delay of a retry starts at another time, which is in none of the headers.
    net_due = F.when(F.col("retries") == 0, F.coalesce("net_due", F.col("net_sent") + waited))
    # The cast is for an empty map, whose type Spark cannot infer.
    layout = F.create_map(*(F.lit(text) for pair in layouts.items() for text in pair)).cast("map<string,string>")
    kinds = F.element_at(F.split(_header("NServiceBus.EnclosedMessageTypes"), "[;,]"), 1)
    return (
        parsed.withColumns({"target": F.coalesce(_header(HEADER_TO), to), "sent": sent})
        .withColumns(
            {
                "message_id": F.coalesce(
                    "message_id",
                    _header(NATIVE_MESSAGE_ID),
                    F.when(F.col("task").isNotNull(), _header("id")),
                ),
                "seconds": F.when(cascaded, F.conv("digits", 2, 10).cast("long")),
                arrived: F.col("timestamp"),
                "due": F.coalesce(
                    "due",
                    _in_calendar(F.when(F.col("task").isNotNull(), _header("eta").try_cast("timestamp"))),
                    _in_calendar(net_due),
                ),
                "promised": _milliseconds(HEADER_FIRST_DUE),
                "type": F.coalesce("task", *(F.nullif(kind, F.lit("")) for kind in (F.col("type"), F.trim(kinds)))),
                "size": F.octet_length("value"),
                "layout": F.try_element_at(layout, F.col("stream")),
            }
        )
        .withColumns(
            {
                "exchange": F.coalesce(
                    _header(HEADER_EXCHANGE),
                    F.when(F.col("target").startswith("x:"), F.substr("target", F.lit(3))),
                    F.lit(""),
                ),
                "routing_key": F.coalesce(_header(HEADER_ROUTING_KEY), own_key),
            }
        )
    )


def _with_day(fields: DataFrame, table: str, *, seen: Column) -> DataFrame:
    return fields.withColumn("day", day_of(F.coalesce("first_due", "sent", seen))).select(
        *SCHEMAS[table].names, *_mark_of(fields)
    )


def _mark_of(messages: DataFrame) -> tuple[str, ...]:
    return (_MARK,) if _MARK in messages.columns else ()


def _first_due() -> Column:
    """The due time that the sender gave, by the rules of ``bide.recoverability.copies.senders_due``."""
    is_first = (F.col("retries") == 0) & (F.col("returned") == 0)
    return F.coalesce("promised", F.when(is_first, F.col("due")).otherwise(F.col("net_due")))


def _header(name: str) -> Column:
    return F.try_element_at("headers", F.lit(name))


def _count(header: str) -> Column:
    number = _header(header).try_cast("int")
    return F.when(number > 0, number)


def _milliseconds(header: str) -> Column:
    return _time(_header(header).try_cast("long"))


def _time(milliseconds: Column) -> Column:
    return F.timestamp_millis(F.when(milliseconds.between(*_CALENDAR), milliseconds))


def _in_calendar(time: Column) -> Column:
    first, last = (F.timestamp_millis(F.lit(one)) for one in _CALENDAR)
    return F.when(time.between(first, last), time)


def _nservicebus_time(header: str) -> Column:
    return F.try_to_timestamp(_header(header), F.lit(_NSERVICEBUS_TIME))
