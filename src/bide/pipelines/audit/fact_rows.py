"""Facts of messages from taps and events of endpoints, as rows of Arrow.

Both engines convert messages with this module. The values come from the message itself, which bide, NServiceBus or
Celery has published. If a scheduled message has no due time, the delay in its routing key is used. An invalid time or
delay becomes null, so that one such message does not stop the audit of all others.

Each fact has a ``day``, by which the tables are partitioned: the day of the due time that the sender gave, or else of
the time of sending. So all facts of a message have the same day, no matter when they arrive. A fact with neither of
these times has the day on which the tap or the endpoint recorded it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, tzinfo
from functools import cache
from typing import Any, Final
from zoneinfo import ZoneInfo

import pyarrow as pa
from pyarrow import compute as pc

from bide.delay.cascade_keys import HEADER_DELAY, LEVELS
from bide.delay.nservicebus import NATIVE_MESSAGE_ID
from bide.delay.protocol import HEADER_EXCHANGE, HEADER_ROUTING_KEY, HEADER_SENT, HEADER_TO
from bide.durations import EARLIEST, LATEST_MILLISECOND, to_microseconds, to_milliseconds
from bide.errors import InvalidInputError
from bide.pipelines.audit.columns import (
    FACT_COLUMNS,
    TABLES_BY_SOURCE,
    TIMESTAMP,
    UNDECODABLE,
    UNDECODABLE_COLUMNS,
    arrow_schema,
)
from bide.recoverability.history import (
    HEADER_FIRST_DUE,
    HEADER_OPERATOR_RETRIES,
    HEADER_RETRIES,
    NSERVICEBUS_DUE,
    NSERVICEBUS_RETRIES,
    NSERVICEBUS_SENT,
    read_nservicebus_time,
)

TABLE_COLUMN: Final = "table"
"""The column of :func:`facts_of` with the name of the table to which a row belongs."""

FAILED_KINDS: Final = ("failed", "retried", "parked", "discarded", "expired")
"""The kinds of events in the table ``failed``. A ``duplicate`` is not a failure: its message was processed before."""

_COMMON: Final = [("value", pa.binary()), ("stream", pa.string()), ("offset", pa.int64()), ("timestamp", TIMESTAMP)]
_TAP_COLUMNS: Final = [
    *((name, pa.string()) for name in ("routing_key", "message_id", "type")),
    ("due", TIMESTAMP),
    ("headers", pa.map_(pa.string(), pa.string())),
]
_LAST_COLUMN: Final = [(UNDECODABLE, pa.string())]

_DELAYED_KEY: Final = re.compile(rf"((?:[01]\.){{{LEVELS}}})(.*)", re.DOTALL)
_TARGET_WORD: Final = re.compile(r"~([qx]):([^.]*)(?:\.(.*))?", re.DOTALL)
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_TYPE_SEPARATOR: Final = re.compile("[;,]")
_OFFSET_PREFIX: Final = re.compile("(?:UTC|GMT)?(?=[+-])")
_SECOND: Final = 1_000_000
_DAY: Final = 86_400 * _SECOND
"""In microseconds, as all times here."""
_LONGEST_DELAY: Final = (1 << LEVELS) - 1
"""In seconds."""
_FIRST_TIME, _LAST_TIME = to_milliseconds(EARLIEST) * 1_000, LATEST_MILLISECOND * 1_000
"""The first and the last time that Python can represent, in microseconds. Spark's range is larger."""
_INT: Final = 1 << 31
_LONG: Final = 1 << 63

_Fields = dict[str, Any]


def message_schema(source: str) -> pa.Schema:
    """The columns of messages that :func:`facts_of` needs, with the names of the data source ``rabbitmq``."""
    return pa.schema([*_COMMON, *([] if source == "events" else _TAP_COLUMNS), *_LAST_COLUMN])


@cache
def fact_schema(source: str) -> pa.Schema:
    """The columns that :func:`facts_of` returns: all columns of the tables of a source, and the name of the table."""
    fields = {TABLE_COLUMN: pa.field(TABLE_COLUMN, pa.string())}
    for columns in (*(FACT_COLUMNS[table] for table in TABLES_BY_SOURCE[source]), UNDECODABLE_COLUMNS):
        fields.update({one.name: one for one in arrow_schema(columns) if one.name not in fields})
    return pa.schema(list(fields.values()))


def facts_of(
    messages: pa.RecordBatch, source: str, *, layouts: Mapping[str, str], time_zone: str = "UTC"
) -> pa.RecordBatch:
    """Convert messages to facts. A message that cannot be decoded becomes a row of the table ``undecodable``.

    Args:
        messages: messages with the columns of :func:`message_schema`.
        source: one of :data:`bide.pipelines.audit.columns.TABLES_BY_SOURCE`.
        layouts: the layout of each stream of a tap.
        time_zone: the time zone of Celery's due times without an offset.
    """
    rows = _events(messages) if source == "events" else _tap_rows(messages, source, layouts, zone_of(time_zone))
    schema = fact_schema(source)
    values: dict[str, list[Any]] = {name: [] for name in schema.names}
    for row in (*rows, *_undecodable(messages)):
        for name, column in values.items():
            column.append(row.get(name))
    return pa.RecordBatch.from_arrays([pa.array(values[one.name], one.type) for one in schema], schema=schema)


def rows_of(facts: pa.Table, table: str) -> pa.Table:
    """The rows of a table among facts, with the columns of the table."""
    columns = UNDECODABLE_COLUMNS if table == UNDECODABLE else FACT_COLUMNS[table]
    return facts.filter(pc.equal(facts.column(TABLE_COLUMN), table)).select(arrow_schema(columns).names)


@cache
def zone_of(name: str) -> tzinfo:
    """A time zone by a name that Spark accepts, such as ``Europe/Berlin`` or ``+02:00``.

    Raises:
        InvalidInputError: Python does not know the zone.
    """
    if name == "UTC":
        return UTC
    try:
        offset = datetime.strptime(_OFFSET_PREFIX.sub("", name), "%z").tzinfo if _OFFSET_PREFIX.match(name) else None
        return offset or ZoneInfo(name)
    except (KeyError, OSError, ValueError) as error:
        raise InvalidInputError(
            f"the time zone {name!r} is not known: give one such as UTC, Europe/Berlin or +02:00"
        ) from error


def _lists(messages: pa.RecordBatch, *names: str) -> Iterable[tuple[Any, ...]]:
    """The values of columns in rows; times are numbers of microseconds, and a missing column is null."""
    lists = []
    for name in names:
        if name not in messages.schema.names:
            lists.append([None] * messages.num_rows)
            continue
        column = messages.column(name)
        lists.append((column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).to_pylist())
    return zip(*lists, strict=True)


def _undecodable(messages: pa.RecordBatch) -> Iterator[_Fields]:
    names = (UNDECODABLE, "timestamp", "stream", "offset")
    for place, (reason, seen, stream, offset) in enumerate(_lists(messages, *names)):
        if reason is not None:
            value = messages.column("value")[place].as_py()
            fields = {"reason": reason, "seen": seen, "value": value, "size": len(value)}
            yield {TABLE_COLUMN: UNDECODABLE, **fields, "stream": stream, "offset": offset, "day": seen // _DAY}


# -- Taps


def _tap_rows(messages: pa.RecordBatch, source: str, layouts: Mapping[str, str], zone: tzinfo) -> Iterator[_Fields]:
    sizes = pc.binary_length(messages.column("value")).to_pylist()
    names = ("stream", "offset", "timestamp", "routing_key", "message_id", "type", "due", "headers", UNDECODABLE)
    for size, (stream, offset, seen, key, message_id, kind, due, pairs, reason) in zip(
        sizes, _lists(messages, *names), strict=True
    ):
        if reason is not None:
            continue
        found = _tap_fields(key, message_id, kind, due, dict(pairs or ()), zone)
        if source == "scheduled":
            # The routing key has the length of the delay, which starts when this tap records the message. (For a
            # delivered message, the start is not known.)
            if found["due"] is None and found["delay_seconds"] is not None:
                found["due"] = _in_calendar(seen + found["delay_seconds"] * _SECOND)
        elif found["due"] is not None:
            found["lateness_ms"] = (seen - found["due"]) / 1000.0
        # The due time that the sender gave, by the rules of bide.recoverability.copies.senders_due.
        is_first = not found["retries"] and not found["operator_retries"]
        first_due = _coalesce(found["senders_due"], found["due"] if is_first else found["nservicebus_due"])
        day = _coalesce(first_due, found["sent"], seen) // _DAY
        yield {
            **found,
            TABLE_COLUMN: source,
            source: seen,
            "first_due": first_due,
            "size": size,
            "layout": layouts.get(stream),
            "stream": stream,
            "offset": offset,
            "day": day,
        }


def _tap_fields(
    routing_key: str | None,
    message_id: str | None,
    kind: str | None,
    due: int | None,
    headers: Mapping[str, str | None],
    zone: tzinfo,
) -> _Fields:
    """The fields of a delayed message, by the rules of ``bide.delay.received`` and of NServiceBus and Celery."""
    header = headers.get
    delayed = _DELAYED_KEY.fullmatch(routing_key or "")
    digits, address = ("", "") if delayed is None else (delayed[1].replace(".", ""), delayed[2])
    word = _TARGET_WORD.fullmatch(address)
    to, own_key = None, routing_key
    if word is not None:
        named = word[2].replace("%2E", ".").replace("%25", "%")
        to, own_key = f"{word[1]}:{named}", named if word[1] == "q" else word[3] or ""
    elif digits:
        to, own_key = f"q:{address}", address
    target = _coalesce(header(HEADER_TO), to)
    retries = _coalesce(_count(header(HEADER_RETRIES)), _count(header(NSERVICEBUS_RETRIES)), 0)
    nservicebus_due = _nservicebus_time(header(NSERVICEBUS_DUE))
    nservicebus_sent = _nservicebus_time(header(NSERVICEBUS_SENT))
    task = header("task")
    if due is None and task is not None:
        due = _time_in(header("eta"), zone)
    # The delay of a retry starts later, at a time that no header has.
    if due is None and retries == 0:
        due = nservicebus_due
        delay = _whole(header(HEADER_DELAY))
        if due is None and nservicebus_sent is not None and delay is not None and 0 <= delay <= _LONGEST_DELAY:
            due = _in_calendar(nservicebus_sent + delay * _SECOND)
    first_kind = _TYPE_SEPARATOR.split(header("NServiceBus.EnclosedMessageTypes") or "", maxsplit=1)[0].strip(" ")
    return {
        "message_id": _coalesce(message_id, header(NATIVE_MESSAGE_ID), header("id") if task is not None else None),
        "target": target,
        "sent": _coalesce(_milliseconds(_whole(header(HEADER_SENT))), nservicebus_sent),
        "due": due,
        "retries": retries,
        "operator_retries": _count(header(HEADER_OPERATOR_RETRIES)) or 0,
        "senders_due": _milliseconds(_whole(header(HEADER_FIRST_DUE))),
        "nservicebus_due": nservicebus_due,
        "delay_seconds": int(digits, 2) if digits else None,
        "type": _coalesce(task, kind or None, first_kind or None),
        "exchange": _coalesce(header(HEADER_EXCHANGE), target[2:] if (target or "").startswith("x:") else ""),
        "routing_key": _coalesce(header(HEADER_ROUTING_KEY), own_key),
    }


# -- Events of endpoints


def _events(messages: pa.RecordBatch) -> Iterator[_Fields]:
    """Rows of the tables ``processed`` and ``failed``. Other events, and messages that are not events, are left out."""
    for value, stream, offset, reason in _lists(messages, "value", "stream", "offset", UNDECODABLE):
        if reason is not None or (event := _object(value)) is None:
            continue
        kind = _text(event.get("event"))
        table = "processed" if kind == "processed" else "failed" if kind in FAILED_KINDS else None
        times = {
            name: _milliseconds(_in_range(event.get(name), _LONG))
            for name in ("sent", "due", "delivered", "started", "ended")
        }
        if table is None or times["ended"] is None:
            continue
        texts = ("endpoint", "queue", "message_id", "exception", "text", "group")
        yield {
            TABLE_COLUMN: table,
            "kind": kind,
            **{name: _text(event.get(name)) for name in texts},
            "type": _text(event.get("message_type")),
            **{name: _in_range(event.get(name), _INT) for name in ("attempt", "retries")},
            **times,
            "delay_ms": _decimal(event.get("delay")),
            "stream": stream,
            "offset": offset,
            "day": _coalesce(times["due"], times["sent"], times["delivered"], times["ended"]) // _DAY,
        }


def _object(value: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(value.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _text(value: Any) -> str | None:
    """A value of JSON as text. Half of a surrogate pair becomes a question mark."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()


def _decimal(value: Any) -> float | None:
    try:
        return float(value) if type(value) in (int, float) else None
    except OverflowError:
        return None


def _in_range(value: Any, limit: int) -> int | None:
    return value if type(value) is int and -limit <= value < limit else None


# -- Values


def _coalesce(*values: Any) -> Any:
    return next((one for one in values if one is not None), None)


def _whole(text: str | None) -> int | None:
    """A whole number of 64 bits in a header."""
    if text is None or not _NUMBER.fullmatch(text.strip()):
        return None
    return _in_range(int(text), _LONG)


def _count(text: str | None) -> int | None:
    number = _in_range(_whole(text), _INT)
    return number if number is not None and number > 0 else None


def _in_calendar(time: int | None) -> int | None:
    return time if time is not None and _FIRST_TIME <= time <= _LAST_TIME else None


def _milliseconds(number: int | None) -> int | None:
    return None if number is None else _in_calendar(number * 1_000)


def _nservicebus_time(text: str | None) -> int | None:
    found = read_nservicebus_time(text)
    return None if found is None else _in_calendar(to_microseconds(found))


def _time_in(text: str | None, zone: tzinfo) -> int | None:
    """A time in ISO 8601."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text.strip())
        return _in_calendar(to_microseconds(found if found.tzinfo is not None else found.replace(tzinfo=zone)))
    except (ValueError, OverflowError):
        return None
