"""A failed attempt at a message, as a retry policy sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed attempt at a message.

    Attributes:
        endpoint: the endpoint's name.
        queue: the queue that the message came from.
        error: the exception that the handler raised.
        attempt: the number of this attempt since the last delayed retry, from 1. A quorum queue counts every
            delivery, including those to a process that died or stopped before it handled the message.
        delayed_retries: how many delayed retries the message has had.
        first_failed_at: when the message failed for the first time.
        failed_at: when this attempt failed.
        message_id: the message id, or None.
        message_type: the sender's message type, or None.
        headers: the sender's headers.
        expires_at: when the sender's ``expiration`` is over, or None.
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
