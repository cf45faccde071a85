"""Checked outgoing messages, and the AMQP properties to send with them."""

from __future__ import annotations

import json as json_codec
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import count
from typing import Any, Final, NamedTuple

from bide.delay.protocol import (
    HEADER_DUE,
    HEADER_EXPIRATION,
    HEADER_PRIORITY,
    HEADER_SENT,
    DelayInfrastructure,
    ExchangeTarget,
    QueueTarget,
    Target,
    check_name,
)
from bide.delay.received import DEATH_HEADERS, OWN_PREFIX
from bide.delay.routes import DelayRoute
from bide.durations import MILLISECOND, DelayLike, format_delay, parse_delay, parse_due_time, to_milliseconds
from bide.errors import (
    InvalidDelayError,
    InvalidDueTimeError,
    InvalidInputError,
    InvalidNameError,
    ReservedHeaderError,
)
from bide.messages.outgoing import MessageCopy, OutgoingMessage
from bide.runtime.arguments import whole_number

_DELIVERY_HEADERS: Final = DEATH_HEADERS | {"x-delivery-count", "x-acquired-count"}
_TEXT_PROPERTIES: Final = (
    "content_type",
    "content_encoding",
    "correlation_id",
    "reply_to",
    "message_id",
    "type",
    "user_id",
    "app_id",
)
_MAX_EXPIRATION: Final = timedelta(days=3650)
"""RabbitMQ's limit. A message with a longer expiration makes the broker close the channel, and fails all messages in
flight on it."""

_INDIVIDUAL_PROPERTIES: Final = frozenset({"headers", "correlation_id", "message_id", "timestamp"})
_MUTABLE: Final = (Mapping, list, tuple, bytearray)

_id_prefix = os.urandom(10).hex()
_id_counter = count()


def new_message_id() -> str:
    """A message id that is unique across processes and calls: 80 random bits and a counter."""
    return f"{_id_prefix}{next(_id_counter):012x}"


def _after_fork() -> None:
    global _id_prefix
    _id_prefix = os.urandom(10).hex()


os.register_at_fork(after_in_child=_after_fork)


class Moment(NamedTuple):
    """A point in time, read from both clocks of a connection.

    Attributes:
        now: the time in UTC; due times are counted by it.
        monotonic: seconds of the monotonic clock; delays are counted by it.
    """

    now: datetime
    monotonic: float


class MessageTemplate:
    """The target and properties that similar messages share, checked and encoded once. Compared by identity.

    Attributes:
        values: the shared properties by their AMQP names: all but headers, ids and timestamp.
    """

    __slots__ = ("is_delayed", "target", "values")

    def __init__(self, target: Target, values: Mapping[str, Any], *, is_delayed: bool) -> None:
        self.target = target
        self.values = {name: value for name, value in values.items() if name not in _INDIVIDUAL_PROPERTIES}
        self.is_delayed = is_delayed


# Not frozen: creating a frozen instance takes five times as long, and bulk publishing creates two for each message.
@dataclass(slots=True, kw_only=True)
class PreparedMessage:
    """A checked message that can be sent. Treat it as immutable.

    Attributes:
        delay: the time from sending to delivery, or None.
        due: the due time. For a message with a delay, :meth:`starting` sets it at each sending.
        started_at: when the delay began, by the connection's monotonic clock; None before the first sending.
        values: properties by their AMQP names, without those that the delay adds. Absent properties and empty headers
            are left out.
        template: the template that it shares with similar messages, if there is one.
        is_copy: whether this is a copy of a message that was sent before: it keeps the original sending time.
    """

    target: Target
    body: bytes
    message_id: str
    delay: timedelta | None = None
    due: datetime | None = None
    started_at: float | None = None
    values: Mapping[str, Any] = field(repr=False)
    template: MessageTemplate | None = field(default=None, repr=False, compare=False)
    is_copy: bool = False

    @property
    def headers(self) -> Mapping[str, Any]:
        """The sender's headers."""
        return self.values.get("headers") or {}

    def starting(self, now: datetime, monotonic: float = 0.0) -> PreparedMessage:
        """The same message, with its due time set for sending it now.

        The first sending is due after the delay, and a repeated sending after the rest of the delay. The rest is
        counted by the monotonic clock, and added to the current time. Setting this machine's clock between two
        sendings therefore does not change how long the message waits.

        Args:
            monotonic: seconds of the connection's monotonic clock. Not needed to check a message.

        Raises:
            InvalidDueTimeError: the due time would be after the year 9999.
        """
        if self.delay is None:
            return self
        started_at, rest = self.started_at, self.delay
        if started_at is None:
            started_at = monotonic
        else:
            rest -= timedelta(seconds=monotonic - started_at)
        try:
            due = now + rest
        except OverflowError as error:
            raise InvalidDueTimeError(f"the delay {self.delay} ends after the year 9999: give a shorter one") from error
        # dataclasses.replace would take several times as long.
        return PreparedMessage(
            target=self.target,
            body=self.body,
            message_id=self.message_id,
            delay=self.delay,
            due=due,
            started_at=started_at,
            values=self.values,
            template=self.template,
            is_copy=self.is_copy,
        )

    def stamped(self, headers: Mapping[str, Any]) -> PreparedMessage:
        """The same message with additional headers; the message's own headers take precedence.

        Raises:
            InvalidInputError: a header name cannot be sent.
            ReservedHeaderError: bide or the broker sets this header itself.
        """
        if not headers:
            return self
        added = checked_headers(headers, delayed=self.delay is not None or self.due is not None)
        return replace(self, values={**self.values, "headers": {**added, **self.headers}})

    def route(self, infrastructure: DelayInfrastructure, now: datetime) -> DelayRoute | None:
        """The route of the message if it is sent now, or None if it is not delayed.

        A due time in the past means a delay of zero: the message is delivered at once.
        """
        if self.due is None:
            return None
        return infrastructure.route(max(self.due - now, timedelta(0)), self.target, message_id=self.message_id)

    def wire_values(
        self, route: DelayRoute | None, now: datetime, expected: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The properties to send with this route.

        Expiration and priority would act on the delay queues: an expiration shortens the wait, and on RabbitMQ 4.0 to
        4.2 a priority holds other messages back. They are therefore sent as headers while the message waits.

        Args:
            now: the time of sending.
            expected: headers that receivers expect; the caller's headers take precedence.
        """
        values = dict(self.values)
        headers = {**(expected or {}), **self.headers}
        if not self.is_copy:
            headers.setdefault(HEADER_SENT, to_milliseconds(now))
        if route is not None and self.due is not None:
            headers |= {**route.headers, HEADER_DUE: to_milliseconds(self.due)}
        if route is not None and route.hops:
            if (expiration := values.pop("expiration", None)) is not None:
                headers[HEADER_EXPIRATION] = expiration
            if (priority := values.pop("priority", None)) is not None:
                headers[HEADER_PRIORITY] = priority
        values["headers"] = headers
        return values


def check_message(outgoing: OutgoingMessage) -> PreparedMessage:
    """Check a message and prepare it for sending.

    Raises:
        InvalidInputError: or a subclass of it, for the first field that cannot be sent.
    """
    target = _target(outgoing.to, outgoing.exchange, outgoing.routing_key, outgoing.isolated)
    values: dict[str, Any] = {
        name: value for name in _TEXT_PROPERTIES if (value := getattr(outgoing, name)) is not None
    }
    for name, value in values.items():
        if not isinstance(value, str):
            raise InvalidInputError(f"the {name} {value!r} is not text: give a str")
        check_name(name.replace("_", " "), value, empty=True)
    if outgoing.body is not None and outgoing.json is not None:
        raise InvalidInputError("both a body and json were given: give one")
    if outgoing.json is not None:
        values.setdefault("content_type", "application/json")
    if outgoing.delay is not None and outgoing.deliver_at is not None:
        raise InvalidDueTimeError(
            f"both a delay ({outgoing.delay}) and a due time ({outgoing.deliver_at}) were given: give one"
        )
    wait = None if outgoing.delay is None else parse_delay(outgoing.delay)
    due = None if outgoing.deliver_at is None else parse_due_time(outgoing.deliver_at)
    is_copy = isinstance(outgoing, MessageCopy)
    if outgoing.headers:
        values["headers"] = checked_headers(
            outgoing.headers, delayed=wait is not None or due is not None, is_copy=is_copy
        )
    values["delivery_mode"] = 2 if outgoing.persistent else 1
    message_id = values.setdefault("message_id", new_message_id())
    if outgoing.priority is not None:
        values["priority"] = whole_number("priority", outgoing.priority, 0, 255)
    if outgoing.expiration is not None:
        values["expiration"] = _expiration_text(outgoing.expiration)
    if outgoing.timestamp is not None:
        if not isinstance(outgoing.timestamp, datetime):
            raise InvalidInputError(
                f"the timestamp {outgoing.timestamp!r} is not a datetime: give one with a time zone"
            )
        if outgoing.timestamp.tzinfo is None:
            raise InvalidInputError(f"the timestamp {outgoing.timestamp!s} has no time zone: give an aware datetime")
        values["timestamp"] = outgoing.timestamp
    return PreparedMessage(
        target=target,
        body=body_of(outgoing.body, outgoing.json),
        message_id=message_id,
        delay=wait,
        due=due,
        values=values,
        is_copy=is_copy,
    )


def _target(to: str | None, exchange: str | None, routing_key: str, isolated: bool) -> Target:
    if (to is None) == (exchange is None):
        raise InvalidInputError("the message needs one target: give either to=... (a queue) or exchange=...")
    if to is not None:
        if routing_key:
            raise InvalidInputError(
                f"the routing key {routing_key!r} goes with exchange=...; a message to the queue {to!r} needs none"
            )
        check_name("queue", to)
        if isolated.__class__ is not bool:
            raise InvalidInputError(f"isolated is {isolated!r}: give True or False")
        return QueueTarget(to, isolated)
    assert exchange is not None
    if not exchange:
        raise InvalidNameError("the exchange name is empty: name the queue with to=... instead of the default exchange")
    check_name("exchange", exchange)
    check_name("routing key", routing_key, empty=True)
    return ExchangeTarget(exchange, routing_key)


def checked_headers(headers: Mapping[str, Any], *, delayed: bool, is_copy: bool = False) -> dict[str, Any]:
    """Check headers and return a copy to send.

    Args:
        delayed: whether the message will be delayed.
        is_copy: whether bide's own headers are allowed.

    Raises:
        InvalidInputError: a header name cannot be sent.
        ReservedHeaderError: bide or the broker sets this header itself.
    """
    if not isinstance(headers, Mapping):
        raise InvalidInputError(f"the headers are of type {type(headers).__name__}: give a mapping")
    kept = {}
    for name, value in headers.items():
        if not isinstance(name, str):
            raise InvalidInputError(f"the header name {name!r} is not text: give a str")
        check_name("header", name)
        if name.startswith(OWN_PREFIX) and not is_copy:
            raise ReservedHeaderError(f"the header {name!r} starts with {OWN_PREFIX!r}, reserved for bide: rename it")
        if delayed and name in ("CC", "BCC"):
            raise ReservedHeaderError(
                f"the header {name!r} carries the delay of a delayed message: publish to an exchange with the bindings "
                "you need, or once per routing key"
            )
        if name in ("CC", "BCC") and not _is_text_list(value):
            raise InvalidInputError(f"the header {name!r} is {value!r}: give a list of routing keys")
        # With a copied x-death, brokers before 4.0.1 see a dead-letter cycle in the next hop and drop or hold the
        # message.
        if name not in _DELIVERY_HEADERS:
            # The message may wait for a connection while the caller changes the value that it passed.
            kept[name] = _copy_value(name, value) if isinstance(value, _MUTABLE) else value
    return kept


def _copy_value(name: str, value: Any) -> Any:
    try:
        return deepcopy(value)
    except (TypeError, RecursionError) as error:
        raise InvalidInputError(f"the header {name!r} has a value that cannot be copied: {error}") from error


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)


def _expiration_text(value: DelayLike) -> str:
    # Cap the value before negating it: the negative of timedelta.max overflows.
    milliseconds = -(-min(parse_delay(value), _MAX_EXPIRATION + MILLISECOND) // MILLISECOND)
    if milliseconds > _MAX_EXPIRATION // MILLISECOND:
        raise InvalidDelayError(
            f"the expiration {value!s} is longer than the broker accepts ({format_delay(_MAX_EXPIRATION)}): give a "
            "shorter one, or none"
        )
    return str(milliseconds)


def body_of(body: bytes | str | None, json: Any) -> bytes:
    """The bytes of a body.

    Raises:
        InvalidInputError: the body is neither bytes nor text, or the JSON value cannot be serialised.
    """
    if json is not None:
        try:
            return json_codec.dumps(json, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInputError(f"json={type(json).__name__} cannot be serialised: {error}") from error
    if body is None:
        return b""
    if isinstance(body, str):
        try:
            return body.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"the body has characters that UTF-8 cannot encode ({error}): give bytes"
            ) from error
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    raise InvalidInputError(f"the body is of type {type(body).__name__}: give bytes, text, or json=")
