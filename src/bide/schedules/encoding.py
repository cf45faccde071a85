r"""Encoding of the records of the schedule log.

A record is the body of one message: a JSON object, a newline, and the messages that the object refers to, one after
the other. The object names the lengths of their properties and bodies. So any tool can show a record, and the messages
keep their bytes::

    {"v":1,"kind":"schedule","request":"5f2c-17","key":"invoice:42",...,"message":[31,5]}\n<31 bytes><5 bytes>

Applications may send anything, so any other form is a ``ScheduleRecordError``.
"""

from __future__ import annotations

import re
from typing import Any, Final

from bide.errors import NewerRecordError, ScheduleRecordError
from bide.schedules.entries import OUTCOMES
from bide.schedules.entry_fields import EntryReader, EntryWriter
from bide.schedules.fields import RecordFields, read_head, without_absent, write_head
from bide.schedules.names import has_control_characters
from bide.schedules.records import (
    ACTIONS,
    AddSchedule,
    Beat,
    ChangeSchedule,
    Claim,
    ClaimedOccurrence,
    Done,
    EndedOccurrence,
    ScheduleFilter,
    ScheduleRecord,
    SnapshotChunk,
    Tick,
)
from bide.schedules.requests import RequestId

VERSION: Final = 1

MAX_ITEMS: Final = 10_000
"""The maximum number of items in a claim, and of entries in a chunk."""


RESERVE: Final = 4_096
"""Bytes that a gate may add to a message: the fields of a snapshot."""

_LARGE: Final = 64_000

_CHUNK: Final = re.compile(
    rb'\{"v":1,"kind":"snapshot","cycle":"(?P<cycle>[^"\\\x00-\x1f]{1,255})","as_of":(?P<as_of>-1|\d{1,18}),'
    rb'"count":(?P<count>\d{1,18}),"tick":(?P<tick>\d{1,18}),"number":(?P<number>\d{1,18})'
    rb'(?P<is_last>,"is_last":true)?,"entries":'
)
"""The beginning of a chunk."""


def encode(record: ScheduleRecord) -> bytes:
    """The body of a record."""
    writer = EntryWriter()
    return b"".join([write_head({"v": VERSION, **_fields(record, writer)}), *writer.blobs])


def with_reserve(body: bytes) -> bytes:
    """Pad a record so that the broker accepts it only if it also accepts the records that gates make of it.

    A client does not know the largest message that the broker accepts. So a large record gets spaces, which do not
    change it. Without the spaces, a gate might get a message that is too large for a snapshot.
    """
    return body if len(body) < _LARGE else body[:5] + b" " * RESERVE + body[5:]


def decode(body: bytes) -> ScheduleRecord:
    """The record in a body.

    Raises:
        NewerRecordError: a later release of bide wrote it.
        ScheduleRecordError: the body is not a record.
    """
    fields, rest = read_head("a record of a schedule log", body)
    version = fields.integer("v", lowest=1)
    if version > VERSION:
        raise NewerRecordError(
            f"a record of version {version} is in the schedule log, and this release of bide reads {VERSION}: "
            "upgrade the gates before the clients"
        )
    reader = EntryReader(rest)
    record = _record(fields, reader)
    fields.end()
    reader.end()
    return record


def chunk_without_entries(body: bytes) -> SnapshotChunk | None:
    """A chunk as :func:`encode` writes it, but without its entries; None for any other body.

    To decode the entries takes most of the time, and only a gate without an index needs them.
    """
    if (head := _CHUNK.match(body)) is None:
        return None
    try:
        cycle = head["cycle"].decode()
    except UnicodeDecodeError:
        return None
    return SnapshotChunk(
        cycle=cycle,
        as_of=int(head["as_of"]),
        count=int(head["count"]),
        tick=int(head["tick"]),
        number=int(head["number"]),
        is_last=head["is_last"] is not None,
        entries=(),
    )


# -- writing


def _fields(record: ScheduleRecord, writer: EntryWriter) -> dict[str, Any]:
    match record:
        case AddSchedule():
            return {
                "kind": "schedule",
                "request": str(record.request),
                "key": record.key,
                "to": record.target,
                "routing_key": record.routing_key or None,
                "nominal": record.nominal,
                "due": record.due,
                "every": record.recurrence,
                "if_absent": record.if_absent,
                "if_version": record.if_version,
                "message": writer.message(record.message),
            }
        case ChangeSchedule():
            chosen = record.filter
            return {
                "kind": record.action,
                "request": str(record.request),
                "key": record.key,
                "filter": None if chosen is None else filter_fields(chosen),
                "due": record.due,
                "at": record.at,
                "if_version": record.if_version,
            }
        case Claim():
            return {"kind": "claim", "gate": record.gate, "items": [_claim_fields(one) for one in record.items]}
        case Done():
            ended = [[one.occurrence, one.outcome] for one in record.items]
            return {"kind": "done", "gate": record.gate, "items": ended}
        case Tick():
            return {"kind": "tick", "number": record.number}
        case Beat():
            return {
                "kind": "beat",
                "gate": record.gate,
                "leads": record.leads,
                "clock": record.clock,
                "after": record.after,
                "count": record.count,
                "snapshot": record.snapshot,
            }
        case SnapshotChunk():
            return {
                "kind": "snapshot",
                "cycle": record.cycle,
                "as_of": record.as_of,
                "count": record.count,
                "tick": record.tick,
                "number": record.number,
                "is_last": record.is_last,
                "entries": [writer.entry(one) for one in record.entries],
            }


def filter_fields(chosen: ScheduleFilter) -> dict[str, Any]:
    """The JSON object of a filter."""
    return without_absent(
        {
            "prefix": chosen.prefix or None,
            "to": chosen.target,
            "due_from": chosen.due_from,
            "due_before": chosen.due_before,
        }
    )


def _claim_fields(item: ClaimedOccurrence) -> dict[str, Any]:
    return without_absent(
        {
            "key": item.key,
            "version": item.version,
            "nominal": item.nominal,
            "due": item.due,
            "skip": item.skip,
            "next_nominal": item.next_nominal,
            "next_due": item.next_due,
        }
    )


# -- reading


def _record(fields: RecordFields, reader: EntryReader) -> ScheduleRecord:
    kind = fields.text("kind")
    match kind:
        case "schedule":
            return AddSchedule(
                request=RequestId.parse(fields.text("request")),
                key=read_key(fields),
                target=fields.text("to", limit=257),
                routing_key=fields.optional_text("routing_key") or "",
                nominal=fields.integer("nominal"),
                due=fields.integer("due"),
                recurrence=fields.flat("every"),
                if_absent=fields.flag("if_absent"),
                if_version=fields.optional_text("if_version"),
                message=reader.message(fields),
            )
        case "claim":
            items = [_claim_item(one) for one in fields.items("items", most=MAX_ITEMS)]
            return Claim(gate=fields.text("gate"), items=tuple(items))
        case "done":
            ended = [_ended_item(one) for one in fields.items("items", most=MAX_ITEMS)]
            return Done(gate=fields.text("gate"), items=tuple(ended))
        case "tick":
            return Tick(number=fields.integer("number", lowest=1))
        case "beat":
            return Beat(
                gate=fields.text("gate"),
                leads=fields.flag("leads"),
                clock=fields.integer("clock"),
                after=fields.integer("after", lowest=-1),
                count=fields.integer("count"),
                snapshot=fields.optional_integer("snapshot"),
            )
        case "snapshot":
            return SnapshotChunk(
                cycle=fields.text("cycle"),
                as_of=fields.integer("as_of", lowest=-1),
                count=fields.integer("count"),
                tick=fields.integer("tick"),
                number=fields.integer("number"),
                is_last=fields.flag("is_last"),
                entries=tuple(reader.entry(one) for one in fields.items("entries", most=MAX_ITEMS)),
            )
        case _ if kind in ACTIONS:
            return _change(kind, fields)
        case _:
            raise ScheduleRecordError(f"the kind {kind!r} of a record is unknown")


def read_key(fields: RecordFields) -> str:
    """The key in a JSON object.

    Raises:
        ScheduleRecordError: the field is not a key.
    """
    key = fields.text("key")
    if has_control_characters(key):
        raise fields.error("key", repr(key), "text without control characters")
    return key


def _change(kind: str, fields: RecordFields) -> ChangeSchedule:
    action = next(one for one in ACTIONS if one == kind)
    change = ChangeSchedule(
        request=RequestId.parse(fields.text("request")),
        action=action,
        key=fields.optional_text("key"),
        filter=read_filter(fields.inner("filter")) if fields.has("filter") else None,
        due=fields.optional_integer("due"),
        at=fields.optional_integer("at"),
        if_version=fields.optional_text("if_version"),
    )
    if (change.key is None) == (change.filter is None):
        raise ScheduleRecordError(f"a record {kind!r} needs either a key or a filter")
    if change.filter is not None and change.if_version is not None:
        raise ScheduleRecordError(f"a record {kind!r} has both a filter and a version: only a key takes a version")
    if (change.due is None) == (kind == "move") or (change.at is None) == (kind == "resume"):
        raise ScheduleRecordError(f"a record {kind!r} has a wrong time: a move takes 'due', a resume 'at'")
    return change


def read_filter(fields: RecordFields) -> ScheduleFilter:
    """The filter in a JSON object.

    Raises:
        ScheduleRecordError: the object is not a filter.
    """
    chosen = ScheduleFilter(
        prefix=fields.optional_text("prefix") or "",
        target=fields.optional_text("to", limit=257),
        due_from=fields.optional_integer("due_from"),
        due_before=fields.optional_integer("due_before"),
    )
    fields.end()
    return chosen


def _claim_item(value: object) -> ClaimedOccurrence:
    fields = RecordFields("a claimed occurrence", value)
    item = ClaimedOccurrence(
        key=fields.text("key"),
        version=fields.text("version"),
        nominal=fields.integer("nominal"),
        due=fields.integer("due"),
        skip=fields.flag("skip"),
        next_nominal=fields.optional_integer("next_nominal"),
        next_due=fields.optional_integer("next_due"),
    )
    fields.end()
    if (item.next_nominal is None) != (item.next_due is None):
        raise ScheduleRecordError(
            "a claimed occurrence has only one time of the following one: give both times or neither"
        )
    return item


def _ended_item(value: object) -> EndedOccurrence:
    match value:
        case [str(occurrence), str(outcome)] if occurrence and outcome in OUTCOMES:
            return EndedOccurrence(occurrence=occurrence, outcome=next(one for one in OUTCOMES if one == outcome))
    raise ScheduleRecordError(f"{str(value)[:80]!r} is not an ended occurrence: give its id and its outcome")
