"""Copies of failed messages: sent back, archived, or restored from the archive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from bide.delay.protocol import (
    HEADER_DUE,
    HEADER_EXCHANGE,
    HEADER_EXPIRATION,
    HEADER_ROUTING_KEY,
    HEADER_SENT,
    QueueTarget,
)
from bide.delay.received import OWN_PREFIX, SentMessage, schedule_headers
from bide.delay.recognition import refuse_target
from bide.durations import from_milliseconds, to_milliseconds
from bide.errors import InvalidInputError, ReservedHeaderError
from bide.messages.prepared import PreparedMessage, new_message_id
from bide.recoverability.copies import copy_of, sendable, senders_due
from bide.recoverability.failed import HEADER_ARCHIVED_AT, FailedMessage
from bide.recoverability.history import (
    HEADER_ATTEMPT_TIMES,
    HEADER_EDIT_OF,
    HEADER_FIRST_DUE,
    HEADER_SENT_BY,
    nservicebus_due,
)

_NOT_COPIED: Final = frozenset({"x-delivery-count", "x-acquired-count", "CC", "BCC"})
"""Headers that a copy leaves out: the broker's counters, and other addresses, which would receive the copy too."""

LOCKED: Final = frozenset({"CC", "BCC", "x-death"})
"""Headers that an operator cannot edit."""


def back(message: FailedMessage, *, to: str | None = None, run: str | None = None) -> PreparedMessage:
    """Copy a failed message back to the queue that it failed on.

    The copy keeps the history of attempts and the due time that the sender gave. The headers that describe the failure
    are removed, the retry policy starts from the beginning, and the sender's ``expiration`` is dropped, because the
    operator's decision takes precedence.

    Args:
        to: a queue to send it to instead.
        run: the name of the operation.

    Raises:
        InvalidInputError: *to* is None, and the queue that it failed on is unknown or a delay queue.
    """
    queue = to or message.queue
    if queue is None:
        raise InvalidInputError("its headers do not say which queue it failed on: name a queue with to=...")
    if to is None:
        # Any sender can write these headers, and a policy can dead-letter messages from a delay queue.
        refuse_target(queue)
    before, sent = message.history, _sent(message)
    due = senders_due(sent, before)
    history = replace(
        before, retries=0, expires_at=None, deliveries=0, first_due=due, returned=before.returned + 1, run=run
    )
    headers = history.headers(max_failure_times=len(history.times)) if history.attempts else history.operators_headers()
    if not history.times:
        headers.pop(HEADER_ATTEMPT_TIMES, None)
    if due is not None:
        headers[HEADER_FIRST_DUE] = to_milliseconds(due)
    return copy_of(sent, message.body, queue=queue, headers=headers, sent_by=message.sent_by)


def edited(
    message: FailedMessage,
    *,
    body: bytes | None,
    headers: Mapping[str, str],
    without: frozenset[str],
    to: str | None = None,
) -> PreparedMessage:
    """Copy a failed message back with another body or other headers, a new message id, and the old id in a header.

    Args:
        body: the new body; None keeps the old one.
        headers: headers to add or replace.
        without: headers to remove.
        to: a queue to send it to instead of the one that it failed on.

    Raises:
        ReservedHeaderError: a header belongs to bide or the broker.
        InvalidInputError: nothing would change, or the queue that it failed on is unknown or a delay queue.
    """
    for name in (*headers, *without):
        if name.startswith(OWN_PREFIX) or name in LOCKED:
            raise ReservedHeaderError(
                f"the header {name!r} belongs to bide or the broker, and cannot be edited: leave it out"
            )
    if body is None and not headers and not without:
        raise InvalidInputError("the edit would change nothing: give a body, or headers")
    for name in sorted(without - message.headers.keys()):
        raise InvalidInputError(f"the message has no header {name!r}: remove one that it has")
    copy = back(message, to=to)
    kept = {name: value for name, value in copy.headers.items() if name not in without}
    kept |= headers
    kept[HEADER_EDIT_OF] = message.message_id or message.id
    message_id = new_message_id()
    return replace(
        copy,
        body=message.body if body is None else body,
        message_id=message_id,
        values={**copy.values, "message_id": message_id, "headers": kept},
    )


def archived(message: FailedMessage, *, queue: str, keep: timedelta, now: datetime) -> PreparedMessage:
    """Copy a failed message to an archive, unchanged except for an expiration after which the broker drops it."""
    values = _unchanged(message)
    expiration = values.get("expiration")
    if isinstance(expiration, str):
        values["headers"].setdefault(HEADER_EXPIRATION, expiration)
    values["headers"][HEADER_ARCHIVED_AT] = to_milliseconds(now)
    values["expiration"] = str(-(-keep // timedelta(milliseconds=1)))
    return _prepared(message, queue, values)


def unarchived(message: FailedMessage, *, queue: str) -> PreparedMessage:
    """Copy a message from an archive back to the error queue."""
    values = _unchanged(message)
    values.pop("expiration", None)
    values["headers"].pop(HEADER_ARCHIVED_AT, None)
    return _prepared(message, queue, values)


def uncounted(message: FailedMessage, *, queue: str) -> PreparedMessage:
    """Copy a failed message unchanged; the broker counts the deliveries of the copy from zero."""
    return _prepared(message, queue, _unchanged(message))


def _unchanged(message: FailedMessage) -> dict[str, Any]:
    values = dict(message.values)
    headers = {name: value for name, value in _raw(message).items() if name not in _NOT_COPIED}
    # Without an x-death header, only the delivery says where the message was first published to.
    if not message.deaths:
        headers.setdefault(HEADER_EXCHANGE, message.exchange)
        headers.setdefault(HEADER_ROUTING_KEY, message.routing_key)
    # The broker refuses a publish with another user's name.
    if (user := values.pop("user_id", None)) is not None:
        headers.setdefault(HEADER_SENT_BY, message.sent_by or user)
    values["headers"] = headers
    return sendable(values)


def _prepared(message: FailedMessage, queue: str, values: Mapping[str, Any]) -> PreparedMessage:
    # A message without a message id gets none here: its id in the error queue is computed from its contents.
    message_id = values.get("message_id") or message.message_id or message.id
    return PreparedMessage(
        target=QueueTarget(queue), body=message.body, message_id=message_id, values=values, is_copy=True
    )


def _sent(message: FailedMessage) -> SentMessage:
    values = {name: value for name, value in message.values.items() if name != "expiration"}
    raw = _raw(message)
    due, sent = raw.get(HEADER_DUE), raw.get(HEADER_SENT)
    return SentMessage(
        exchange=message.exchange,
        routing_key=message.routing_key,
        values={**values, "headers": message.headers},
        due=from_milliseconds(due) if isinstance(due, int) else nservicebus_due(raw),
        sent_at=from_milliseconds(sent) if isinstance(sent, int) else None,
        schedule=schedule_headers(raw),
    )


def _raw(message: FailedMessage) -> Mapping[str, Any]:
    return message.values.get("headers") or {}
