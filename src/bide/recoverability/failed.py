"""Messages in an error or dead-letter queue."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Self

from bide.delay.protocol import HEADER_EXCHANGE, HEADER_KEY, HEADER_SCHEDULE, HEADER_SET_ASIDE, HEADER_TO
from bide.delay.received import OWN_PREFIX, restore
from bide.durations import from_milliseconds
from bide.recoverability import report as names
from bide.recoverability.history import HEADER_SENT_BY, History, read_nservicebus_time
from bide.recoverability.message_types import message_type
from bide.recoverability.x_death import QueueDeaths

HEADER_ARCHIVED_AT: Final = "bide-archived-at"
"""Header with the time at which a message was archived: milliseconds since the Unix epoch."""

_FRAME: Final = re.compile(r'File "(?:[^"]*[/\\])?([^"/\\]+)", line (\d+), in (\S+)')
_NET_FRAME: Final = re.compile(r"^\s*at ([^(\n]+)\(", re.MULTILINE)
_ID_LENGTH: Final = 16

_CHANGING: Final = frozenset({"headers", "expiration", "user_id", "delivery_mode"})
"""Properties that the id of a message without a message id does not depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedMessage:
    """A message in an error or dead-letter queue.

    Attributes:
        id: identifies the message in its queue; every reader computes the same id.
        message_id: the sender's message id, or None.
        message_type: the sender's message type, or None.
        queue: the queue that it failed on, or None if unknown.
        reason: ``failed`` if a handler failed; ``rejected``, ``expired``, ``maxlen`` or ``delivery_limit`` as the
            broker reports it; ``undeliverable`` for a delayed message without a target; otherwise ``unknown``.
        endpoint: the endpoint that it failed on, or None.
        failed_at: when it failed, or None.
        exception: the class of the exception, or None.
        text: the message of the exception, or why a relay or a gate found the message undeliverable; or None.
        stack: the stack trace of the exception, or None.
        frame: the stack frame that raised the exception, or None.
        inner_exception: the class of the exception that caused it, or None.
        inner_text: the message of that exception, or None.
        host: the host name of the machine that it failed on, or None.
        process: the id of the process that it failed in, or None.
        sent_by: the publisher, or None.
        key: the key of the schedule that it was delivered for, or None.
        schedule_id: the id of that schedule, or None.
        exchange: the exchange that it was first published to; empty for a queue.
        routing_key: the routing key that it was first published with.
        history: the attempts so far.
        deaths: the entries of the broker's ``x-death`` header, newest first. RabbitMQ 3.10 puts only the newest
            one first, and changes the order of the others.
        headers: the sender's headers.
        values: all properties of the message in the error queue.
        body: the message body.
    """

    id: str
    message_id: str | None
    message_type: str | None
    queue: str | None
    reason: str
    endpoint: str | None
    failed_at: datetime | None
    exception: str | None
    text: str | None
    stack: str | None
    frame: str | None
    inner_exception: str | None
    inner_text: str | None
    host: str | None
    process: int | None
    sent_by: str | None
    key: str | None
    schedule_id: str | None
    exchange: str
    routing_key: str
    history: History
    deaths: tuple[Mapping[str, Any], ...]
    headers: Mapping[str, Any]
    values: Mapping[str, Any] = field(repr=False)
    body: bytes = field(repr=False)

    @classmethod
    def read(cls, exchange: str, routing_key: str, values: Mapping[str, Any], body: bytes) -> Self:
        """Read the failure from a message that was delivered from an error or dead-letter queue."""
        sent = restore(exchange, routing_key, values)
        raw: Mapping[str, Any] = values.get("headers") or {}
        deaths = _deaths(sent.values.get("headers") or {})
        death = deaths[0] if deaths else {}
        queue = _text(raw, names.HEADER_FAILED_QUEUE) or _address(_text(raw, names.NSB_FAILED_QUEUE))
        to = _text(raw, HEADER_TO) if queue is None and not death else None
        if to is not None and to.startswith("q:"):
            queue = to[2:]
        reason = "failed" if queue is not None and to is None else _text(death, "reason") or "unknown"
        text = _text(raw, names.HEADER_ERROR_MESSAGE) or _text(raw, f"{names.NSB_EXCEPTION}Message")
        if to is not None:
            reason, text = "undeliverable", text or _text(raw, HEADER_SET_ASIDE)
        stack = _text(raw, names.HEADER_ERROR_STACK) or _text(raw, f"{names.NSB_EXCEPTION}StackTrace")
        message_id = _text(values, "message_id") or _text(raw, "NServiceBus.MessageId")
        exchange, routing_key = _first_address(sent.exchange, sent.routing_key, deaths, raw)
        queue = queue or _text(death, "queue")
        process = raw.get(names.HEADER_PROCESS)
        return cls(
            id=_identity(message_id, queue, values, body),
            message_id=message_id,
            message_type=message_type(values),
            queue=queue,
            reason=reason,
            endpoint=_text(raw, names.HEADER_ENDPOINT) or _text(raw, names.NSB_ENDPOINT),
            failed_at=_failed_at(raw, death),
            exception=_text(raw, names.HEADER_ERROR_TYPE) or _text(raw, f"{names.NSB_EXCEPTION}ExceptionType"),
            text=text,
            stack=stack,
            frame=_text(raw, names.HEADER_ERROR_FRAME) or first_frame(stack),
            inner_exception=_text(raw, names.HEADER_INNER_TYPE)
            or _text(raw, f"{names.NSB_EXCEPTION}InnerExceptionType"),
            inner_text=_text(raw, names.HEADER_INNER_MESSAGE),
            host=_text(raw, names.HEADER_HOST) or _text(raw, names.NSB_MACHINE),
            process=process if isinstance(process, int) else None,
            sent_by=_text(raw, HEADER_SENT_BY)
            or _text(raw, "NServiceBus.OriginatingEndpoint")
            or _text(values, "app_id")
            or _text(values, "user_id"),
            key=_text(raw, HEADER_KEY),
            schedule_id=_text(raw, HEADER_SCHEDULE),
            exchange=exchange,
            routing_key=routing_key,
            history=History.read(raw),
            deaths=deaths,
            headers=names.without_failure(sent.values.get("headers") or {}),
            values=values,
            body=body,
        )

    @property
    def group(self) -> str:
        """The name that failures with the same cause share: the exception's class and the frame, without line numbers.

        If no exception is known, the broker's reason and the queue.
        """
        if self.exception is None:
            return f"{self.reason} on {self.queue or 'an unknown queue'}"
        return group_of(self.exception, self.frame)


def group_of(exception: str, frame: str | None) -> str:
    """The name of a group of failures, from an exception's class and the frame that raised it."""
    # Line numbers change with every edit of the file; function names rarely do.
    location = re.sub(r":\d+ in ", " in ", frame or "", count=1)
    return f"{exception} at {location}" if location else exception


def first_frame(stack: str | None) -> str | None:
    """The frame that raised the exception, from a stack trace of Python or .NET, or None."""
    if stack is None:
        return None
    if frames := _FRAME.findall(stack):
        file, line, function = frames[-1]
        return f"{file}:{line} in {function}"
    found = _NET_FRAME.search(stack)
    return found[1].strip() if found else None


def _deaths(headers: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    found = headers.get("x-death")
    return tuple(one for one in found if isinstance(one, Mapping)) if isinstance(found, list) else ()


def _first_address(
    exchange: str, routing_key: str, deaths: tuple[Mapping[str, Any], ...], headers: Mapping[str, Any]
) -> tuple[str, str]:
    """Where a message was first published: from the headers of bide, or else from its first ``x-death`` entry."""
    if not deaths or HEADER_EXCHANGE in headers:
        return exchange, routing_key
    first = _text(headers, "x-first-death-queue") or _text(deaths[-1], "queue") or ""
    died = QueueDeaths.read(headers, first)
    if died is None:
        return exchange, routing_key
    return died.exchange, routing_key if died.routing_key is None else died.routing_key


def _failed_at(headers: Mapping[str, Any], death: Mapping[str, Any]) -> datetime | None:
    value = headers.get(names.HEADER_FAILED_AT)
    if isinstance(value, int):
        return from_milliseconds(value)
    time = death.get("time")
    return read_nservicebus_time(headers.get(names.NSB_FAILED_AT)) or (time if isinstance(time, datetime) else None)


def _identity(message_id: str | None, queue: str | None, values: Mapping[str, Any], body: bytes) -> str:
    """A short hash of the message id and the queue; without a message id, of the queue and the whole message.

    It depends on the queue, because an event can fail in several queues that share an error queue.
    """
    digest = hashlib.sha256(f"{message_id or ''}\n{queue or ''}".encode(errors="surrogatepass"))
    if message_id is None:
        # Leave out what the broker and bide's copies change, so that the id stays the same.
        kept = {name: value for name, value in values.items() if value is not None and name not in _CHANGING}
        headers = {name: value for name, value in (values.get("headers") or {}).items() if _is_senders(name)}
        digest.update(repr([*sorted(kept.items()), *sorted(headers.items())]).encode(errors="surrogatepass"))
        digest.update(body)
    return digest.hexdigest()[:_ID_LENGTH]


def _is_senders(header: str) -> bool:
    return not header.startswith(("x-", OWN_PREFIX)) and header not in ("CC", "BCC")


def _address(value: str | None) -> str | None:
    # NServiceBus can write the machine name after the queue: orders@machine.
    return value.partition("@")[0] if value is not None else None


def _text(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    return value if isinstance(value, str) and value else None
