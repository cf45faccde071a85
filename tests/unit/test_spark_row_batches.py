"""Row batches for writers of Spark releases without record batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DayTimeIntervalType,
    IntegerType,
    MapType,
    Row,
    StringType,
    StructType,
    TimestampType,
)

from bide.delay.clock import Clock
from bide.spark.rows import RowConverter
from bide.spark.sink import batches_of

COLUMNS = ("value", "deliver_at", "headers", "priority", "expiration")


def test_rows_and_record_batches_become_the_same_messages() -> None:
    """A time comes in the zone of the worker, without saying so."""
    schema = (
        StructType()
        .add("value", BinaryType())
        .add("deliver_at", TimestampType())
        .add("headers", MapType(StringType(), StringType()))
        .add("priority", IntegerType())
        .add("expiration", DayTimeIntervalType())
    )
    due = datetime(2026, 12, 24, 18, tzinfo=UTC)
    local = due.astimezone().replace(tzinfo=None)
    rows = [
        Row(value=b"a", deliver_at=local, headers={"k": "v"}, priority=5, expiration=timedelta(hours=1)),
        Row(value=b"b", deliver_at=None, headers=None, priority=None, expiration=None),
    ]
    (batch,) = batches_of(iter(rows), schema)
    outgoing = list(RowConverter(COLUMNS, {"to": "q"}, Clock()).messages(batch, [0, 1], run="r"))
    first, second = outgoing
    assert (first.body, first.deliver_at, first.headers, first.priority) == (b"a", due, {"k": "v"}, 5)
    assert first.expiration == timedelta(hours=1)
    assert (second.body, second.deliver_at, second.headers, second.priority) == (b"b", None, None, None)


@pytest.fixture
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker with another zone than UTC."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("in_tokyo")
@pytest.mark.parametrize("is_map", [True, False])
def test_times_in_headers_are_read_in_the_zone_of_the_worker(is_map: bool) -> None:
    seen = datetime(2026, 12, 24, 18, tzinfo=UTC)
    local = datetime(2026, 12, 25, 3)  # noqa: DTZ001 (as Spark hands it over)
    header = StructType().add("key", StringType()).add("value", TimestampType())
    kind = MapType(StringType(), TimestampType()) if is_map else ArrayType(header)
    schema = StructType().add("value", StringType()).add("headers", kind)
    headers = {"seen": local} if is_map else [Row(key="seen", value=local)]
    (batch,) = batches_of(iter([Row(value="a", headers=headers)]), schema)
    (message,) = RowConverter(("value", "headers"), {"to": "q"}, Clock()).messages(batch, [0], run="r")
    assert message.headers == {"seen": seen}


def test_headers_can_be_structs_of_key_and_value() -> None:
    header = StructType().add("key", StringType()).add("value", BinaryType())
    schema = StructType().add("value", StringType()).add("headers", ArrayType(header))
    (batch,) = batches_of(iter([Row(value="a", headers=[Row(key="k", value=b"v")])]), schema)
    (message,) = RowConverter(("value", "headers"), {"to": "q"}, Clock()).messages(batch, [0], run="r")
    assert message.headers == {"k": b"v"}
