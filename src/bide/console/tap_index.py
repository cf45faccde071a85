"""Running index of the stream of a tap, in memory: ids and due times of its latest messages."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from sys import intern
from typing import Final

from bide.console.tap_records import TapRecord, records
from bide.schedules.due_times import DueTimes
from bide.streams.log import Address, StreamLogs
from bide.streams.range_reader import OffsetRange

MAX_READ: Final = 100_000
"""The maximum number of messages of a stream that one request reads, which takes seconds."""

MAX_INDEXED: Final = 1_000_000
"""The maximum number of messages in an index, about 60 bytes each."""


class TapIndex:
    """An index of the latest messages of a stream. Each :meth:`read` adds the new ones and, on request, older ones.

    The index begins anew if the stream was replaced, or has got more new messages than one call reads. It contains no
    messages: :meth:`find` reads the message from the stream.

    Args:
        stream: the name of the stream.
        capacity: the maximum number of messages.
        at_once: the maximum number of new messages that one call reads, and of older ones.

    Attributes:
        lock: hold it while you use the index, because each request uses the index in another thread.
        times: the due times of the messages, by target.
        older_count: the number of offsets of the stream before the index.
    """

    def __init__(self, stream: str, *, capacity: int = MAX_INDEXED, at_once: int = MAX_READ) -> None:
        self.stream = stream
        self._capacity = capacity
        self._at_once = at_once
        self.lock = threading.Lock()
        self._clear(0)

    def __len__(self) -> int:
        """The number of messages."""
        return len(self._offsets)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for older messages."""
        return len(self) >= self._capacity

    @property
    def since(self) -> int | None:
        """When the first message was stored, in milliseconds since the Unix epoch; None without messages."""
        return self._stored[0] if self._stored else None

    def read(self, address: Address, *, older: bool = False) -> None:
        """Add the new messages.

        Args:
            older: also add the latest of the messages before the index, unless it is full.

        Raises:
            TargetNotFoundError: the stream does not exist.
            BrokerError: the stream cannot be read.
        """
        with StreamLogs(address) as logs:
            first, end = logs.first(self.stream), logs.end(self.stream)
        if (new := self._following(address, end)) is not None:
            self._append(new)
        else:
            self._clear(max(first, end - self._at_once))
            self._append(self._records(address, self._first, end))
        if older and first < self._first and not self.is_full:
            start = max(first, self._first - self._at_once)
            self._prepend(self._records(address, start, self._first), start)
        self._drop(len(self) - self._capacity)
        self.older_count = max(self._first - first, 0)

    def find(self, address: Address, message_id: str) -> TapRecord | None:
        """Read the latest message with an id; None if the index has none."""
        for offset in self._offsets_of(message_id):
            for one in self._records(address, offset, offset + 1):
                if one.message_id == message_id:
                    return one
        return None

    def _offsets_of(self, message_id: str) -> Iterator[int]:
        """Offsets of messages that may have an id, the latest first."""
        wanted, places, place = hash(message_id), list[int](), 0
        for _ in range(self._ids.count(wanted)):
            place = self._ids.index(wanted, place) + 1
            places.append(place - 1)
        return (self._offsets[one] for one in reversed(places))

    def _following(self, address: Address, end: int) -> list[TapRecord] | None:
        """The messages after the last one of the index.

        None if they are too many, or if the last one is no longer in the stream.
        """
        last = self._last
        if last is None or not last.offset < end <= last.offset + self._at_once:
            return None
        found = self._records(address, last.offset, end)
        return found[1:] if found and found[0] == last else None

    def _records(self, address: Address, start: int, end: int) -> list[TapRecord]:
        return list(records(address, OffsetRange(stream=self.stream, start=start, end=end)))

    def _clear(self, first: int) -> None:
        self.times = DueTimes(())
        self.older_count = 0
        self._first: int = first
        self._last: TapRecord | None = None
        self._offsets, self._stored, self._ids, self._dues = (array("q") for _ in range(4))
        self._targets: list[str] = []

    def _append(self, found: Sequence[TapRecord]) -> None:
        self._note(found, len(self))
        self._last = found[-1] if found else self._last

    def _prepend(self, found: Sequence[TapRecord], start: int) -> None:
        self._note(found, 0)
        self._first = start

    def _note(self, found: Sequence[TapRecord], place: int) -> None:
        """Insert messages at a place."""
        self._offsets[place:place] = array("q", (one.offset for one in found))
        self._stored[place:place] = array("q", (one.stored_at for one in found))
        self._ids[place:place] = array("q", (hash(one.message_id) for one in found))
        # A message without a due time has no target here.
        dues = [(one.target, one.due) if one.target and one.due is not None else ("", 0) for one in found]
        self._dues[place:place] = array("q", (due for _, due in dues))
        self._targets[place:place] = [intern(target) for target, _ in dues]
        for target, due in dues:
            if target:
                self.times.add(target, due)

    def _drop(self, number: int) -> None:
        """Remove the oldest messages."""
        if number <= 0:
            return
        for target, due in zip(self._targets[:number], self._dues[:number], strict=True):
            if target:
                self.times.remove(target, due)
        for values in (self._offsets, self._stored, self._ids, self._dues):
            del values[:number]
        del self._targets[:number]
        self._first = self._offsets[0]
