"""What taps and the events stream tell, as tables of facts: one row for each thing that happened.

A row has all that its message says of itself, whoever published it: bide, NServiceBus or Celery. Where a message says
nothing of its due time, the digits in its routing key do. What no calendar has, or no delay can be, counts as not said:
one such message must not end the reading of all others.

Every fact gets a ``day``, the same for all facts of one message, whenever they come: that of the due time that its
sender gave, or else of when it was sent. It is what the audit divides its tables by.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)
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
    """A schema from names and types with commas between. (Spark's own parser wants a running Spark.)"""
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
    }.items()
}
"""The tables' columns by their names, in order; ``day`` is what they are partitioned by."""

FAILED_KINDS: Final = ("failed", "retried", "parked", "discarded", "expired")
"""Kinds of events that the table ``failed`` has. A ``duplicate`` is none: its message was processed before."""

UNDECODABLE: Final = schema_of(f"reason string, seen timestamp, size int, value binary, {_TAPPED}")
"""The columns of the table ``undecodable``: messages that are not AMQP 1.0, as their bytes."""

_MARK: Final = "undecodable"
"""The column of :func:`marked`. The facts have it where the messages do."""

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
_CALENDAR: Final = (-62_135_596_800_000, 253_402_300_799_999)
"""First and last millisecond of the years 1 to 9999, which Python's dates have. Spark's have more."""


def marked(messages: DataFrame) -> DataFrame:
    """The messages, with what the table :data:`UNDECODABLE` has of those that cannot be decoded in one column.

    Args:
        messages: read by the data source ``rabbitmq`` with the option ``undecodable=raw``.
    """
    seen = F.col("timestamp").alias("seen")
    about = F.struct(F.col(_MARK).alias("reason"), seen, F.octet_length("value").alias("size"), "value")
    return messages.withColumn(_MARK, F.when(F.col(_MARK).isNotNull(), about))


def undecodable(facts: DataFrame) -> DataFrame:
    """The table ``undecodable``, of facts of :func:`marked` messages."""
    found = facts.where(F.col(_MARK).isNotNull()).select(f"{_MARK}.*", "stream", "offset")
    return found.withColumn("day", day_of(F.col("seen"))).select(*UNDECODABLE.names)


def decoded(facts: DataFrame, table: str) -> DataFrame:
    """The facts of the others, with the columns of a table."""
    return facts.where(F.col(_MARK).isNull()).select(*SCHEMAS[table].names)


def scheduled(messages: DataFrame, layouts: Mapping[str, str]) -> DataFrame:
    """The table ``scheduled``.

    Args:
        messages: read from taps by the data source ``rabbitmq``, with headers.
        layouts: the layout of each of the taps' streams.
    """
    said = _told(messages, layouts, arrived="scheduled")
    # Only here: what is left of the delay in the key of a delivered message is how long it was, not until when.
    due = F.coalesce("due", F.col("scheduled") + F.make_dt_interval(secs=F.col("seconds")))
    said = said.withColumn("due", _in_calendar(due)).withColumn("first_due", _first_due())
    return _finished(said, "scheduled", seen=F.col("scheduled"))


def delivered(messages: DataFrame, layouts: Mapping[str, str]) -> DataFrame:
    """The table ``delivered``. The due time is null where the message itself does not tell it.

    Args:
        messages: read from taps by the data source ``rabbitmq``, with headers.
        layouts: the layout of each of the taps' streams.
    """
    said = _told(messages, layouts, arrived="delivered").withColumn("first_due", _first_due())
    late = (F.unix_micros("delivered") - F.unix_micros("due")) / F.lit(1000.0)
    return _finished(said.withColumn("lateness_ms", late), "delivered", seen=F.col("delivered"))


def events(messages: DataFrame) -> DataFrame:
    """Events of endpoints as columns; what is no event is left out.

    Args:
        messages: read from the events stream by the data source ``rabbitmq``.
    """
    # Of what is not UTF-8 a cast is to be an error in a later Spark (SPARK-54586), and that would end the round.
    event = F.from_json(F.col("value").try_cast("string"), _EVENT)
    place = ("stream", "offset", *_mark_of(messages))
    told = messages.select(event.alias("told"), *place).select("told.*", *place)
    is_event = F.col("event").isNotNull() & F.col("ended").isNotNull()
    moments = {name: _moment(F.col(name)) for name in ("sent", "due", "delivered", "started", "ended")}
    return (
        told.withColumns(moments)
        .where(reduce(or_, (F.col(name).isNotNull() for name in _mark_of(messages)), is_event))
        .withColumns({"kind": F.col("event"), "type": F.col("message_type"), "delay_ms": F.col("delay")})
        .withColumn("day", day_of(F.coalesce("due", "sent", "delivered", "ended")))
    )


def processed(events: DataFrame) -> DataFrame:
    """The table ``processed``, of :func:`events`."""
    return events.where(F.col("kind") == "processed").select(*SCHEMAS["processed"].names)


def failed(events: DataFrame) -> DataFrame:
    """The table ``failed``, of :func:`events`."""
    return events.where(F.col("kind").isin(*FAILED_KINDS)).select(*SCHEMAS["failed"].names)


def day_of(moment: Column) -> Column:
    """The day in UTC, whatever the session's time zone: else another session would divide the tables otherwise."""
    return F.date_from_unix_date(F.floor(F.unix_seconds(moment) / _DAY).cast("int"))


def _told(messages: DataFrame, layouts: Mapping[str, str], *, arrived: str) -> DataFrame:
    """What messages say of themselves, by the rules of ``bide.delay.received`` and those of their own systems."""
    key, address = (F.regexp_extract("routing_key", _DELAYED_KEY, group) for group in (1, 2))
    word, name, rest = (F.regexp_extract("address", _TARGET_WORD, group) for group in (1, 2, 3))
    named = F.replace(F.replace(name, F.lit("%2E"), F.lit(".")), F.lit("%25"), F.lit("%"))
    cut = messages.withColumns(
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
    tagged = F.col("word") != ""
    to = F.when(tagged, F.concat_ws(":", "word", "named")).when(cascaded, F.concat(F.lit("q:"), F.col("address")))
    own_key = (
        F.when(F.col("word") == "q", F.col("named"))
        .when(tagged, F.col("rest"))
        .when(cascaded, F.col("address"))
        .otherwise(F.col("routing_key"))
    )
    sent = F.coalesce(_milliseconds(HEADER_SENT), "net_sent")
    delay = _header(HEADER_DELAY).try_cast("long")
    waited = F.make_dt_interval(secs=F.when(delay.between(0, _LONGEST_DELAY), delay))
    # The delay of a retry counts from another moment, which no header tells.
    net_due = F.when(F.col("retries") == 0, F.coalesce("net_due", F.col("net_sent") + waited))
    # Of no streams at all, Spark would not know that these are texts.
    layout = F.create_map(*(F.lit(text) for pair in layouts.items() for text in pair)).cast("map<string,string>")
    kinds = F.element_at(F.split(_header("NServiceBus.EnclosedMessageTypes"), "[;,]"), 1)
    return (
        cut.withColumns({"target": F.coalesce(_header(HEADER_TO), to), "sent": sent})
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


def _finished(said: DataFrame, table: str, *, seen: Column) -> DataFrame:
    return said.withColumn("day", day_of(F.coalesce("first_due", "sent", seen))).select(
        *SCHEMAS[table].names, *_mark_of(said)
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
    return _moment(_header(header).try_cast("long"))


def _moment(milliseconds: Column) -> Column:
    return F.timestamp_millis(F.when(milliseconds.between(*_CALENDAR), milliseconds))


def _in_calendar(moment: Column) -> Column:
    first, last = (F.timestamp_millis(F.lit(one)) for one in _CALENDAR)
    return F.when(moment.between(first, last), moment)


def _nservicebus_time(header: str) -> Column:
    return F.try_to_timestamp(_header(header), F.lit(_NSERVICEBUS_TIME))
