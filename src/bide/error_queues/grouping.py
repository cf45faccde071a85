"""Failed messages counted: by cause, by type, by where they failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from bide.recoverability.failed import FailedMessage

By = Literal["exception", "type"]


@dataclass(slots=True, kw_only=True)
class Group:
    """Failed messages that have something in common.

    Attributes:
        name: what they have in common.
        count: how many there are.
        first: when the first of them failed, or None.
        last: when the last of them failed, or None.
        queues: the queues that they failed on.
        example: the id of one of them.
        text: what its exception says, or None.
    """

    name: str
    count: int = 0
    first: datetime | None = None
    last: datetime | None = None
    queues: set[str] = field(default_factory=set)
    example: str = ""
    text: str | None = None

    def add(self, message: FailedMessage) -> None:
        """One more."""
        self.count += 1
        if not self.example:
            self.example, self.text = message.id, message.text
        if message.queue is not None:
            self.queues.add(message.queue)
        if message.failed_at is not None:
            self.first = min(self.first or message.failed_at, message.failed_at)
            self.last = max(self.last or message.failed_at, message.failed_at)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
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
    """Groups under way.

    Args:
        by: ``exception`` for the exception's type and its first stack frame, ``type`` for the message type.
    """

    def __init__(self, by: By) -> None:
        self._by = by
        self._groups: dict[str, Group] = {}

    def add(self, message: FailedMessage) -> None:
        """Count a message in its group."""
        name = message.group if self._by == "exception" else message.message_type or "(no type)"
        self._groups.setdefault(name, Group(name=name)).add(message)

    def largest_first(self) -> list[Group]:
        """The groups."""
        return sorted(self._groups.values(), key=lambda one: (-one.count, one.name))


class Summary:
    """The contents of an error queue in figures."""

    def __init__(self) -> None:
        self.total = 0
        self.size = 0
        self.by: Mapping[str, Counter[str]] = {
            name: Counter() for name in ("queue", "reason", "endpoint", "exception", "message_type", "hour")
        }
        self.first: datetime | None = None
        self.last: datetime | None = None

    def add(self, message: FailedMessage) -> None:
        """Count a message."""
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
        """As JSON."""
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
