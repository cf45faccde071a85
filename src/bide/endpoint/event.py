"""What an endpoint tells of each message that it had in hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from bide.durations import to_milliseconds

Kind = Literal["processed", "failed", "retried", "parked", "discarded", "expired", "duplicate"]
"""``failed``: an attempt failed and the message goes back to its queue at once. ``retried``: it failed, and comes back
after a delay. ``parked``: it failed for good. ``expired``: the sender's ``expiration`` was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One message left the endpoint's hands.

    Attributes:
        message_type: the sender's name for this kind of message, or None.
        queue: the queue that it came from.
        attempt: the number of this attempt since the last delayed retry, from 1.
        retries: delayed retries behind it.
        sent_at: when it was sent, as far as its sender says.
        due_at: the due time that its sender gave, or None; also of what is retried, or was sent back by an operator.
        delivered_at: when this process got it.
        started_at: when its handler began; None if it was not called.
        ended_at: when its handler ended, or the decision was made.
        exception: the type of the exception, or None.
        text: what the exception says, or None.
        group: what failures of one cause have in common, or None; see ``FailedMessage.group``.
        delay: of the retry, or None.
        to: the queue that it went to, where it went to one.
        lateness: time from its own due time to the receipt; None where bide did not delay it, or after a retry.
    """

    kind: Kind
    endpoint: str
    queue: str
    host: str
    process: int
    message_id: str | None
    message_type: str | None
    attempt: int
    retries: int
    sent_at: datetime | None
    due_at: datetime | None
    delivered_at: datetime
    started_at: datetime | None
    ended_at: datetime
    exception: str | None = None
    text: str | None = None
    group: str | None = None
    delay: timedelta | None = None
    to: str | None = None
    lateness: timedelta | None = None

    def to_dict(self) -> Mapping[str, Any]:
        """As JSON, without the lateness: times are milliseconds since the Unix epoch, a delay is milliseconds.

        What is None is left out.
        """
        values = {
            "event": self.kind,
            "endpoint": self.endpoint,
            "queue": self.queue,
            "host": self.host,
            "process": self.process,
            "message_id": self.message_id,
            "message_type": self.message_type,
            "attempt": self.attempt,
            "retries": self.retries,
            "sent": _milliseconds(self.sent_at),
            "due": _milliseconds(self.due_at),
            "delivered": _milliseconds(self.delivered_at),
            "started": _milliseconds(self.started_at),
            "ended": _milliseconds(self.ended_at),
            "exception": self.exception,
            "text": self.text,
            "group": self.group,
            "delay": None if self.delay is None else -(-self.delay // timedelta(milliseconds=1)),
            "to": self.to,
        }
        return {name: value for name, value in values.items() if value is not None}

    def to_json(self) -> bytes:
        """:meth:`to_dict` in UTF-8."""
        return json.dumps(self.to_dict(), ensure_ascii=True, separators=(",", ":")).encode()


def _milliseconds(moment: datetime | None) -> int | None:
    return None if moment is None else to_milliseconds(moment)
