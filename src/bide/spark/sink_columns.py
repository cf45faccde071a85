"""Columns of the sink: names, types, and the options that replace them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from bide.errors import InvalidColumnError, InvalidOptionError
from bide.spark.columns import QUEUE_COLUMNS, STREAM_COLUMNS
from bide.spark.sink_settings import TARGET_OPTIONS, TEXT_OPTIONS

VALUE: Final = "value"

PUBLISHING_ID: Final = "publishing_id"
"""The column with an id of each row that is the same in each attempt at its task."""

_WHOLE: Final = (ByteType, ShortType, IntegerType, LongType)
_HEADER: Final = (StringType, BinaryType, BooleanType, *_WHOLE, FloatType, DoubleType, TimestampType)


def _any_of(*types: type[DataType]) -> Callable[[DataType], bool]:
    return lambda found: isinstance(found, types)


def _is_headers(found: DataType) -> bool:
    if isinstance(found, StringType):
        return True
    if isinstance(found, MapType):
        key, value = found.keyType, found.valueType
    elif isinstance(found, ArrayType) and isinstance(found.elementType, StructType):
        # The type of headers in Spark's Kafka source and sink.
        if found.elementType.fieldNames() != ["key", "value"]:
            return False
        key, value = (field.dataType for field in found.elementType.fields)
    else:
        return False
    return isinstance(key, StringType) and isinstance(value, _HEADER)


_TEXT: Final = (_any_of(StringType), "string")
_DURATION: Final = (
    _any_of(DayTimeIntervalType, StringType, *_WHOLE),
    "interval day to second, a whole number of milliseconds, or a string such as '5m'",
)

COLUMNS: Final[Mapping[str, tuple[Callable[[DataType], bool], str]]] = {
    VALUE: (_any_of(StringType, BinaryType), "string or binary"),
    **dict.fromkeys(TARGET_OPTIONS, _TEXT),
    "key": _TEXT,
    "delay": _DURATION,
    "deliver_at": (_any_of(TimestampType), "timestamp"),
    "message_id": _TEXT,
    PUBLISHING_ID: (_any_of(StringType, *_WHOLE), "a whole number or a string"),
    "headers": (
        _is_headers,
        "map<string, string>, array<struct<key: string, value: binary>>, or JSON in a string",
    ),
    "headers_json": _TEXT,
    **dict.fromkeys(TEXT_OPTIONS, _TEXT),
    "priority": (_any_of(*_WHOLE), "a whole number"),
    "persistent": (_any_of(BooleanType), "boolean"),
    "expiration": _DURATION,
    "creation_time": (_any_of(TimestampType), "timestamp"),
}
"""Each column with a test of its type, and the type in words."""


_OF_SOURCE: Final = (STREAM_COLUMNS.keys() | QUEUE_COLUMNS.keys()) - COLUMNS.keys()
"""Columns of the source that the sink does not accept."""


def columns_to_send(
    schema: StructType, constants: Mapping[str, Any], *, producer: str | None = None
) -> tuple[str, ...]:
    """The columns that are sent, by their names in :data:`COLUMNS`. The case of the names in the table is ignored.

    An option replaces the column of its name. The option ``queue`` also replaces ``exchange`` and ``routing_key``, and
    the option ``exchange`` also replaces ``queue``.

    Args:
        constants: values of the options, by the names of :class:`bide.OutgoingMessage`.
        producer: the name of the publisher, if rows are to be stored once in a stream.

    Raises:
        InvalidColumnError: a column is missing, unknown or repeated, or has the wrong type.
        InvalidOptionError: a column contradicts an option.
    """
    found: dict[str, str] = {}
    for field in schema.fields:
        name = field.name.lower()
        if name not in COLUMNS:
            raise InvalidColumnError(
                f"the column {field.name!r} {_reason(name)}: drop it, or rename it to one of {', '.join(COLUMNS)}"
            )
        if name in found:
            raise InvalidColumnError(f"the columns {found[name]!r} and {field.name!r} have the same name: drop one")
        accepts, wanted = COLUMNS[name]
        if not accepts(field.dataType):
            raise InvalidColumnError(
                f"the column {field.name!r} is {field.dataType.simpleString()}: it has to be {wanted}"
                f"{_hint(field.dataType)}"
            )
        found[name] = field.name
    if VALUE not in found:
        raise InvalidColumnError(
            f"there is no column {VALUE!r}, the body of the messages, among {_listed(schema)}: add or rename one"
        )
    _check_publishing_id(found, producer)
    _refuse_contradictions(found, constants)
    replaced = _replaced(constants)
    return tuple(name for name in found if name not in replaced)


def _replaced(constants: Mapping[str, Any]) -> set[str]:
    names = {"queue" if name == "to" else name for name in constants}
    if "queue" in names:
        return names | set(TARGET_OPTIONS)
    return names | {"queue"} if "exchange" in names else names


def _check_publishing_id(found: Mapping[str, str], producer: str | None) -> None:
    if producer is None:
        if PUBLISHING_ID in found:
            raise InvalidColumnError(
                f"the column {found[PUBLISHING_ID]!r} is for the option producerName, with which a stream stores each "
                "row once: set the option, or drop the column"
            )
        return
    if PUBLISHING_ID not in found:
        raise InvalidColumnError(
            f"the option producerName needs a column {PUBLISHING_ID!r} with an id of each row that is the same in each "
            "attempt, such as the offset in a source. Without the ids, rows would be lost if a repeated task has them "
            "in another order. Add the column, or leave out the option"
        )
    for name in ("key", "delay", "deliver_at"):
        if name in found:
            raise InvalidColumnError(
                f"the column {found[name]!r} is for messages that wait, but with the option producerName, messages go "
                "into a stream immediately: drop the column, or leave out the option"
            )


def _refuse_contradictions(found: Mapping[str, str], constants: Mapping[str, Any]) -> None:
    for option, column in (("delay", "deliver_at"), ("deliver_at", "delay")):
        if option in constants and column in found:
            raise InvalidOptionError(
                f"the option {option} and the column {found[column]!r} both set when messages are due: leave out the "
                "option, or drop the column"
            )
    if "key" in found:
        if not {"delay", "deliver_at"} & {*constants, *found}:
            raise InvalidColumnError(
                f"the messages have a key and no due time: give a column or an option delay or deliver_at, or drop the "
                f"column {found['key']!r}"
            )
        if "isolated" in constants:
            raise InvalidOptionError(
                f"the option isolated is for messages without keys: leave it out, or drop the column {found['key']!r}"
            )
    if {"headers", "headers_json"} <= found.keys():
        raise InvalidColumnError(
            f"the columns {found['headers']!r} and {found['headers_json']!r} both hold the headers: drop one"
        )
    if not {"to", "exchange"} & constants.keys() and not {"queue", "exchange"} & found.keys():
        raise InvalidColumnError(
            "the messages have no target: give the option queue or exchange, or a column of that name"
        )


def _reason(name: str) -> str:
    if name in _OF_SOURCE:
        return "says where a message was read, or when it was due, and cannot be sent"
    return "is not a field of a message"


def _hint(found: DataType) -> str:
    if isinstance(found, TimestampNTZType | DateType):
        return ", which has a time zone: cast it"
    return ""


def _listed(schema: StructType) -> str:
    return ", ".join(repr(name) for name in schema.fieldNames()) or "no columns"
