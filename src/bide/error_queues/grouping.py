"""Groups and counts of failed messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from bide.recoverability.failed import FailedMessage

By = Literal["exception", "type", "key"]


@dataclass(slots=True, kw_only=True)
class Group:
    """Failed messages with the same cause, type or key.

    Attributes:
        name: the cause, type or key.
        count: number of messages.
        first: when the first of them failed, or None.
        last: when the last of them failed, or None.
        queues: the queues that they failed on.
        example: the id of one of them.
        text: the exception's message of the example, or None.
    """

    name: str
    count: int = 0
    first: datetime | None = None
    last: datetime | None = None
    queues: set[str] = field(default_factory=set)
    example: str = ""
    text: str | None = None

    def add(self, message: FailedMessage) -> None:
        """Add a message."""
        self.count += 1
        if not self.example:
            self.example, self.text = message.id, message.text
        if message.queue is not None:
            self.queues.add(message.queue)
        if message.failed_at is not None:
            self.first = min(self.first or message.failed_at, message.failed_at)
            self.last = max(self.last or message.failed_at, message.failed_at)

    def to_dict(self) -> dict[str, Any]:
        """The group as JSON."""
        return {
            "group": self.name,
            "count": self.count,
            "first": _iso(self.first),
            "last": _iso(self.last),
            "queues": sorted(self.queues),
            "example": self.example,
            "text": self.text,
        }


class Groups:
    """Collects messages into groups.

    Args:
        by: ``exception`` groups by the exception's class and first stack frame, ``type`` by the message type, ``key``
            by the key of the schedule.
    """

    def __init__(self, by: By) -> None:
        self._by = by
        self._groups: dict[str, Group] = {}

    def add(self, message: FailedMessage) -> None:
        """Add a message to its group."""
        names = {
            "exception": message.group,
            "type": message.message_type or "(no type)",
            "key": message.key or "(no key)",
        }
        name = names[self._by]
        self._groups.setdefault(name, Group(name=name)).add(message)

    def largest_first(self) -> list[Group]:
        """The groups, the largest first."""
        return sorted(self._groups.values(), key=lambda one: (-one.count, one.name))


class Summary:
    """Counts of the messages in an error queue."""

    def __init__(self) -> None:
        self.total = 0
        self.size = 0
        self.by: Mapping[str, Counter[str]] = {
            name: Counter() for name in ("queue", "reason", "endpoint", "exception", "message_type", "hour")
        }
        self.first: datetime | None = None
        self.last: datetime | None = None

    def add(self, message: FailedMessage) -> None:
        """Add a message."""
        self.total += 1
        self.size += len(message.body)
        for name in ("queue", "reason", "endpoint", "exception", "message_type"):
            value = getattr(message, name)
            if value is not None:
                self.by[name][value] += 1
        if message.failed_at is not None:
            hour = message.failed_at.replace(tzinfo=None).isoformat(" ", "hours")
            self.by["hour"][f"{hour}:00Z"] += 1
            self.first = min(self.first or message.failed_at, message.failed_at)
            self.last = max(self.last or message.failed_at, message.failed_at)

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON."""
        return {
            "total": self.total,
            "bytes": self.size,
            "first": _iso(self.first),
            "last": _iso(self.last),
            **{
                f"by_{name}": dict(sorted(found.items()) if name == "hour" else found.most_common())
                for name, found in self.by.items()
            },
        }


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")
