"""One failed attempt at a message: all that a retry policy gets to see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A handler failed.

    Attributes:
        endpoint: the endpoint's name.
        queue: the queue that the message came from.
        message_id: the message's id, or None.
        message_type: the sender's name for this kind of message, or None.
        headers: the message's own headers.
        error: what the handler raised.
        attempt: attempts since the last delayed retry, this one included: 1 for the first. A quorum queue counts
            deliveries, also those to a process that died or was stopped before it handled the message.
        delayed_retries: delayed retries that the message has behind it.
        first_failed_at: when it failed for the first time; this failure if it is the first.
        failed_at: when it failed now.
        expires_at: when the sender loses interest, or None.
    """

    endpoint: str
    queue: str
    error: BaseException
    attempt: int
    delayed_retries: int
    first_failed_at: datetime
    failed_at: datetime
    message_id: str | None = None
    message_type: str | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)
    expires_at: datetime | None = None
