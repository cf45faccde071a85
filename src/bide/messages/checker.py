"""Fast checks of many similar messages."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final

from bide.delay.protocol import MAX_NAME_BYTES, check_name
from bide.durations import DelayLike, parse_delay, parse_due_time
from bide.errors import InvalidInputError
from bide.messages.outgoing import MessageCopy, OutgoingMessage
from bide.messages.prepared import (
    MessageTemplate,
    PreparedMessage,
    body_of,
    check_message,
    checked_headers,
    new_message_id,
)
from bide.runtime.bounded_cache import BoundedCache

_NO_DELAY: Final = timedelta(0)


class MessageChecker:
    """Checks messages. Fields that many messages share are checked once and kept as a template."""

    def __init__(self) -> None:
        self._templates = BoundedCache[Any, MessageTemplate]()

    def check(self, outgoing: OutgoingMessage) -> PreparedMessage:
        """Check a message and return it prepared for sending.

        Raises:
            InvalidInputError: or a subclass of it, for the first field that cannot be sent.
        """
        if outgoing.mandatory.__class__ is not bool:
            raise InvalidInputError(f"mandatory is {outgoing.mandatory!r}: give True or False")
        is_delayed = outgoing.delay is not None or outgoing.deliver_at is not None
        key = (
            outgoing.to,
            outgoing.exchange,
            outgoing.routing_key,
            outgoing.isolated,
            is_delayed,
            outgoing.json is None,
            outgoing.reply_to,
            outgoing.content_type,
            outgoing.content_encoding,
            outgoing.type,
            outgoing.user_id,
            outgoing.app_id,
            outgoing.persistent,
            # True equals 1, but is not a priority.
            outgoing.priority.__class__,
            outgoing.priority,
            outgoing.expiration,
        )
        try:
            template = self._templates.get(key)
        except TypeError:
            # A field that cannot be hashed cannot be sent either: the full check names it.
            return check_message(outgoing)
        if template is None:
            message = check_message(outgoing)
            template = self._templates[key] = MessageTemplate(message.target, message.values, is_delayed=is_delayed)
        return _from_template(outgoing, template) or check_message(outgoing)


def _from_template(outgoing: OutgoingMessage, template: MessageTemplate) -> PreparedMessage | None:
    """A message checked against a known template; None if it needs the full check."""
    body = outgoing.body
    if body.__class__ is not bytes:
        if body is not None and outgoing.json is not None:
            return None
        body = body_of(body, outgoing.json)
    elif outgoing.json is not None:
        return None
    delay, due = outgoing.delay, None
    if delay is not None:
        if outgoing.deliver_at is not None:
            return None
        try:
            delay = delay if delay.__class__ is timedelta else _parse_delay(delay)
        except TypeError:
            # A value that cannot be hashed is not a delay: the full check names it.
            return None
        if delay < _NO_DELAY:
            return None
    elif outgoing.deliver_at is not None:
        due = parse_due_time(outgoing.deliver_at)
    values = template.values.copy()
    is_copy = isinstance(outgoing, MessageCopy)
    if outgoing.headers:
        values["headers"] = checked_headers(outgoing.headers, delayed=template.is_delayed, is_copy=is_copy)
    for name, value in (("message_id", outgoing.message_id), ("correlation_id", outgoing.correlation_id)):
        if value is not None:
            if value.__class__ is not str:
                return None
            if len(value) > MAX_NAME_BYTES or not value.isascii():
                check_name(name.replace("_", " "), value, empty=True)
            values[name] = value
    message_id = values.get("message_id")
    if message_id is None:
        message_id = values["message_id"] = new_message_id()
    if outgoing.timestamp is not None:
        if outgoing.timestamp.__class__ is not datetime or outgoing.timestamp.tzinfo is None:
            return None
        values["timestamp"] = outgoing.timestamp
    return PreparedMessage(
        target=template.target,
        body=body,
        message_id=message_id,
        delay=delay,
        due=due,
        values=values,
        template=template,
        is_copy=is_copy,
    )


@lru_cache(maxsize=1024, typed=True)
def _parse_delay(delay: DelayLike) -> timedelta:
    return parse_delay(delay)
