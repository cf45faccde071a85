"""Copies of failed messages: back to their queue, into an archive, and out of it."""

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
from bide.delay.received import OWN_PREFIX, SentMessage
from bide.durations import from_milliseconds, to_milliseconds
from bide.errors import InvalidInputError, ReservedHeaderError
from bide.messages.prepared import PreparedMessage, new_message_id
from bide.recoverability.copies import copy_of, senders_due
from bide.recoverability.failed import HEADER_ARCHIVED_AT, FailedMessage
from bide.recoverability.history import (
    HEADER_ATTEMPT_TIMES,
    HEADER_EDIT_OF,
    HEADER_FIRST_DUE,
    HEADER_SENT_BY,
    nservicebus_due,
)

_NOT_COPIED: Final = frozenset({"x-delivery-count", "x-acquired-count", "CC", "BCC"})
"""What the broker counts anew, and other addresses: it would send the copy there too."""

LOCKED: Final = frozenset({"CC", "BCC", "x-death"})
"""Headers that an edit cannot set."""


def back(message: FailedMessage, *, to: str | None = None, run: str | None = None) -> PreparedMessage:
    """The copy that an operator sends back: the headers about the failure are removed, the history of attempts stays.

    So does the due time that the sender gave. The endpoint's retry policy begins anew. The
    sender's ``expiration`` is dropped: an operator's decision stands above it.

    Args:
        to: another queue than the one that it failed on.
        run: names the operation.

    Raises:
        InvalidInputError: its queue is unknown, and none is named.
    """
    queue = to or message.queue
    if queue is None:
        raise InvalidInputError("nothing on it tells where it failed: name a queue with --to")
    before, sent = message.history, _sent(message)
    due = senders_due(sent, before)
    history = replace(
        before, retries=0, expires_at=None, deliveries=0, first_due=due, returned=before.returned + 1, run=run
    )
    headers = history.headers(places=len(history.times)) if history.attempts else history.operators_headers()
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
    """The copy that is sent back with another body or other headers. It has a new message id, and names the old one.

    Args:
        body: None keeps the old one.
        headers: set in addition to, or in place of, the old ones.
        without: headers that are taken away.

    Raises:
        ReservedHeaderError: a header is not the sender's to set.
        InvalidInputError: nothing changes, or its queue is unknown.
    """
    for name in (*headers, *without):
        if name.startswith(OWN_PREFIX) or name in LOCKED:
            raise ReservedHeaderError(f"the header {name!r} is bide's or the broker's own: it cannot be edited")
    if body is None and not headers and not without:
        raise InvalidInputError("nothing is to be changed: give a body, or headers")
    for name in sorted(without - message.headers.keys()):
        raise InvalidInputError(f"the message has no header {name!r} that could be taken away")
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
    """The copy for an archive: as it is, but that the broker drops it after a while."""
    values = _as_it_is(message)
    expiration = values.get("expiration")
    if isinstance(expiration, str):
        values["headers"].setdefault(HEADER_EXPIRATION, expiration)
    values["headers"][HEADER_ARCHIVED_AT] = to_milliseconds(now)
    values["expiration"] = str(-(-keep // timedelta(milliseconds=1)))
    return _outgoing(message, queue, values)


def unarchived(message: FailedMessage, *, queue: str) -> PreparedMessage:
    """The copy that goes from an archive back to the error queue."""
    values = _as_it_is(message)
    values.pop("expiration", None)
    values["headers"].pop(HEADER_ARCHIVED_AT, None)
    return _outgoing(message, queue, values)


def same(message: FailedMessage, *, queue: str) -> PreparedMessage:
    """The same message once more, whose deliveries the broker counts anew."""
    return _outgoing(message, queue, _as_it_is(message))


def _as_it_is(message: FailedMessage) -> dict[str, Any]:
    values = dict(message.values)
    headers = {name: value for name, value in _raw(message).items() if name not in _NOT_COPIED}
    # A publish of ours would hide where it was first sent to, which only the delivery has where x-death does not.
    if not message.deaths:
        headers.setdefault(HEADER_EXCHANGE, message.exchange)
        headers.setdefault(HEADER_ROUTING_KEY, message.routing_key)
    # The broker refuses the name of another user.
    if (user := values.pop("user_id", None)) is not None:
        headers.setdefault(HEADER_SENT_BY, message.sent_by or user)
    values["headers"] = headers
    return values


def _outgoing(message: FailedMessage, queue: str, values: Mapping[str, Any]) -> PreparedMessage:
    # Without an id it stays without one: its name in our lists is made from its contents.
    message_id = message.message_id or message.id
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
    )


def _raw(message: FailedMessage) -> Mapping[str, Any]:
    return message.values.get("headers") or {}
