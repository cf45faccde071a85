"""Copies of a received message, for a retry or for the error queue.

A copy leaves out what would harm it: an old ``x-death`` (the broker's cycle detection would drop the copy), ``CC`` and
``BCC`` (the broker would send the copy to those addresses again), ``user_id`` (the broker refuses other users' names)
and ``expiration`` (the copy would expire in the error queue).
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
    MAX_NAME_BYTES,
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


def delayed_retry(
    sent: SentMessage,
    body: bytes,
    *,
    queue: str,
    history: History,
    max_failure_times: int,
    delay: timedelta,
    now: datetime,
    nservicebus: bool,
    sent_by: str | None,
) -> PreparedMessage:
    """Copy a message to be delivered to its queue again after a delay, with the same message id.

    Args:
        history: the attempts so far, without this retry.
        max_failure_times: number of failure times that the headers have room for.
        nservicebus: write NServiceBus's retry headers too, so that an NServiceBus endpoint continues the count.
    """
    retried = replace(history, retries=history.retries + 1, first_due=senders_due(sent, history))
    headers = retried.headers(max_failure_times=max_failure_times)
    if nservicebus:
        headers |= {NSERVICEBUS_RETRIES: str(retried.retries), NSERVICEBUS_RETRIED_AT: nservicebus_time(now)}
    return copy_of(sent, body, queue=queue, headers=headers, sent_by=sent_by, delay=delay)


def counted(
    sent: SentMessage, body: bytes, *, queue: str, history: History, max_failure_times: int, sent_by: str | None
) -> PreparedMessage:
    """Copy a message to the end of its queue, to be delivered at once, with its deliveries counted in a header."""
    headers = replace(history, first_due=senders_due(sent, history)).headers(max_failure_times=max_failure_times)
    return copy_of(sent, body, queue=queue, headers=headers, sent_by=sent_by)


def parked(
    sent: SentMessage, body: bytes, *, queue: str, headers: Mapping[str, Any], sent_by: str | None
) -> PreparedMessage:
    """Copy a message to an error queue.

    Args:
        headers: the headers that describe the failure.
    """
    return copy_of(sent, body, queue=queue, headers=headers, sent_by=sent_by)


def raw(sent: SentMessage, body: bytes, *, queue: str) -> PreparedMessage:
    """Copy a message to an error queue as it was sent, without headers of bide, so that its headers fit a frame."""
    left_out = {"user_id", "expiration"}
    values = {name: value for name, value in sent.values.items() if name not in left_out}
    values["headers"] = _copied(sent)
    message_id = _short(str(values.get("message_id") or new_message_id()))
    return PreparedMessage(
        target=QueueTarget(queue), body=body, message_id=message_id, values=sendable(values), is_copy=True
    )


def senders_due(sent: SentMessage, history: History) -> datetime | None:
    """The due time that the sender gave, or None.

    Copies keep it in a header, because a delayed retry or a message that an operator returned has its own due time.
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
    """Copy a message to a queue, with headers of bide in addition to the sender's."""
    values = dict(sent.values)
    values.pop("user_id", None)
    expiration = values.pop("expiration", None)
    message_id = values.setdefault("message_id", new_message_id())
    merged = {**_copied(sent), **sent.schedule, **headers}
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
        message_id=_short(str(message_id)),
        delay=delay,
        values=sendable(values),
        is_copy=True,
    )


def _copied(sent: SentMessage) -> dict[str, Any]:
    return {name: value for name, value in (sent.values.get("headers") or {}).items() if name not in _NOT_COPIED}


def sendable(values: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of a received message, changed where AMQP cannot carry what the decoder returned.

    The decoder returns a timestamp after the year 9999 as a number, which is left out. It escapes bytes that are not
    UTF-8. A name or an id that is then longer than the 255 bytes of a short string is cut off.
    """
    found = {name: _within_limits(value) for name, value in values.items()}
    for name, value in found.items():
        if isinstance(value, str):
            found[name] = _short(value)
    if not isinstance(found.get("timestamp"), datetime):
        found.pop("timestamp", None)
    return found


def _within_limits(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_short(name): _within_limits(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_within_limits(one) for one in value]
    return str(value) if isinstance(value, int) and value >= 1 << 63 else value


def _short(text: str) -> str:
    raw = text.encode()
    return text if len(raw) <= MAX_NAME_BYTES else raw[:MAX_NAME_BYTES].decode(errors="ignore")
