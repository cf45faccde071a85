"""Encoding of the parts of the state, for snapshots, and of the messages in records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bide.errors import ScheduleRecordError
from bide.schedules.answers import answer_fields, read_answer
from bide.schedules.entries import (
    FinishedKey,
    RememberedAnswer,
    ScheduleSession,
    StateEntry,
    UnderWay,
    WaitingSchedule,
)
from bide.schedules.fields import RecordFields, without_absent
from bide.schedules.message import ScheduledMessage
from bide.schedules.requests import AppliedNumbers


class EntryWriter:
    """Entries as JSON objects, and their messages as bytes beside them.

    Attributes:
        blobs: the bytes of all messages, in their order.
    """

    def __init__(self) -> None:
        self.blobs: list[bytes] = []

    def message(self, message: ScheduledMessage) -> list[int]:
        """Keep the bytes of a message, and return their lengths."""
        self.blobs += [message.properties, message.body]
        return [len(message.properties), len(message.body)]

    def entry(self, entry: StateEntry) -> dict[str, Any]:
        """An entry of a snapshot."""
        return without_absent(self._entry(entry))

    def _entry(self, entry: StateEntry) -> dict[str, Any]:
        match entry:
            case WaitingSchedule():
                return {
                    "is": "waiting",
                    "key": entry.key,
                    "id": entry.id,
                    "version": entry.version,
                    "to": entry.target,
                    "routing_key": entry.routing_key or None,
                    "nominal": entry.nominal,
                    "due": entry.due,
                    "every": entry.recurrence,
                    "is_paused": entry.is_paused,
                    "resumed_at": entry.resumed_at,
                    "message": self.message(entry.message),
                }
            case UnderWay():
                return {
                    "is": "under-way",
                    "occurrence": entry.occurrence,
                    "key": entry.key,
                    "id": entry.id,
                    "to": entry.target,
                    "routing_key": entry.routing_key or None,
                    "nominal": entry.nominal,
                    "due": entry.due,
                    "is_recurring": entry.is_recurring,
                    "is_run_now": entry.is_run_now,
                    "message": self.message(entry.message),
                }
            case FinishedKey():
                return {"is": "finished", "key": entry.key, "version": entry.version, "tick": entry.tick}
            case ScheduleSession():
                applied = [list(entry.applied.starts), list(entry.applied.ends)]
                return {"is": "session", "session": entry.session, "applied": applied, "tick": entry.tick}
            case RememberedAnswer():
                answer = answer_fields(entry.answer)
                return {"is": "answer", "request": entry.request, "tick": entry.tick, **answer}


class EntryReader:
    """The counterpart of :class:`EntryWriter`.

    Args:
        rest: the bytes after the JSON object.
    """

    def __init__(self, rest: bytes) -> None:
        self._rest = memoryview(rest)
        self._place = 0

    def end(self) -> None:
        """Check that all bytes were read.

        Raises:
            ScheduleRecordError: bytes are left.
        """
        if self._place != len(self._rest):
            raise ScheduleRecordError(f"a record has {len(self._rest) - self._place} bytes too many")

    def message(self, fields: RecordFields) -> ScheduledMessage:
        """The next message.

        Raises:
            ScheduleRecordError: its lengths are missing or wrong.
        """
        lengths = fields.items("message", most=2)
        match lengths:
            case [int(properties), int(body)] if properties >= 2 and body >= 0 and not _has_flags(lengths):
                return ScheduledMessage(self._bytes(properties), self._bytes(body))
        raise fields.error("message", lengths, "the lengths of properties and body")

    def _bytes(self, length: int) -> bytes:
        start, self._place = self._place, self._place + length
        if self._place > len(self._rest):
            raise ScheduleRecordError(f"a record has {self._place - len(self._rest)} bytes too few")
        return bytes(self._rest[start : self._place])

    def entry(self, value: object) -> StateEntry:
        """The next entry of a snapshot.

        Raises:
            ScheduleRecordError: the value is not an entry.
        """
        fields = RecordFields("an entry of a snapshot", value)
        entry = self._entry(fields.text("is"), fields)
        fields.end()
        return entry

    def _entry(self, kind: str, fields: RecordFields) -> StateEntry:
        match kind:
            case "waiting":
                return WaitingSchedule(
                    key=fields.text("key"),
                    id=fields.text("id"),
                    version=fields.text("version"),
                    target=fields.text("to", limit=257),
                    routing_key=fields.optional_text("routing_key") or "",
                    nominal=fields.integer("nominal"),
                    due=fields.integer("due"),
                    recurrence=fields.flat("every"),
                    is_paused=fields.flag("is_paused"),
                    resumed_at=fields.optional_integer("resumed_at"),
                    message=self.message(fields),
                )
            case "under-way":
                return UnderWay(
                    occurrence=fields.text("occurrence"),
                    key=fields.text("key"),
                    id=fields.text("id"),
                    target=fields.text("to", limit=257),
                    routing_key=fields.optional_text("routing_key") or "",
                    nominal=fields.integer("nominal"),
                    due=fields.integer("due"),
                    is_recurring=fields.flag("is_recurring"),
                    is_run_now=fields.flag("is_run_now"),
                    message=self.message(fields),
                )
            case "finished":
                return FinishedKey(key=fields.text("key"), version=fields.text("version"), tick=fields.integer("tick"))
            case "session":
                return ScheduleSession(
                    session=fields.text("session"), applied=_numbers(fields), tick=fields.integer("tick")
                )
            case "answer":
                return RememberedAnswer(
                    request=fields.text("request"), tick=fields.integer("tick"), answer=read_answer(fields)
                )
            case _:
                raise ScheduleRecordError(f"{kind!r} is not a kind of entry of a snapshot")


def _has_flags(values: Sequence[Any]) -> bool:
    """Whether a value is true or false, which Python takes for one and zero."""
    return any(isinstance(one, bool) for one in values)


def _numbers(fields: RecordFields) -> AppliedNumbers:
    match fields.items("applied", most=2):
        case [[*starts], [*ends]] if len(starts) == len(ends) and _is_ascending(starts, ends):
            return AppliedNumbers(tuple(starts), tuple(ends))
    raise fields.error("applied", "something else", "two lists of ascending numbers")


def _is_ascending(starts: list[Any], ends: list[Any]) -> bool:
    bounds = [one for pair in zip(starts, ends, strict=True) for one in pair]
    if _has_flags(bounds) or not all(isinstance(one, int) for one in bounds):
        return False
    ranges_fit = all(start <= end for start, end in zip(starts, ends, strict=True))
    return ranges_fit and all(end + 1 < start for end, start in zip(ends, starts[1:], strict=False))
