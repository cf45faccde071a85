"""The broker's side of an AMQP connection, in front of the rules in memory."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from bide.amqp import codec, decoding
from bide.testing.amqp_arguments import MethodArguments
from bide.testing.amqp_channel import ServerChannel
from bide.testing.rules.virtual_host import VirtualHost
from bide.testing.transport import MemoryTransport

FRAME_MAX: Final = 131_072
CHANNEL_MAX: Final = 2047

_FRAME: Final = struct.Struct(">BHI")
_METHOD: Final = struct.Struct(">HH")
_CAPABILITIES: Final = (
    "publisher_confirms",
    "exchange_exchange_bindings",
    "basic.nack",
    "consumer_cancel_notify",
    "connection.blocked",
    "consumer_priorities",
    "authentication_failure_close",
    "per_consumer_qos",
)


class ServerConnection:
    """The broker's side of a connection.

    Args:
        transport: the transport to the client.
        host: returns a virtual host by name.
        release: the release that the broker reports.
        lock: held while the broker handles frames.

    Attributes:
        sent: number of times that data was sent in either direction.
    """

    def __init__(
        self,
        transport: MemoryTransport,
        *,
        host: Callable[[str], VirtualHost],
        release: tuple[int, ...],
        lock: AbstractContextManager[Any],
    ) -> None:
        self._transport = transport
        self._host_of = host
        self._release = release
        self._lock = lock
        self._host: VirtualHost | None = None
        self._buffer = bytearray()
        self._channels: dict[int, ServerChannel] = {}
        self._header_received = False
        self.sent = 0

    def received(self, data: bytes) -> None:
        """See :class:`bide.testing.transport.Server`."""
        with self._lock:
            self.sent += 1
            self._buffer += data
            self._read()

    def lost(self) -> None:
        """See :class:`bide.testing.transport.Server`."""
        with self._lock:
            channels, self._channels = self._channels, {}
            for channel in channels.values():
                channel.close()
            if self._host is not None:
                with self._host.turn():
                    self._host.remove_owned(self)

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed or closing."""
        return self._transport.is_closing()

    def cut(self) -> None:
        """Close the connection without a close method, like a network failure."""
        self._transport.abort()

    def unsettled(self) -> Iterator[tuple[int, int]]:
        """The unsettled deliveries of its clients, as pairs of channel and delivery tag."""
        for channel in self._channels.values():
            for tag in channel.unsettled:
                yield id(channel), tag

    def _read(self) -> None:
        if not self._header_received:
            if len(self._buffer) < len(codec.PROTOCOL_HEADER):
                return
            del self._buffer[: len(codec.PROTOCOL_HEADER)]
            self._header_received = True
            self._start()
        offset = 0
        while len(self._buffer) - offset >= codec.FRAME_OVERHEAD:
            kind, number, size = _FRAME.unpack_from(self._buffer, offset)
            end = offset + codec.FRAME_OVERHEAD + size
            if end > len(self._buffer):
                break
            frame = bytes(self._buffer[offset:end])
            offset = end
            self._on_frame(kind, number, frame)
        del self._buffer[:offset]

    def _on_frame(self, kind: int, number: int, frame: bytes) -> None:
        if kind == codec.HEARTBEAT:
            self._transport.deliver(codec.HEARTBEAT_FRAME)
        elif number == 0:
            self._on_connection_method(frame[7:-1])
        elif kind == codec.METHOD:
            payload = frame[7:-1]
            if _METHOD.unpack_from(payload) == (20, 10):
                self._open_channel(number)
            elif (channel := self._channels.get(number)) is not None:
                channel.on_method(payload)
        elif (channel := self._channels.get(number)) is not None:
            if kind == codec.BODY:
                channel.on_body(frame[7:-1])
            else:
                (size,) = struct.unpack_from(">Q", frame, 11)
                channel.on_header(size, decoding.properties(frame))

    def _start(self) -> None:
        properties: Mapping[str, Any] = {
            "product": "RabbitMQ",
            "version": ".".join(map(str, self._release)),
            "platform": "memory",
            "capabilities": dict.fromkeys(_CAPABILITIES, True),
        }
        mechanisms, locales = codec.long_string(b"PLAIN EXTERNAL"), codec.long_string(b"en_US")
        self._send(codec.method(10, 10, b"\x00\x09", codec.table(properties), mechanisms, locales))

    def _on_connection_method(self, payload: bytes) -> None:
        match _METHOD.unpack_from(payload):
            case (10, 11):
                self._send(codec.method(10, 30, codec.short(CHANNEL_MAX), codec.long(FRAME_MAX), codec.short(0)))
            case (10, 40):
                self._host = self._host_of(MethodArguments(payload).text())
                self._send(codec.method(10, 41, b"\x00"))
            case (10, 50):
                self._send(codec.method(10, 51))
                self._transport.close()
            case _:
                # start-ok, tune-ok and close-ok need no answer.
                return

    def _open_channel(self, number: int) -> None:
        assert self._host is not None
        self._channels[number] = ServerChannel(
            number,
            host=self._host,
            connection=self,
            send=self._deliver,
            ended=lambda: self._channels.pop(number, None),
        )
        self._deliver(codec.frame(codec.METHOD, number, codec.method(20, 11, b"\0\0\0\0")))

    def _deliver(self, data: bytes) -> None:
        self.sent += 1
        self._transport.deliver(data)

    def _send(self, payload: bytes) -> None:
        self._deliver(codec.frame(codec.METHOD, 0, payload))
