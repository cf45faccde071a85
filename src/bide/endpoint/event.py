"""Events of an endpoint: what happened to a message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from bide.durations import to_milliseconds

Kind = Literal["processed", "failed", "retried", "parked", "discarded", "expired", "duplicate"]
"""``processed``: the handler succeeded. ``failed``: an attempt failed, and the message is requeued for an immediate
retry. ``retried``: an attempt failed, and the next one follows after a delay. ``parked``: the message was moved to the
error queue. ``discarded``: the retry policy dropped it. ``expired``: the sender's ``expiration`` was over.
``duplicate``: the message had been handled before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happened to a message at an endpoint.

    Attributes:
        kind: what happened.
        endpoint: the endpoint's name.
        queue: the queue that the message came from.
        host: the host name of the endpoint's machine.
        process: the id of the endpoint's process.
        message_id: the message id, or None.
        message_type: the sender's message type, or None.
        attempt: the number of this attempt since the last delayed retry, from 1.
        retries: number of delayed retries before this attempt.
        sent_at: when the message was sent, or None if unknown.
        due_at: the due time that the sender gave, or None; unchanged by retries.
        delivered_at: when this process received the message.
        started_at: when the handler was called; None if it was not.
        ended_at: when the handler ended, or when the message was processed without calling it.
        exception: the class of the exception, or None.
        text: the message of the exception, or None.
        group: the name that failures with the same cause share, or None; see ``FailedMessage.group``.
        delay: the delay of the retry, or None.
        to: the queue that the message was moved to, or None.
        lateness: time from the due time to the receipt; None if the message was not delayed, or after a retry.
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
        """The event as JSON, without the lateness. Times are milliseconds since the Unix epoch, delays milliseconds.

        Values that are None are left out.
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
        """The event as JSON, encoded in UTF-8."""

        return json.dumps(self.to_dict(), ensure_ascii=True, separators=(",", ":")).encode()


def _milliseconds(moment: datetime | None) -> int | None:
    return None if moment is None else to_milliseconds(moment)
