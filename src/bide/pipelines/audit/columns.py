"""Names and columns of the tables of an audit, and their types in Arrow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import pyarrow as pa

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
"""The type of times."""

_TYPES: Final[Mapping[str, pa.DataType]] = {
    "string": pa.string(),
    "int": pa.int32(),
    "long": pa.int64(),
    "double": pa.float64(),
    "timestamp": TIMESTAMP,
    "date": pa.date32(),
    "binary": pa.binary(),
}

_POSITION: Final = "stream string, offset long, day date"

FACT_COLUMNS: Final[Mapping[str, str]] = {
    name: f"{columns}, {_POSITION}"
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
"""The columns of each table of facts, in order; the tables are partitioned by ``day``."""

UNDECODABLE: Final = "undecodable"
"""The table of messages that are not AMQP 1.0. No other table is computed from it. It is partitioned by source as well
as by day, because the numbers of batches are unique per source only."""

UNDECODABLE_COLUMNS: Final = f"reason string, seen timestamp, size int, value binary, {_POSITION}"

TABLES_BY_SOURCE: Final[Mapping[str, tuple[str, ...]]] = {
    "scheduled": ("scheduled",),
    "delivered": ("delivered",),
    "events": ("processed", "failed"),
}
"""The sources of messages, with the tables of facts that they fill."""

APPENDED_TABLES: Final[Mapping[str, str]] = {
    **FACT_COLUMNS,
    **{f"{UNDECODABLE}/source={source}": UNDECODABLE_COLUMNS for source in TABLES_BY_SOURCE},
}
"""All tables to which rounds append batches, with their columns."""

PENDING_STATE: Final = "_state/pending"
FAILURES_STATE: Final = "_state/failures"
"""The counts by day that the tables ``pending`` and ``failures`` sum up."""

LATENESS_COLUMNS: Final = (
    "minute timestamp, target string, count long, p50_ms double, p95_ms double, p99_ms double, max_ms double, day date"
)
PENDING_COLUMNS: Final = "target string, due_hour timestamp, count long, overdue long"
FAILURES_COLUMNS: Final = (
    "group string, exception string, endpoint string, count long, messages long, first_seen timestamp, "
    "last_seen timestamp, recent long, before long, trend double"
)
PENDING_PARTS_COLUMNS: Final = "target string, due timestamp, count long, overdue long, day date, batch long"
FAILURES_PARTS_COLUMNS: Final = (
    "group string, exception string, endpoint string, minute timestamp, count long, messages long, "
    "first_seen timestamp, last_seen timestamp, day date"
)

_MESSAGES_COLUMNS: Final = (
    "message_id string, target string, type string, layout string, sent timestamp, scheduled timestamp, "
    "due timestamp, delivered timestamp, lateness_ms double, attempts int, outcome string, endpoint string, "
    "started timestamp, ended timestamp, critical_ms double, processing_ms double, delivery_ms double"
)
"""The columns of the table ``messages``, without ``waiting`` and ``day``."""


def parse_columns(columns: str) -> list[tuple[str, str]]:
    """The names and types of columns, from a text such as ``target string, count long``."""
    return [(name, kind) for name, _, kind in (column.strip().partition(" ") for column in columns.split(","))]


def arrow_schema(columns: str) -> pa.Schema:
    """The Arrow schema of columns, from the text that :func:`parse_columns` reads."""
    return pa.schema([(name, _TYPES[kind]) for name, kind in parse_columns(columns)])


def with_batch(schema: pa.Schema) -> pa.Schema:
    """The schema with the number of the batch, which is a partition column of Parquet tables."""
    return schema if "batch" in schema.names else schema.append(pa.field("batch", pa.int64()))


def table_of_rows(rows: Collection[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    """Make a table of rows, whose values are in the order of the schema."""
    columns = zip(*rows, strict=True) if rows else ((),) * len(schema)
    arrays = [pa.array(values, one.type) for values, one in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)


MESSAGES_SCHEMA: Final = pa.schema(
    [
        *arrow_schema(_MESSAGES_COLUMNS),
        ("waiting", pa.list_(pa.struct([("target", pa.string()), ("due", TIMESTAMP)]))),
        ("day", pa.date32()),
    ]
)
"""The table ``messages``. ``waiting`` lists the targets and due times that are scheduled and not delivered."""
