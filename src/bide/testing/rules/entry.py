"""Messages of a queue, and the order in which they leave it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from bide.testing.rules.message import StoredMessage


class EntryRecipient(Protocol):
    """The consumer that a message was delivered to."""

    def raise_prefetch(self) -> None:
        """Allow one more unsettled message from now on."""


class Entry:
    """A message in one queue.

    Attributes:
        message: the message.
        number: a number that defines the order of messages in the queue.
        level: the priority by which the queue orders it.
        size: number of bytes that count towards the queue's limit.
        expires_at: when it expires, in microseconds since the Unix epoch, or None.
        redelivered: whether it was delivered before.
        acquired: how often it was delivered and returned; counted by quorum queues.
        failed: how many of these deliveries count towards the delivery limit.
        recipient: the consumer that it was delivered to last; None for basic.get.
    """

    __slots__ = ("acquired", "expires_at", "failed", "level", "message", "number", "recipient", "redelivered", "size")

    def __init__(
        self, message: StoredMessage, *, number: int, level: int = 0, size: int = 0, expires_at: int | None = None
    ) -> None:
        self.message = message
        self.number = number
        self.level = level
        self.size = size
        self.expires_at = expires_at
        self.redelivered = False
        self.acquired: int | None = None
        self.failed: int | None = None
        self.recipient: EntryRecipient | None = None

    def is_expired(self, now: int) -> bool:
        """Whether it has expired."""
        return self.expires_at is not None and now >= self.expires_at


class EntryOrder(Protocol):
    """The ready messages of a queue, in the order in which they leave."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Entry]: ...

    def heads(self) -> list[Entry]:
        """The first message of each priority whose expiry the queue checks; the next one to leave comes first."""

    def add(self, entry: Entry) -> None:
        """Add a message at the end of its priority."""

    def pop(self) -> Entry:
        """Remove the next message."""

    def pop_expired(self, now: int) -> list[Entry]:
        """Remove the expired messages that the queue checks."""

    def restore(self, entries: Iterable[Entry]) -> None:
        """Return messages to their positions."""

    def clear(self) -> list[Entry]:
        """Remove all messages."""


class ByPriority:
    """Messages by priority, the highest first, and then by age.

    Args:
        all_heads: check the head of every priority for expiry, not only that of the highest.
    """

    def __init__(self, *, all_heads: bool = False) -> None:
        self._levels: dict[int, deque[Entry]] = {}
        self._all_heads = all_heads
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Entry]:
        for level in sorted(self._levels, reverse=True):
            yield from self._levels[level]

    def heads(self) -> list[Entry]:
        """See :class:`EntryOrder`."""
        levels = sorted(self._levels, reverse=True)
        return [self._levels[level][0] for level in (levels if self._all_heads else levels[:1])]

    def add(self, entry: Entry) -> None:
        """See :class:`EntryOrder`."""
        self._levels.setdefault(entry.level, deque()).append(entry)
        self._length += 1

    def pop(self) -> Entry:
        """See :class:`EntryOrder`."""
        return self._pop(max(self._levels))

    def _pop(self, level: int) -> Entry:
        waiting = self._levels[level]
        entry = waiting.popleft()
        if not waiting:
            del self._levels[level]
        self._length -= 1
        return entry

    def pop_expired(self, now: int) -> list[Entry]:
        """See :class:`EntryOrder`."""
        expired = []
        for level in sorted(self._levels, reverse=True):
            while level in self._levels and self._levels[level][0].is_expired(now):
                expired.append(self._pop(level))
            if not self._all_heads and level in self._levels:
                break
        return expired

    def restore(self, entries: Iterable[Entry]) -> None:
        """See :class:`EntryOrder`."""
        for entry in entries:
            self.add(entry)
        for level, waiting in self._levels.items():
            self._levels[level] = deque(sorted(waiting, key=lambda one: one.number))

    def clear(self) -> list[Entry]:
        """See :class:`EntryOrder`."""
        entries = list(self)
        self._levels.clear()
        self._length = 0
        return entries


class TwoPriorities:
    """High priorities and others, in a ratio of two to one: quorum queues of 4.0 to 4.2."""

    _WEIGHT = 2

    def __init__(self) -> None:
        self._high: deque[Entry] = deque()
        self._other: deque[Entry] = deque()
        self._taken = 0

    def __len__(self) -> int:
        return len(self._high) + len(self._other)

    def __iter__(self) -> Iterator[Entry]:
        yield from self._high
        yield from self._other

    def _next(self) -> deque[Entry]:
        if not self._high:
            return self._other
        if self._other and self._taken == self._WEIGHT and self._high[0].number > self._other[0].number:
            return self._other
        return self._high

    def heads(self) -> list[Entry]:
        """See :class:`EntryOrder`."""
        waiting = self._next()
        return [waiting[0]] if waiting else []

    def add(self, entry: Entry) -> None:
        """See :class:`EntryOrder`."""
        (self._high if entry.level else self._other).append(entry)

    def pop(self) -> Entry:
        """See :class:`EntryOrder`."""
        entry = self._next().popleft()
        self._taken = 0 if self._taken == self._WEIGHT else self._taken + 1
        return entry

    def pop_expired(self, now: int) -> list[Entry]:
        """See :class:`EntryOrder`."""
        expired = []
        while (heads := self.heads()) and heads[0].is_expired(now):
            expired.append(self.pop())
        return expired

    def restore(self, entries: Iterable[Entry]) -> None:
        """Not used: quorum queues return messages to another position."""
        raise NotImplementedError  # a call would be a mistake in the broker in memory

    def clear(self) -> list[Entry]:
        """See :class:`EntryOrder`."""
        entries = list(self)
        self._high.clear()
        self._other.clear()
        # A purged queue begins to count anew.
        self._taken = 0
        return entries
