"""Columns of the source, with their types in Spark and in Arrow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from bide.errors import InvalidOptionError

VALUE: Final = "value"
HEADERS: Final = "headers"
HEADERS_JSON: Final = "headers_json"
UNDECODABLE: Final = "undecodable"

_TEXT: Final = pa.string()
_TIME: Final = pa.timestamp("us", tz="UTC")

ColumnTypes = dict[str, tuple[DataType, pa.DataType]]
"""Columns by name, with their types in Spark and in Arrow."""

_OF_MESSAGES: Final[ColumnTypes] = {
    "exchange": (StringType(), _TEXT),
    "routing_key": (StringType(), _TEXT),
    "message_id": (StringType(), _TEXT),
    "correlation_id": (StringType(), _TEXT),
    "content_type": (StringType(), _TEXT),
    "due": (TimestampType(), _TIME),
    "scheduled": (TimestampType(), _TIME),
    HEADERS: (MapType(StringType(), StringType()), pa.map_(_TEXT, _TEXT)),
    HEADERS_JSON: (StringType(), _TEXT),
    "type": (StringType(), _TEXT),
    "content_encoding": (StringType(), _TEXT),
    "reply_to": (StringType(), _TEXT),
    "app_id": (StringType(), _TEXT),
    "user_id": (StringType(), _TEXT),
    "priority": (IntegerType(), pa.int32()),
    "expiration": (LongType(), pa.int64()),
    "persistent": (BooleanType(), pa.bool_()),
    "creation_time": (TimestampType(), _TIME),
}

STREAM_COLUMNS: Final[ColumnTypes] = {
    VALUE: (BinaryType(), pa.binary()),
    "stream": (StringType(), _TEXT),
    "offset": (LongType(), pa.int64()),
    "timestamp": (TimestampType(), _TIME),
    **_OF_MESSAGES,
    UNDECODABLE: (StringType(), _TEXT),
}
"""Columns of a table read from streams, in their order."""

QUEUE_COLUMNS: Final[ColumnTypes] = {
    VALUE: (BinaryType(), pa.binary()),
    "queue": (StringType(), _TEXT),
    "id": (StringType(), _TEXT),
    "reason": (StringType(), _TEXT),
    "failed_queue": (StringType(), _TEXT),
    "failed_at": (TimestampType(), _TIME),
    "exception": (StringType(), _TEXT),
    "error": (StringType(), _TEXT),
    "group": (StringType(), _TEXT),
    "endpoint": (StringType(), _TEXT),
    "attempts": (LongType(), pa.int64()),
    **_OF_MESSAGES,
}
"""Columns of a table read from a queue, in their order."""


def table_schema(
    columns: ColumnTypes, *, include_headers: bool, headers_as_json: bool = False, undecodable: bool = False
) -> StructType:
    """The schema of the table; headers and ``undecodable`` are optional, as headers are in Spark's Kafka source."""
    optional = ((HEADERS, include_headers), (HEADERS_JSON, headers_as_json), (UNDECODABLE, undecodable))
    omitted = {name for name, wanted in optional if not wanted}
    return StructType([StructField(name, kind) for name, (kind, _) in columns.items() if name not in omitted])


def schema_of_names(columns: ColumnTypes, names: Iterable[str]) -> StructType:
    """The schema of a table with these columns, in this order.

    Raises:
        InvalidOptionError: a column is unknown.
    """
    fields = []
    for name in names:
        if name not in columns:
            raise InvalidOptionError(
                f"the option columns names {name!r}, which is not a column: choose from {', '.join(columns)}"
            )
        fields.append(StructField(name, columns[name][0]))
    return StructType(fields)


def arrow_schema(schema: StructType, columns: ColumnTypes) -> pa.Schema:
    """The Arrow schema for a Spark schema, which the user may have chosen.

    Raises:
        InvalidOptionError: a column is unknown, has the wrong type, or is not nullable.
    """
    fields = []
    for field in schema.fields:
        spark_type, arrow_type = columns.get(field.name, (None, None))
        if spark_type is None:
            raise InvalidOptionError(
                f"the schema has an unknown column {field.name!r}: choose from {', '.join(columns)}"
            )
        if field.dataType != spark_type or not field.nullable:
            raise InvalidOptionError(
                f"the schema has the column {field.name!r} as {field.dataType.simpleString()}"
                f"{'' if field.nullable else ' not null'}: declare it as {spark_type.simpleString()}, nullable"
            )
        fields.append(pa.field(field.name, arrow_type))
    return pa.schema(fields)
