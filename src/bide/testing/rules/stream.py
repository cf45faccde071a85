"""Rules of streams, as consumers over AMQP 0-9-1 see them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, NoReturn

from bide.durations import to_microseconds
from bide.testing.rules.consumers import BrokerConsumer
from bide.testing.rules.entry import ByPriority, Entry
from bide.testing.rules.errors import channel_error, precondition_failed
from bide.testing.rules.message import StoredMessage
from bide.testing.rules.queue import BrokerQueue, Surroundings
from bide.topology import Queue

OFFSET_ARGUMENT: Final = "x-stream-offset"
"""Argument of a consumer, and header of the messages that it receives."""

MESSAGE_BYTES: Final = 100
"""The approximate number of bytes of a message on disk, besides its body."""

_SEGMENT_BYTES: Final = 500_000_000
_AGE: Final = re.compile(r"([0-9]+)([YMDhms])")
_SECONDS: Final = {"Y": 31_536_000, "M": 2_592_000, "D": 86_400, "h": 3600, "m": 60, "s": 1}


@dataclass(slots=True)
class _Record:
    offset: int
    written: int
    size: int
    message: StoredMessage


@dataclass(slots=True)
class _Segment:
    records: list[_Record] = field(default_factory=list)
    size: int = 0

    def append(self, record: _Record) -> None:
        self.records.append(record)
        self.size += record.size

    def first_from(self, offset: int) -> _Record | None:
        """The first record at or after an offset."""
        index = max(offset - self.records[0].offset, 0) if self.records else 0
        return self.records[index] if index < len(self.records) else None


@dataclass(slots=True)
class _StreamReader:
    position: int
    segment: _Segment


class StreamQueue(BrokerQueue):
    """A stream, by the rules of RabbitMQ's ``rabbit_stream_queue`` and ``osiris_log``.

    * Messages stay. Each consumer has a position of its own; settling a message only makes room for its next one. Below
      4.0 a message can be acknowledged, but not rejected.
    * ``x-stream-offset`` of a consumer is ``first``, ``last``, ``next`` (the default), an offset, a timestamp, or an
      age such as ``1h``. A position before the first message means the first. For an offset beyond the end, the
      consumer waits.
    * A message carries its offset in a header. Headers that are lists or tables are lost; CC is kept from 4.0 on. From
      4.0 on a message without a delivery mode gets the mode 1.
    * A consumer is not counted by a declaration. Below 4.0 a dead letter that is published at most once gets lost.
    * Retention removes whole segments when a new one begins. Each segment but the first takes up one offset. If
      retention removes the segment that a consumer is reading, the consumer reads that segment to its end, and then
      continues at the first message that is left, without an error.

    Unlike RabbitMQ, every message is a chunk of its own, so ``last`` means the last message. A method that RabbitMQ
    does not implement closes the channel, not the connection. A message is counted at once, not after some seconds.
    """

    def __init__(self, definition: Queue, surroundings: Surroundings) -> None:
        super().__init__(definition, surroundings, owner=None, order=ByPriority(), keeps_turn=True)
        arguments = definition.arguments
        segment = arguments.get("x-stream-max-segment-size-bytes")
        self._segment_bytes = segment if isinstance(segment, int) else _SEGMENT_BYTES
        self._max_age = _age(arguments.get("x-max-age"))
        self._segments = [_Segment()]
        self._next_offset = 0
        self._readers: dict[BrokerConsumer, _StreamReader] = {}

    @property
    def message_count(self) -> int:
        """Number of messages that retention has left."""
        return sum(len(segment.records) for segment in self._segments)

    @property
    def consumer_count(self) -> int:
        """Always 0: declarations do not count the consumers of a stream."""
        return 0

    @property
    def first_offset(self) -> int:
        """The offset of the first message that is left, or of the next one."""
        return next((one.records[0].offset for one in self._segments if one.records), self._next_offset)

    def publish(self, message: StoredMessage, publisher: object | None) -> bool:
        """Append a message."""
        if publisher is None and self._surroundings.release < (4, 0):
            return True
        size = MESSAGE_BYTES + len(message.body)
        if self._segments[-1].size >= self._segment_bytes:
            self._segments.append(_Segment())
            self._next_offset += 1
            self._trim()
        record = _Record(self._next_offset, self._clock.milliseconds, size, self._kept(message))
        self._segments[-1].append(record)
        self._next_offset += 1
        self._changed()
        return True

    def _kept(self, message: StoredMessage) -> StoredMessage:
        """The message after its conversion to AMQP 1.0 and back."""
        since_4 = self._surroundings.release >= (4, 0)
        properties = dict(message.properties)
        if since_4:
            properties.setdefault("delivery_mode", 1)
        headers = {
            name: value
            for name, value in (properties.pop("headers", None) or {}).items()
            if not isinstance(value, list | Mapping) or (since_4 and name == "CC")
        }
        if headers:
            properties["headers"] = headers
        return replace(message, properties=properties)

    def _trim(self) -> None:
        room = self._max_bytes
        if room is not None:
            for number in range(len(self._segments) - 1, -1, -1):
                room -= self._segments[number].size
                if room < 0 and number < len(self._segments) - 1:
                    del self._segments[: number + 1]
                    break
        if self._max_age is not None:
            limit = self._clock.milliseconds - self._max_age
            while len(self._segments) > 1 and self._segments[0].records[-1].written < limit:
                del self._segments[0]

    def prepare(self, consumer: BrokerConsumer, arguments: Mapping[str, Any]) -> None:
        """Check a consumer, and set the position where it begins.

        Raises:
            BrokerError: the consumer has no prefetch or does not acknowledge, or its offset is malformed.
        """
        where = f"queue '{self.name}' in vhost '{self._surroundings.name}'"
        if consumer.no_ack:
            raise channel_error(540, f"NOT_IMPLEMENTED - automatic acknowledgement not supported by stream {where}")
        if not consumer.prefetch:
            raise precondition_failed(f"consumer prefetch count is not set for stream {where}")
        position = self._position(arguments.get(OFFSET_ARGUMENT, "next"), where)
        self._readers[consumer] = _StreamReader(position, self._segment_of(position))

    def _position(self, wanted: object, where: str) -> int:
        match wanted:
            case "first":
                return 0
            case "last":
                return max(self._next_offset - 1, 0)
            case "next":
                return self._next_offset
            case datetime():
                since = to_microseconds(wanted) // 1000
            case str() if (age := _age(wanted)) is not None:
                since = self._clock.milliseconds - age
            case int() if not isinstance(wanted, bool):
                return max(wanted, 0)
            case _ if self._surroundings.release >= (4, 3):
                raise precondition_failed(
                    f"invalid arg '{OFFSET_ARGUMENT}' for {where}: {{invalid_stream_offset_arg,{wanted!r}}}"
                )
            case _:
                raise channel_error(541, "INTERNAL_ERROR")
        records = [one for segment in self._segments for one in segment.records]
        index = bisect_left(records, since, key=lambda one: one.written)
        return records[index].offset if index < len(records) else self._next_offset

    def get(self) -> tuple[Entry, int] | None:
        """Refuse: a stream has no ``basic.get``."""
        self._refuse("basic.get not supported by stream queues")

    def purge(self) -> int:
        """Refuse: a stream cannot be purged."""
        self._refuse("queue.purge not supported by stream queues")

    def _refuse(self, what: str) -> NoReturn:
        where = f"queue '{self.name}' in vhost '{self._surroundings.name}'"
        raise channel_error(540, f"NOT_IMPLEMENTED - {what} {where}")

    def requeue(self, entries: Sequence[Entry], *, failed: bool) -> None:
        """Deliver more; the messages were never taken away."""
        self._check_rejecting()
        self._changed()

    def discard(self, entries: Sequence[Entry]) -> None:
        """Deliver more; the messages were never taken away."""
        self._check_rejecting()
        self._changed()

    def _check_rejecting(self) -> None:
        if self._surroundings.release < (4, 0):
            self._refuse("basic.nack and basic.reject not supported by stream queues")

    def counts(self, entry: Entry, *, by_get: bool) -> dict[str, int]:
        """The offset."""
        return {OFFSET_ARGUMENT: entry.number}

    def _return_from_lost(self, entries: Sequence[Entry]) -> None:
        """Nothing to return."""

    def _remove_consumers(self, consumers: Sequence[BrokerConsumer]) -> bool:
        for one in consumers:
            del self._readers[one]
        return super()._remove_consumers(consumers)

    def _changed(self) -> None:
        for consumer in self.consumers:
            reader = self._readers[consumer]
            while consumer.can_receive and (record := self._next(reader)) is not None:
                reader.position = record.offset + 1
                self._hand_over(consumer, Entry(record.message, number=record.offset, size=record.size))

    def _next(self, reader: _StreamReader) -> _Record | None:
        """The next message of a consumer."""
        found = reader.segment.first_from(reader.position)
        if found is None:
            reader.segment = self._segment_of(reader.position)
            found = reader.segment.first_from(reader.position)
        return found

    def _segment_of(self, offset: int) -> _Segment:
        """The first segment with a message at or after an offset; the last segment if there is none yet."""
        found = self._segments[-1]
        for segment in reversed(self._segments):
            if segment.records and segment.records[-1].offset < offset:
                break
            found = segment
        return found

    def _clear(self) -> int:
        # The deletion of a stream reports no messages.
        self._segments = [_Segment()]
        return 0

    def _count_after_get(self) -> int:
        return self.message_count


def _age(text: object) -> int | None:
    """An age such as ``7D`` in milliseconds."""
    found = _AGE.fullmatch(text) if isinstance(text, str) else None
    return None if found is None else int(found[1]) * _SECONDS[found[2]] * 1000
