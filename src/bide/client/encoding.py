"""Messages as the bytes that go on the wire, as quickly as the delay infrastructure allows."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple

from bide.amqp import codec
from bide.amqp.publish_template import PublishTemplate
from bide.client.growth import Growth
from bide.delay.clock import Clock
from bide.delay.clock_digits import LEVELS, RESOLUTION
from bide.delay.clock_keys import digit_key
from bide.delay.protocol import (
    HEADER_DUE,
    HEADER_EXPIRATION,
    HEADER_PRIORITY,
    HEADER_SENT,
    HEADER_TO,
    DelayInfrastructure,
    ExchangeTarget,
    Target,
)
from bide.durations import to_milliseconds
from bide.errors import InvalidInputError
from bide.messages.prepared import MessageTemplate, PreparedMessage
from bide.runtime.bounded_cache import BoundedCache

_LENGTH: Final = struct.Struct(">I")
_TIME: Final = struct.Struct(">q")
_SENT: Final = codec.short_string(HEADER_SENT) + b"l"
_LEAST_INT64: Final = 1 << 31
_UNITS: Final = tuple(level.unit // RESOLUTION for level in LEVELS)


class Encoded(NamedTuple):
    """A message on the wire.

    Attributes:
        frames: all of them.
        exchange: where it is published to.
        routing_key: what it is published with.
        hops: queues that it waits in.
    """

    frames: bytes
    exchange: str
    routing_key: str
    hops: int


class Encoder:
    """Encodes messages for one delay infrastructure.

    Of messages that come with their kind, and are not delayed or delayed by ``Clock``, only what differs is encoded.
    The bytes are the same either way.

    Args:
        frame_max: of the connection, in bytes.
        growth: which digits of the infrastructure are ready; None if all are.
    """

    def __init__(self, infrastructure: DelayInfrastructure, *, frame_max: int, growth: Growth | None = None) -> None:
        self._infrastructure = infrastructure
        self._growth = growth
        self._clock = infrastructure if isinstance(infrastructure, Clock) else None
        self._frame_max = frame_max
        self._prepared = BoundedCache[MessageTemplate, _Direct | _Delayed | None]()

    def encode(self, message: PreparedMessage, now: datetime, *, channel: int, mandatory: bool) -> Encoded | None:
        """Encode a message that is sent now.

        Args:
            message: started, if it has a delay; see :meth:`PreparedMessage.starting`.
            channel: the number of the channel.

        Returns:
            None if digits of its delay are not ready; see :class:`bide.client.growth.Growth`.

        Raises:
            InvalidInputError: it cannot be delayed so long, or so, or a value cannot be encoded.
        """
        kind = message.kind
        if kind is not None and self._clock is not None and not message.is_copy:
            try:
                prepared = self._prepared[kind]
            except KeyError:
                prepared = self._prepare(self._clock, kind)
            if prepared is not None:
                encoded = prepared.encode(message, now, channel, mandatory)
                if encoded is not None:
                    return encoded
        return self._encode_all(message, now, channel, mandatory)

    def _prepare(self, clock: Clock, kind: MessageTemplate) -> _Direct | _Delayed | None:
        prepared: _Direct | _Delayed | None
        try:
            prepared = (
                _Delayed(clock, kind, self._frame_max, self._growth)
                if kind.is_delayed
                else _Direct(kind, self._frame_max)
            )
        except InvalidInputError:
            # It may still be sent without a wait; what is wrong is said by whoever finds it in a message.
            prepared = None
        self._prepared[kind] = prepared
        return prepared

    def _encode_all(self, message: PreparedMessage, now: datetime, channel: int, mandatory: bool) -> Encoded | None:
        route = message.route(self._infrastructure, now)
        if route is not None and self._growth is not None and not self._growth.has(route.digits):
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
    """Messages of a kind that are not delayed."""

    def __init__(self, kind: MessageTemplate, frame_max: int) -> None:
        self._template = PublishTemplate(kind.values, frame_max=frame_max)
        self._exchange, self._routing_key = _plain_address(kind.target)
        self._starts = _starts(self._exchange, self._routing_key)

    def encode(self, message: PreparedMessage, now: datetime, channel: int, mandatory: bool) -> Encoded | None:
        values = message.values
        frames = self._template.frames(
            channel,
            self._starts[mandatory],
            headers=_first_headers(now, values.get("headers")),
            message_id=message.message_id,
            body=message.body,
            correlation_id=values.get("correlation_id"),
            timestamp=values.get("timestamp"),
        )
        return Encoded(frames, self._exchange, self._routing_key, 0)


class _Delayed:
    """Messages of a kind that ``Clock`` delays; :meth:`Clock.route` for many at once."""

    def __init__(self, clock: Clock, kind: MessageTemplate, frame_max: int, growth: Growth | None) -> None:
        values = dict(kind.values)
        # See Outgoing.wire_values for what becomes of these two while a message waits.
        carried = {HEADER_EXPIRATION: values.pop("expiration", None), HEADER_PRIORITY: values.pop("priority", None)}
        self._template = PublishTemplate(values, frame_max=frame_max)
        target = kind.target
        # What is wrong with the target is found here, in the words of the infrastructure.
        shortest = clock.route(clock.resolution, target)
        self._routing_key = shortest.routing_key
        # A wait of one resolution has one digit; any other hop is the target's.
        self._hops = shortest.hops - 1
        self._levels = [
            (unit, clock.entry_exchange(level), _starts(clock.entry_exchange(level), self._routing_key))
            for unit, level in zip(_UNITS, LEVELS, strict=True)
        ]
        self._resolution = clock.resolution
        self._step = clock.resolution // RESOLUTION
        self._longest = clock.max_delay // RESOLUTION
        self._lanes = clock.lanes
        padding = clock.padding(target)
        self._tables: list[Sequence[Sequence[bytes | None]]] = [
            _keys(padding, lane) if growth is None else growth.keys(padding, lane) for lane in range(clock.lanes)
        ]
        self._carrier = codec.short_string(clock.carrier or "CC") + b"A"
        self._target_key = codec.field_value(clock.target_key(target))
        self._tail = codec.table_items({HEADER_TO: str(target)}) + codec.short_string(HEADER_DUE) + b"l"
        self._carried = codec.table_items({name: value for name, value in carried.items() if value is not None})

    def encode(self, message: PreparedMessage, now: datetime, channel: int, mandatory: bool) -> Encoded | None:
        """None for what only the infrastructure itself can tell: too long a delay, none any more, digits not ready."""
        due = message.due
        assert due is not None
        wait = -(-(due - now) // self._resolution) * self._step
        milliseconds = to_milliseconds(due)
        if not 0 < wait <= self._longest or milliseconds < _LEAST_INT64:
            return None
        lane = zlib.crc32(message.message_id.encode()) % self._lanes if self._lanes > 1 else 0
        tables = self._tables[lane]
        hops, place = self._hops, 0
        keys: list[bytes | None] = []
        for index, (unit, _, _) in enumerate(self._levels):
            digit, wait = divmod(wait, unit)
            if digit:
                hops += 1
            elif not keys:
                place = index + 1
                continue
            keys.append(tables[index][digit])
        _, exchange, starts = self._levels[place]
        keys.append(self._target_key)
        try:
            array = b"".join(keys)  # type: ignore[arg-type]
        except TypeError:
            # One is None. To ask for it costs time with every message, and to be told costs none.
            return None
        values = message.values
        frames = self._template.frames(
            channel,
            starts[mandatory],
            headers=b"".join(
                (
                    _first_headers(now, values.get("headers")),
                    self._carrier,
                    _LENGTH.pack(len(array)),
                    array,
                    self._tail,
                    _TIME.pack(milliseconds),
                    self._carried,
                )
            ),
            message_id=message.message_id,
            body=message.body,
            correlation_id=values.get("correlation_id"),
            timestamp=values.get("timestamp"),
        )
        return Encoded(frames, exchange, self._routing_key, hops)


@lru_cache(maxsize=256)
def _keys(padding: str, lane: int) -> tuple[tuple[bytes, ...], ...]:
    """The encoded key of every digit of every level."""
    return tuple(
        tuple(
            codec.field_value(padding + digit_key(level, digit, lane if digit else 0))
            for digit in range(level.highest + 1)
        )
        for level in LEVELS
    )


def _first_headers(now: datetime, own: Mapping[str, Any] | None) -> bytes:
    """What every message begins its headers with: the sender's own, and when it was sent."""
    sent = _SENT + _TIME.pack(to_milliseconds(now))
    return codec.table_items(own) + sent if own else sent


def _starts(exchange: str, routing_key: str) -> tuple[bytes, bytes]:
    """The method frames' payloads: of what may be dropped, and of what is mandatory."""
    return (
        codec.start_of_publish(exchange=exchange, routing_key=routing_key, mandatory=False),
        codec.start_of_publish(exchange=exchange, routing_key=routing_key, mandatory=True),
    )


def _plain_address(target: Target) -> tuple[str, str]:
    return (target.exchange, target.routing_key) if isinstance(target, ExchangeTarget) else ("", target.queue)
