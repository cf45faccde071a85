"""The columns of a write, and the options that replace them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DayTimeIntervalType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from bide.errors import InvalidColumnError, InvalidOptionError
from bide.spark.options import Options
from bide.spark.sink_columns import COLUMNS, columns_to_send
from bide.spark.sink_settings import SINK_OPTIONS, TARGET_OPTIONS, SinkSettings

TEXT = StringType()
TYPES: dict[str, DataType] = {
    "delay": DayTimeIntervalType(),
    "deliver_at": TimestampType(),
    "headers": MapType(TEXT, TEXT),
    "priority": IntegerType(),
    "persistent": BooleanType(),
    "creation_time": TimestampType(),
    "expiration": DayTimeIntervalType(),
}
VALUES = {
    "delay": "5s",
    "deliver_at": (datetime.now(UTC) + timedelta(days=1)).isoformat(),
    "priority": "7",
    "persistent": "false",
    "expiration": "5m",
}
"""Of options that are no text."""


def schema_of(*names: str) -> StructType:
    return StructType([StructField(name, TYPES.get(name.lower(), TEXT)) for name in names])


def sent(schema: StructType, options: dict[str, str]) -> tuple[str, ...]:
    settings = SinkSettings.read(Options(options), {})
    return columns_to_send(schema, settings.constants, producer=settings.producer)


ONE_HEADERS = tuple(name for name in COLUMNS if name not in ("headers_json", "publishing_id"))
"""All columns but the second one for headers, and the one for streams."""


def every_column(*, but: str | None = None) -> StructType:
    return schema_of(*(name for name in ONE_HEADERS if name != but))


def test_all_columns_are_sent_in_the_order_of_the_table() -> None:
    assert sent(every_column(), {}) == ONE_HEADERS
    assert sent(schema_of("Delay", "QUEUE", "value"), {}) == ("delay", "queue", "value")


@pytest.mark.parametrize("name", sorted(SINK_OPTIONS & set(COLUMNS) - set(TARGET_OPTIONS)))
def test_an_option_replaces_only_the_column_of_its_name(name: str) -> None:
    schema = every_column(but={"delay": "deliver_at", "deliver_at": "delay"}.get(name))
    found = sent(schema, {name: VALUES.get(name, "x")})
    assert found == tuple(one for one in schema.fieldNames() if one != name)


@pytest.mark.parametrize(
    ("options", "replaced"),
    [
        ({"queue": "orders"}, {"queue", "exchange", "routing_key"}),
        ({"exchange": "shop"}, {"queue", "exchange"}),
        ({"exchange": "shop", "routing_key": "order.created"}, {"queue", "exchange", "routing_key"}),
        # Rows that have an exchange take it; those that have a queue are refused one by one.
        ({"routing_key": "order.created"}, {"routing_key"}),
        ({"QUEUE": "orders", "Priority": "7", "type": "Remind"}, {*TARGET_OPTIONS, "priority", "type"}),
        ({"idPrefix": "p", "window": "10", "timeout": "5s", "declare": "false"}, set()),
    ],
    ids=lambda one: str(one) if isinstance(one, dict) else str(sorted(one)),  # a set has another order each time
)
def test_a_target_option_replaces_the_target_columns(options: dict[str, str], replaced: set[str]) -> None:
    assert sent(every_column(), options) == tuple(name for name in ONE_HEADERS if name not in replaced)


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_the_wrong_type_is_refused_with_the_right_type(name: str) -> None:
    schema = StructType([*every_column(but=name).fields, StructField(name, ArrayType(TEXT))])
    with pytest.raises(InvalidColumnError, match=rf"^the column '{name}' is array<string>: it has to be \w"):
        sent(schema, {})


def test_two_columns_of_headers_are_refused() -> None:
    with pytest.raises(InvalidColumnError, match="'headers' and 'headers_json' both hold the headers: drop one"):
        sent(schema_of("value", "headers", "headers_json"), {"queue": "q"})


@pytest.mark.parametrize("name", ["offset", "due", "failed_at"])
def test_a_column_of_the_source_alone_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(InvalidColumnError, match="says where a message was read, or when it was due"):
        sent(schema_of("value", name), {"queue": "q"})


def test_columns_that_differ_only_in_case_are_refused() -> None:
    with pytest.raises(InvalidColumnError, match="the columns 'queue' and 'Queue' have the same name: drop one"):
        sent(schema_of("value", "queue", "Queue"), {})


def test_keys_need_a_due_time() -> None:
    with pytest.raises(InvalidColumnError, match="the messages have a key and no due time: give a column or an option"):
        sent(schema_of("value", "key"), {"queue": "orders"})
    assert sent(schema_of("value", "key"), {"queue": "orders", "delay": "1h"}) == ("value", "key")


def test_keys_and_isolation_are_refused_together() -> None:
    with pytest.raises(InvalidOptionError, match="the option isolated is for messages without keys"):
        sent(schema_of("value", "key"), {"queue": "orders", "delay": "1h", "isolated": "true"})


ONCE = {"queue": "s", "producerName": "copy"}


def test_rows_that_a_stream_stores_once_have_an_id() -> None:
    assert sent(schema_of("value", "publishing_id", "queue", "type"), ONCE) == ("value", "publishing_id", "type")
    with pytest.raises(InvalidColumnError, match="the option producerName needs a column 'publishing_id' with an id"):
        sent(schema_of("value"), ONCE)
    with pytest.raises(InvalidColumnError, match="'Publishing_Id' is for the option producerName"):
        sent(schema_of("value", "Publishing_Id"), {"queue": "s"})


@pytest.mark.parametrize("name", ["key", "delay", "deliver_at"])
def test_rows_that_a_stream_stores_once_cannot_wait(name: str) -> None:
    with pytest.raises(InvalidColumnError, match=f"the column '{name}' is for messages that wait"):
        sent(schema_of("value", "publishing_id", name), ONCE)
