"""The columns that are read, for Spark and for Arrow."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DataType,
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
UNDECODABLE: Final = "undecodable"

_TEXT: Final = pa.string()
_TIME: Final = pa.timestamp("us", tz="UTC")

Columns = dict[str, tuple[DataType, pa.DataType]]
"""Columns by name, with their types in Spark and in Arrow."""

_OF_MESSAGES: Final[Columns] = {
    "exchange": (StringType(), _TEXT),
    "routing_key": (StringType(), _TEXT),
    "message_id": (StringType(), _TEXT),
    "correlation_id": (StringType(), _TEXT),
    "content_type": (StringType(), _TEXT),
    "due": (TimestampType(), _TIME),
    "scheduled": (TimestampType(), _TIME),
    HEADERS: (MapType(StringType(), StringType()), pa.map_(_TEXT, _TEXT)),
    "type": (StringType(), _TEXT),
}

STREAM_COLUMNS: Final[Columns] = {
    VALUE: (BinaryType(), pa.binary()),
    "stream": (StringType(), _TEXT),
    "offset": (LongType(), pa.int64()),
    "timestamp": (TimestampType(), _TIME),
    **_OF_MESSAGES,
    UNDECODABLE: (StringType(), _TEXT),
}
"""What is read from streams, in the order of the table."""

QUEUE_COLUMNS: Final[Columns] = {
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
"""What is read from queues."""


def table_schema(columns: Columns, *, include_headers: bool, undecodable: bool = False) -> StructType:
    """The table's columns; ``headers`` only when asked for, as in Spark's source for Kafka, and ``undecodable`` too."""
    left_out = {name for name, wanted in ((HEADERS, include_headers), (UNDECODABLE, undecodable)) if not wanted}
    return StructType([StructField(name, kind) for name, (kind, _) in columns.items() if name not in left_out])


def arrow_schema(schema: StructType, columns: Columns) -> pa.Schema:
    """The same columns for Arrow.

    Raises:
        InvalidOptionError: the schema, which the user may choose, has a column that is not read, or of another type.
    """
    fields = []
    for field in schema.fields:
        spark_type, arrow_type = columns.get(field.name, (None, None))
        if spark_type is None:
            raise InvalidOptionError(
                f"the schema has a column {field.name!r} that is not read: known are {', '.join(columns)}"
            )
        if field.dataType != spark_type or not field.nullable:
            raise InvalidOptionError(
                f"the schema has the column {field.name!r} as {field.dataType.simpleString()}"
                f"{'' if field.nullable else ' not null'}: it is {spark_type.simpleString()}, nullable"
            )
        fields.append(pa.field(field.name, arrow_type))
    return pa.schema(fields)
