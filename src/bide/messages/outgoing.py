"""What the caller wants to send, as a value; and its check, which costs little for many that are alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final

from bide.delay.protocol import MAX_NAME_BYTES, check_name
from bide.durations import DelayLike, DueTimeLike, parse_delay, parse_due_time
from bide.errors import InvalidInputError
from bide.messages.prepared import Kind, Outgoing, body_of, checked_headers, new_message_id

_REMEMBERED: Final = 10_000
_NO_DELAY: Final = timedelta(0)


# Not frozen, because making a frozen one takes five times as long, and bulk publishing makes millions.
@dataclass(slots=True)
class Letter:
    """One message for ``publish_many``; the fields are the arguments of :meth:`bide.Client.publish`.

    It is read when it is taken from the iterable. Do not change it after that.
    """

    body: bytes | str | None = None
    _: KW_ONLY
    json: Any = None
    to: str | None = None
    exchange: str | None = None
    routing_key: str = ""
    delay: DelayLike | None = None
    deliver_at: DueTimeLike | None = None
    isolated: bool = False
    mandatory: bool = True
    headers: Mapping[str, Any] | None = None
    message_id: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    content_type: str | None = None
    content_encoding: str | None = None
    type: str | None = None
    user_id: str | None = None
    app_id: str | None = None
    timestamp: datetime | None = None
    persistent: bool = True
    priority: int | None = None
    expiration: DelayLike | None = None


class Letters:
    """Checks letters. What letters have in common is checked once, and remembered as their kind."""

    def __init__(self) -> None:
        self._kinds: dict[Any, Kind] = {}

    def check(self, letter: Letter) -> Outgoing:
        """The message that a letter stands for.

        Raises:
            InvalidInputError: in one of its kinds, for the first thing that cannot be sent.
        """
        if letter.mandatory.__class__ is not bool:
            raise InvalidInputError(f"mandatory is {letter.mandatory!r}: give True or False")
        is_delayed = letter.delay is not None or letter.deliver_at is not None
        key = (
            letter.to,
            letter.exchange,
            letter.routing_key,
            letter.isolated,
            is_delayed,
            letter.json is None,
            letter.reply_to,
            letter.content_type,
            letter.content_encoding,
            letter.type,
            letter.user_id,
            letter.app_id,
            letter.persistent,
            # True is equal to 1, but no priority.
            letter.priority.__class__,
            letter.priority,
            letter.expiration,
        )
        try:
            kind = self._kinds.get(key)
        except TypeError:
            # Something that cannot be hashed is in a place where it cannot be sent either.
            return _checked(letter)
        if kind is None:
            message = _checked(letter)
            if len(self._kinds) >= _REMEMBERED:
                self._kinds.clear()
            kind = self._kinds[key] = Kind(message.target, message.values, is_delayed=is_delayed)
        return _alike(letter, kind) or _checked(letter)


def _alike(letter: Letter, kind: Kind) -> Outgoing | None:
    """The message of a letter of a known kind, or None where only the full check can tell what is wrong."""
    body = letter.body
    if body.__class__ is not bytes:
        if body is not None and letter.json is not None:
            return None
        body = body_of(body, letter.json)
    elif letter.json is not None:
        return None
    delay, due = letter.delay, None
    if delay is not None:
        if letter.deliver_at is not None:
            return None
        try:
            delay = delay if delay.__class__ is timedelta else _parsed(delay)
        except TypeError:
            # It cannot be remembered, because it is nothing of which a delay can be made.
            return None
        if delay < _NO_DELAY:
            return None
    elif letter.deliver_at is not None:
        due = parse_due_time(letter.deliver_at)
    values = kind.values.copy()
    if letter.headers:
        values["headers"] = checked_headers(letter.headers, delayed=kind.is_delayed)
    for name, value in (("message_id", letter.message_id), ("correlation_id", letter.correlation_id)):
        if value is not None:
            if value.__class__ is not str:
                return None
            if len(value) > MAX_NAME_BYTES or not value.isascii():
                check_name(name.replace("_", " "), value, empty=True)
            values[name] = value
    message_id = values.get("message_id")
    if message_id is None:
        message_id = values["message_id"] = new_message_id()
    if letter.timestamp is not None:
        if letter.timestamp.__class__ is not datetime or letter.timestamp.tzinfo is None:
            return None
        values["timestamp"] = letter.timestamp
    return Outgoing(
        target=kind.target,
        body=body,
        message_id=message_id,
        delay=delay,
        due=due,
        values=values,
        kind=kind,
    )


@lru_cache(maxsize=1024, typed=True)
def _parsed(delay: DelayLike) -> timedelta:
    return parse_delay(delay)


def _checked(letter: Letter) -> Outgoing:
    return Outgoing.make(
        letter.body,
        json=letter.json,
        to=letter.to,
        exchange=letter.exchange,
        routing_key=letter.routing_key,
        delay=letter.delay,
        deliver_at=letter.deliver_at,
        isolated=letter.isolated,
        headers=letter.headers,
        message_id=letter.message_id,
        correlation_id=letter.correlation_id,
        reply_to=letter.reply_to,
        content_type=letter.content_type,
        content_encoding=letter.content_encoding,
        type=letter.type,
        user_id=letter.user_id,
        app_id=letter.app_id,
        timestamp=letter.timestamp,
        persistent=letter.persistent,
        priority=letter.priority,
        expiration=letter.expiration,
    )
