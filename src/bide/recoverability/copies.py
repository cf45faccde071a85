"""Copies of a received message: the one that is retried later, and the one that is parked.

What a copy must not do is prevented here: wake the broker's cycle detection by an old ``x-death``, reach others by an
old ``CC``, be refused for another user's ``user_id``, or expire in an error queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from bide.delay.protocol import (
    HEADER_EXCHANGE,
    HEADER_EXPIRATION,
    HEADER_ROUTING_KEY,
    HEADER_SENT,
    QueueTarget,
)
from bide.delay.received import DEATH_HEADERS, SentMessage
from bide.durations import to_milliseconds
from bide.messages.prepared import PreparedMessage, new_message_id
from bide.recoverability.history import (
    HEADER_SENT_BY,
    NSERVICEBUS_DUE,
    NSERVICEBUS_RETRIED_AT,
    NSERVICEBUS_RETRIES,
    History,
    nservicebus_time,
    read_nservicebus_time,
)

_NOT_COPIED: Final = DEATH_HEADERS | {"CC", "BCC", NSERVICEBUS_RETRIES, NSERVICEBUS_RETRIED_AT}


def later(
    sent: SentMessage,
    body: bytes,
    *,
    queue: str,
    history: History,
    places: int,
    delay: timedelta,
    now: datetime,
    nservicebus: bool,
    sent_by: str | None,
) -> PreparedMessage:
    """The copy that comes back to its queue after a delay, with the same message id.

    Args:
        history: without this retry.
        places: room for this many times of attempts.
        nservicebus: count under the names of NServiceBus too, so that it goes on counting where we end.
    """
    retried = replace(history, retries=history.retries + 1, first_due=senders_due(sent, history))
    headers = retried.headers(places=places)
    if nservicebus:
        headers |= {NSERVICEBUS_RETRIES: str(retried.retries), NSERVICEBUS_RETRIED_AT: nservicebus_time(now)}
    return copy_of(sent, body, queue=queue, headers=headers, sent_by=sent_by, delay=delay)


def counted(
    sent: SentMessage, body: bytes, *, queue: str, history: History, places: int, sent_by: str | None
) -> PreparedMessage:
    """The copy that goes to the end of its queue at once, with its deliveries counted."""
    headers = replace(history, first_due=senders_due(sent, history)).headers(places=places)
    return copy_of(sent, body, queue=queue, headers=headers, sent_by=sent_by)


def parked(
    sent: SentMessage, body: bytes, *, queue: str, headers: Mapping[str, Any], sent_by: str | None
) -> PreparedMessage:
    """The copy for an error queue.

    Args:
        headers: those about the failure.
    """
    return copy_of(sent, body, queue=queue, headers=headers, sent_by=sent_by)


def raw(sent: SentMessage, body: bytes, *, queue: str) -> PreparedMessage:
    """The message for an error queue as it was sent, with nothing of ours: it fits into a frame again."""
    left_out = {"user_id", "expiration"}
    values = {name: value for name, value in sent.values.items() if name not in left_out}
    values["headers"] = _copied(sent)
    message_id = str(values.get("message_id") or new_message_id())
    return PreparedMessage(
        target=QueueTarget(queue), body=body, message_id=message_id, values=_sendable(values), is_copy=True
    )


def senders_due(sent: SentMessage, history: History) -> datetime | None:
    """The due time that the sender gave, or None.

    Copies carry it: what is retried, or was sent back by an operator, may have another one of its own.
    """
    if history.first_due is not None:
        return history.first_due
    if not history.retries and not history.returned:
        return sent.due
    return read_nservicebus_time((sent.values.get("headers") or {}).get(NSERVICEBUS_DUE))


def copy_of(
    sent: SentMessage,
    body: bytes,
    *,
    queue: str,
    headers: Mapping[str, Any],
    sent_by: str | None,
    delay: timedelta | None = None,
) -> PreparedMessage:
    """A copy for a queue, with these headers of ours beside the sender's."""
    values = dict(sent.values)
    values.pop("user_id", None)
    expiration = values.pop("expiration", None)
    message_id = values.setdefault("message_id", new_message_id())
    merged = {**_copied(sent), **headers}
    merged[HEADER_EXCHANGE] = sent.exchange
    merged[HEADER_ROUTING_KEY] = sent.routing_key
    if expiration is not None:
        merged[HEADER_EXPIRATION] = expiration
    if sent.sent_at is not None:
        merged[HEADER_SENT] = to_milliseconds(sent.sent_at)
    if sent_by is not None:
        merged[HEADER_SENT_BY] = sent_by
    values["headers"] = merged
    return PreparedMessage(
        target=QueueTarget(queue),
        body=body,
        message_id=str(message_id),
        delay=delay,
        values=_sendable(values),
        is_copy=True,
    )


def _copied(sent: SentMessage) -> dict[str, Any]:
    return {name: value for name, value in (sent.values.get("headers") or {}).items() if name not in _NOT_COPIED}


def _sendable(values: Mapping[str, Any]) -> dict[str, Any]:
    # What a stranger wrote as a time after the year 9999 was read as a number.
    sendable = {name: _small(value) for name, value in values.items()}
    if not isinstance(sendable.get("timestamp"), datetime):
        sendable.pop("timestamp", None)
    return sendable


def _small(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _small(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_small(one) for one in value]
    return str(value) if isinstance(value, int) and value >= 1 << 63 else value
