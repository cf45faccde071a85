"""The columns that the sink writes, with their types and use."""

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
from bide.spark.sink_settings import TARGETS, TEXTS

VALUE: Final = "value"

_WHOLE: Final = (ByteType, ShortType, IntegerType, LongType)
_HEADER: Final = (StringType, BinaryType, BooleanType, *_WHOLE, FloatType, DoubleType, TimestampType)


def _any_of(*types: type[DataType]) -> Callable[[DataType], bool]:
    return lambda found: isinstance(found, types)


def _is_headers(found: DataType) -> bool:
    if isinstance(found, MapType):
        key, value = found.keyType, found.valueType
    elif isinstance(found, ArrayType) and isinstance(found.elementType, StructType):
        # As Spark's source and sink for Kafka have headers.
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
    **dict.fromkeys(TARGETS, _TEXT),
    "delay": _DURATION,
    "deliver_at": (_any_of(TimestampType), "timestamp"),
    "message_id": _TEXT,
    "headers": (_is_headers, "map<string, string> or array<struct<key: string, value: binary>>"),
    **dict.fromkeys(TEXTS, _TEXT),
    "priority": (_any_of(*_WHOLE), "a whole number"),
    "persistent": (_any_of(BooleanType), "boolean"),
    "expiration": _DURATION,
}
"""Every column with the test of its type, and that type in words."""


def columns_to_send(schema: StructType, constants: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns that messages are made of, by their names in :data:`COLUMNS`; the table may write them in any case.

    What an option gives takes the place of the column; an option for the queue, that of all three that say where a
    message goes.

    Args:
        constants: of the options, by the names of :class:`bide.OutgoingMessage`.

    Raises:
        InvalidColumnError: a column is missing, unknown, there twice, or of another type.
        InvalidOptionError: a column contradicts an option.
    """
    found: dict[str, str] = {}
    for field in schema.fields:
        name = field.name.lower()
        if name not in COLUMNS:
            raise InvalidColumnError(
                f"the column {field.name!r} says nothing about a message: drop it, or rename it to one of "
                f"{', '.join(COLUMNS)}"
            )
        if name in found:
            raise InvalidColumnError(f"the columns {found[name]!r} and {field.name!r} are the same to Spark: drop one")
        is_right, wanted = COLUMNS[name]
        if not is_right(field.dataType):
            raise InvalidColumnError(
                f"the column {field.name!r} is {field.dataType.simpleString()}: it has to be {wanted}"
                f"{_hint(field.dataType)}"
            )
        found[name] = field.name
    if VALUE not in found:
        raise InvalidColumnError(f"there is no column {VALUE!r}, the body of the messages; found {_listed(schema)}")
    _refuse_contradictions(found, constants)
    replaced = _replaced(constants)
    return tuple(name for name in found if name not in replaced)


def _replaced(constants: Mapping[str, Any]) -> set[str]:
    names = {"queue" if name == "to" else name for name in constants}
    if "queue" in names:
        return names | set(TARGETS)
    return names | {"queue"} if "exchange" in names else names


def _refuse_contradictions(found: Mapping[str, str], constants: Mapping[str, Any]) -> None:
    for option, column in (("delay", "deliver_at"), ("deliver_at", "delay")):
        if option in constants and column in found:
            raise InvalidOptionError(
                f"the option {option} and the column {found[column]!r} both say when messages are due: leave out the "
                "option, or drop the column"
            )
    if not {"to", "exchange"} & constants.keys() and not {"queue", "exchange"} & found.keys():
        raise InvalidColumnError(
            "nothing says where the messages go: give the option queue or exchange, or a column of that name"
        )


def _hint(found: DataType) -> str:
    if isinstance(found, TimestampNTZType | DateType):
        return ", which has a time zone: cast it"
    return ""


def _listed(schema: StructType) -> str:
    return ", ".join(repr(name) for name in schema.fieldNames()) or "no column at all"
