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

_INT64: Final = struct.Struct(">q")
_SENT_NAME: Final = codec.short_string(HEADER_SENT) + b"l"
_DUE_NAME: Final = codec.short_string(HEADER_DUE) + b"l"
_MAX_INT32: Final = (1 << 31) - 1
"""The codec encodes integers up to this in 32 bits, and this module only in 64."""
_MANDATORY_BITS: Final = codec.bits(False), codec.bits(True)
"""The last octet of a ``basic.publish`` payload: without and with the mandatory flag."""


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

    Attributes:
        addressed: the exchanges that exist, by the queue whose undelayed messages are published to them; see
            :meth:`bide.delay.protocol.DelayInfrastructure.address_exchange`.
    """

    def __init__(
        self, infrastructure: DelayInfrastructure, *, frame_max: int, ready: ReadyDigits | None = None
    ) -> None:
        self._infrastructure = infrastructure
        self._ready_digits = ready
        self._frame_max = frame_max
        self._encoders = BoundedCache[MessageTemplate, _UndelayedEncoder | _DelayedEncoder | None]()
        self.addressed = BoundedCache[str, str]()

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
                prepared = self._encoders[template]
            except KeyError:
                prepared = self._make_encoder(template)
            if prepared is not None:
                encoded = prepared.encode(message, now, channel, mandatory)
                if encoded is not None:
                    return encoded
        return self._encode_in_full(message, now, channel, mandatory)

    def _make_encoder(self, template: MessageTemplate) -> _UndelayedEncoder | _DelayedEncoder | None:
        prepared: _UndelayedEncoder | _DelayedEncoder | None = None
        try:
            if not template.is_delayed:
                prepared = _UndelayedEncoder(self._infrastructure, template, self._frame_max, self.addressed)
            elif (route := self._infrastructure.compile(template.target, codec, self._ready_digits)) is not None:
                prepared = _DelayedEncoder(self._infrastructure, template, self._frame_max, route)
        except InvalidInputError:
            # A message of this template may still be sent without a delay. Encoding it in full raises the error.
            prepared = None
        self._encoders[template] = prepared
        return prepared

    def _encode_in_full(self, message: PreparedMessage, now: datetime, channel: int, mandatory: bool) -> Encoded | None:
        route = message.route(self._infrastructure, now)
        if route is not None and self._ready_digits is not None and not self._ready_digits.has(route.digits):
            return None
        exchange, routing_key = (
            (route.exchange, route.routing_key)
            if route is not None
            else _undelayed_address(message.target, self.addressed)
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


class _UndelayedEncoder:
    """Encodes undelayed messages of a template."""

    def __init__(
        self,
        infrastructure: DelayInfrastructure,
        template: MessageTemplate,
        frame_max: int,
        addressed: Mapping[str, str],
    ) -> None:
        self._template = PublishTemplate(template.values, frame_max=frame_max)
        self._receiver_headers = infrastructure.compile_headers(template.values, codec)
        self._target = template.target
        self._addressed = addressed
        self._address = _undelayed_address(template.target, addressed)
        self._method_payloads = _method_payloads(*self._address)

    def encode(self, message: PreparedMessage, now: datetime, channel: int, mandatory: bool) -> Encoded | None:
        """Encode a message; None if the message has its own value of a header that receivers expect."""
        values = message.values
        headers = _first_headers(now, values.get("headers"))
        if self._receiver_headers is not None:
            expected = self._receiver_headers.encode(message.message_id, now, None, values)
            if expected is None:
                return None
            headers = expected + headers
        if self._addressed or self._address[0]:
            address = _undelayed_address(self._target, self._addressed)
            if address != self._address:
                self._address, self._method_payloads = address, _method_payloads(*address)
        frames = self._template.frames(
            channel,
            self._method_payloads[mandatory],
            headers=headers,
            message_id=message.message_id,
            body=message.body,
            correlation_id=values.get("correlation_id"),
            timestamp=values.get("timestamp"),
        )
        return Encoded(frames, *self._address, 0)


class _DelayedEncoder:
    """Encodes delayed messages of a template with a compiled route."""

    def __init__(
        self, infrastructure: DelayInfrastructure, template: MessageTemplate, frame_max: int, route: CompiledRoute
    ) -> None:
        values = dict(template.values)
        # Expiration and priority are sent as headers while a message waits; see PreparedMessage.wire_values.
        carried = {HEADER_EXPIRATION: values.pop("expiration", None), HEADER_PRIORITY: values.pop("priority", None)}
        self._template = PublishTemplate(values, frame_max=frame_max)
        self._receiver_headers = infrastructure.compile_headers(template.values, codec)
        self._route_after = route.after
        self._route_header_names = route.names
        self._routing_key = route.routing_key
        self._payload_starts: dict[str, tuple[bytes, bytes]] = {}
        self._carried = codec.table_items({name: value for name, value in carried.items() if value is not None})

    def encode(self, message: PreparedMessage, now: datetime, channel: int, mandatory: bool) -> Encoded | None:
        """Encode a message; None if it has to be encoded in full.

        Its delay is then too long or already over, digits are not ready, or it has its own value of a header that this
        encoder writes.
        """
        due = message.due
        assert due is not None
        span = due - now
        wait = (span.days * 86_400 + span.seconds) * 1_000_000 + span.microseconds
        milliseconds = to_milliseconds(due)
        if wait <= 0 or milliseconds <= _MAX_INT32:
            return None
        found = self._route_after(wait, message.message_id)
        if found is None:
            return None
        exchange, routing_key, added, hops = found
        values = message.values
        own = values.get("headers")
        if own and self._route_header_names and not self._route_header_names.isdisjoint(own):
            return None
        heads = self._payload_starts.get(exchange) or self._add_payload_start(exchange)
        if self._routing_key is None:
            start = b"".join((heads[mandatory], codec.short_string(routing_key), _MANDATORY_BITS[mandatory]))
        else:
            start = heads[mandatory]
        first = _first_headers(now, own)
        if self._receiver_headers is not None:
            expected = self._receiver_headers.encode(message.message_id, now, due, values)
            if expected is None:
                return None
            first = expected + first
        frames = self._template.frames(
            channel,
            start,
            headers=b"".join((first, added, _DUE_NAME, _INT64.pack(milliseconds), self._carried)),
            message_id=message.message_id,
            body=message.body,
            correlation_id=values.get("correlation_id"),
            timestamp=values.get("timestamp"),
        )
        return Encoded(frames, exchange, routing_key, hops)

    def _add_payload_start(self, exchange: str) -> tuple[bytes, bytes]:
        """The payloads of the method frame to this exchange: complete, or up to the routing key if the key varies."""
        key = self._routing_key
        heads = (codec.publish_to(exchange),) * 2 if key is None else _method_payloads(exchange, key)
        self._payload_starts[exchange] = heads
        return heads


def _first_headers(now: datetime, own: Mapping[str, Any] | None) -> bytes:
    """The first headers of every message: the sender's own, and the sending time."""
    sent = _SENT_NAME + _INT64.pack(to_milliseconds(now))
    return codec.table_items(own) + sent if own else sent


def _method_payloads(exchange: str, routing_key: str) -> tuple[bytes, bytes]:
    """The payloads of the ``basic.publish`` method frame: without and with the mandatory flag."""
    head = codec.publish_to(exchange) + codec.short_string(routing_key)
    return head + _MANDATORY_BITS[False], head + _MANDATORY_BITS[True]


def _undelayed_address(target: Target, addressed: Mapping[str, str]) -> tuple[str, str]:
    if isinstance(target, ExchangeTarget):
        return target.exchange, target.routing_key
    exchange = addressed.get(target.queue)
    return ("", target.queue) if exchange is None else (exchange, "")
