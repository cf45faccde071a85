"""Encoding of outgoing messages as AMQP frames, with compiled routes where possible."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from bide.amqp import codec
from bide.amqp.publish_template import PublishTemplate
from bide.delay.compiled import CompiledRoute
from bide.delay.growing import ReadyDigits
from bide.delay.protocol import (
    HEADER_DUE,
    HEADER_EXPIRATION,
    HEADER_PRIORITY,
    HEADER_SENT,
    DelayInfrastructure,
    ExchangeTarget,
    Target,
)
from bide.durations import to_milliseconds
from bide.errors import InvalidInputError
from bide.messages.prepared import MessageTemplate, PreparedMessage
from bide.runtime.bounded_cache import BoundedCache

_TIME: Final = struct.Struct(">q")
_SENT: Final = codec.short_string(HEADER_SENT) + b"l"
_DUE: Final = codec.short_string(HEADER_DUE) + b"l"
_LEAST_INT64: Final = 1 << 31
_FLAGS: Final = codec.bits(False), codec.bits(True)
"""The end of a method frame's payload: for a message that may be dropped, and for a mandatory one."""


class Encoded(NamedTuple):
    """An encoded message.

    Attributes:
        frames: all of its frames.
        exchange: the exchange that it is published to.
        routing_key: the routing key that it is published with.
        hops: the number of queues that it waits in.
    """

    frames: bytes
    exchange: str
    routing_key: str
    hops: int


class Encoder:
    """Encodes messages for one delay infrastructure.

    If a message has a template, and the infrastructure has a compiled route, only the fields that differ are encoded.
    The bytes are the same either way.

    Args:
        frame_max: the connection's maximum frame size in bytes.
        ready: the digits of the infrastructure that are ready; None if all are.
    """

    def __init__(
        self, infrastructure: DelayInfrastructure, *, frame_max: int, ready: ReadyDigits | None = None
    ) -> None:
        self._infrastructure = infrastructure
        self._ready = ready
        self._frame_max = frame_max
        self._prepared = BoundedCache[MessageTemplate, _Direct | _Delayed | None]()

    def encode(self, message: PreparedMessage, now: datetime, *, channel: int, mandatory: bool) -> Encoded | None:
        """Encode a message that is sent now.

        Args:
            message: the message, with its due time if it has a delay; see :meth:`PreparedMessage.starting`.
            channel: the number of the channel.

        Returns:
            None if digits of its delay are not ready; see :class:`bide.client.growth.Growth`.

        Raises:
            InvalidInputError: this message cannot be delayed in this way or for this long, or a value cannot be
                encoded.
        """
        template = message.template
        if template is not None and not message.is_copy:
            try:
                prepared = self._prepared[template]
            except KeyError:
                prepared = self._prepare(template)
            if prepared is not None:
                encoded = prepared.encode(message, now, channel, mandatory)
                if encoded is not None:
                    return encoded
        return self._encode_all(message, now, channel, mandatory)

    def _prepare(self, template: MessageTemplate) -> _Direct | _Delayed | None:
        prepared: _Direct | _Delayed | None = None
        try:
            if not template.is_delayed:
                prepared = _Direct(self._infrastructure, template, self._frame_max)
            elif (route := self._infrastructure.compile(template.target, codec, self._ready)) is not None:
                prepared = _Delayed(self._infrastructure, template, self._frame_max, route)
        except InvalidInputError:
            # A message of this template may still be sent without a delay. Encoding it in full raises the error.
            prepared = None
        self._prepared[template] = prepared
        return prepared

    def _encode_all(self, message: PreparedMessage, now: datetime, channel: int, mandatory: bool) -> Encoded | None:
        route = message.route(self._infrastructure, now)
        if route is not None and self._ready is not None and not self._ready.has(route.digits):
            return None
        exchange, routing_key = (
            (route.exchange, route.routing_key) if route is not None else _plain_address(message.target)
        )
        expected = self._infrastructure.sender_headers(
            message_id=message.message_id, now=now, due=message.due, values=message.values
        )
        frames = codec.publish(
            channel,
            exchange=exchange,
            routing_key=routing_key,
            mandatory=mandatory,
            encoded_properties=codec.properties(message.wire_values(route, now, expected)),
            body=message.body,
            frame_max=self._frame_max,
        )
        return Encoded(b"".join(frames), exchange, routing_key, route.hops if route is not None else 0)


class _Direct:
    """Encodes undelayed messages of a template."""

    def __init__(self, infrastructure: DelayInfrastructure, template: MessageTemplate, frame_max: int) -> None:
        self._template = PublishTemplate(template.values, frame_max=frame_max)
        self._expected = infrastructure.compile_headers(template.values, codec)
        self._exchange, self._routing_key = _plain_address(template.target)
        self._starts = _starts(self._exchange, self._routing_key)

    def encode(self, message: PreparedMessage, now: datetime, channel: int, mandatory: bool) -> Encoded | None:
        """Encode a message; None if it has its own value of a header that receivers expect."""
        values = message.values
        headers = _first_headers(now, values.get("headers"))
        if self._expected is not None:
            expected = self._expected.encode(message.message_id, now, None, values)
            if expected is None:
                return None
            headers = expected + headers
        frames = self._template.frames(
            channel,
            self._starts[mandatory],
            headers=headers,
            message_id=message.message_id,
            body=message.body,
            correlation_id=values.get("correlation_id"),
            timestamp=values.get("timestamp"),
        )
        return Encoded(frames, self._exchange, self._routing_key, 0)


class _Delayed:
    """Encodes delayed messages of a template with a compiled route."""

    def __init__(
        self, infrastructure: DelayInfrastructure, template: MessageTemplate, frame_max: int, route: CompiledRoute
    ) -> None:
        values = dict(template.values)
        # These two are sent as headers while a message waits; see PreparedMessage.wire_values.
        carried = {HEADER_EXPIRATION: values.pop("expiration", None), HEADER_PRIORITY: values.pop("priority", None)}
        self._template = PublishTemplate(values, frame_max=frame_max)
        self._expected = infrastructure.compile_headers(template.values, codec)
        self._after = route.after
        self._names = route.names
        self._routing_key = route.routing_key
        self._heads: dict[str, tuple[bytes, bytes]] = {}
        self._carried = codec.table_items({name: value for name, value in carried.items() if value is not None})

    def encode(self, message: PreparedMessage, now: datetime, channel: int, mandatory: bool) -> Encoded | None:
        """Encode a message; None if the infrastructure has to compute the route: the delay is too long or already over,
        or digits are not ready."""
        due = message.due
        assert due is not None
        span = due - now
        wait = (span.days * 86_400 + span.seconds) * 1_000_000 + span.microseconds
        milliseconds = to_milliseconds(due)
        if wait <= 0 or milliseconds < _LEAST_INT64:
            return None
        found = self._after(wait, message.message_id)
        if found is None:
            return None
        exchange, routing_key, added, hops = found
        values = message.values
        own = values.get("headers")
        if own and self._names and not self._names.isdisjoint(own):
            return None
        heads = self._heads.get(exchange) or self._remember(exchange)
        if self._routing_key is None:
            start = b"".join((heads[mandatory], codec.short_string(routing_key), _FLAGS[mandatory]))
        else:
            start = heads[mandatory]
        first = _first_headers(now, own)
        if self._expected is not None:
            expected = self._expected.encode(message.message_id, now, due, values)
            if expected is None:
                return None
            first = expected + first
        frames = self._template.frames(
            channel,
            start,
            headers=b"".join((first, added, _DUE, _TIME.pack(milliseconds), self._carried)),
            message_id=message.message_id,
            body=message.body,
            correlation_id=values.get("correlation_id"),
            timestamp=values.get("timestamp"),
        )
        return Encoded(frames, exchange, routing_key, hops)

    def _remember(self, exchange: str) -> tuple[bytes, bytes]:
        """The start of the method frames' payloads: complete, or up to the routing key if that varies."""
        key = self._routing_key
        heads = (codec.publish_to(exchange),) * 2 if key is None else _starts(exchange, key)
        self._heads[exchange] = heads
        return heads


def _first_headers(now: datetime, own: Mapping[str, Any] | None) -> bytes:
    """The first headers of every message: the sender's own, and the sending time."""
    sent = _SENT + _TIME.pack(to_milliseconds(now))
    return codec.table_items(own) + sent if own else sent


def _starts(exchange: str, routing_key: str) -> tuple[bytes, bytes]:
    """The method frames' payloads: for a message that may be dropped, and for a mandatory one."""
    head = codec.publish_to(exchange) + codec.short_string(routing_key)
    return head + _FLAGS[False], head + _FLAGS[True]


def _plain_address(target: Target) -> tuple[str, str]:
    return (target.exchange, target.routing_key) if isinstance(target, ExchangeTarget) else ("", target.queue)
