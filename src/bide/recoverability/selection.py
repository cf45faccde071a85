"""Conditions that select failed messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

from bide.durations import format_delay
from bide.errors import InvalidInputError
from bide.recoverability.failed import FailedMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Conditions that select failed messages. A message must meet all that are given; without any, all are selected.

    Attributes:
        ids: ids or message ids, of which the message must have one.
        group: a group of failures; see ``FailedMessage.group``.
        queue: the queue that it failed on, or a pattern of its name, such as ``orders.*``.
        endpoint: the endpoint that it failed on.
        exception: the class of the exception, with or without its module.
        text: part of the exception's message; case is ignored.
        body_text: part of the message body, in UTF-8; case matters.
        message_type: the sender's message type.
        key: the key of the schedule that it was delivered for.
        reason: the reason of the failure; see ``FailedMessage.reason``.
        older_than: time since the failure, at least; messages without a time of failure are not selected.
        newer_than: time since the failure, at most; messages without a time of failure are not selected.
        headers: headers of the sender that it must have, with these values as text.

    Raises:
        InvalidInputError: *text* or *body_text* is empty, and would select every message.
    """

    ids: frozenset[str] = frozenset()
    group: str | None = None
    queue: str | None = None
    endpoint: str | None = None
    exception: str | None = None
    text: str | None = None
    body_text: str | None = None
    message_type: str | None = None
    key: str | None = None
    reason: str | None = None
    older_than: timedelta | None = None
    newer_than: timedelta | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "" in (self.text, self.body_text):
            raise InvalidInputError("an empty search text selects every message: give a text, or omit the condition")

    @property
    def everything(self) -> bool:
        """Whether no condition is given."""
        return self == Selection()

    def holds(self, message: FailedMessage, now: datetime) -> bool:
        """Whether this message meets all conditions."""
        return (
            (not self.ids or message.id in self.ids or message.message_id in self.ids)
            and self.group in (None, message.group)
            and (self.queue is None or _matches(self.queue, message.queue))
            and self.endpoint in (None, message.endpoint)
            and self.message_type in (None, message.message_type)
            and self.key in (None, message.key)
            and self.reason in (None, message.reason)
            and _names(self.exception, message.exception)
            and (self.text is None or self.text.casefold() in (message.text or "").casefold())
            and (self.body_text is None or self.body_text.encode(errors="surrogateescape") in message.body)
            and self._in_time(message.failed_at, now)
            and all(_as_text(message.headers.get(name)) == value for name, value in self.headers.items())
        )

    def _in_time(self, failed_at: datetime | None, now: datetime) -> bool:
        if self.older_than is None and self.newer_than is None:
            return True
        if failed_at is None:
            return False
        age = now - failed_at
        return (self.older_than is None or age > self.older_than) and (self.newer_than is None or age < self.newer_than)

    def to_dict(self) -> dict[str, Any]:
        """The given conditions, as JSON."""
        found: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None or value in (frozenset(), {}):
                continue
            if isinstance(value, frozenset):
                value = sorted(value)
            found[one.name] = format_delay(value) if isinstance(value, timedelta) else value
        return found


def _matches(pattern: str, queue: str | None) -> bool:
    return queue is not None and (queue == pattern or fnmatchcase(queue, pattern))


def _names(wanted: str | None, found: str | None) -> bool:
    return wanted is None or (found is not None and (found == wanted or found.endswith(f".{wanted}")))


def _as_text(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return None if value is None else str(value)
