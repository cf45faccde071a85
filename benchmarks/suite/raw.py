"""The upper limit: a client that only moves prepared bytes over one socket.

It parses no more than it has to, decodes nothing, keeps nothing, and notices nothing that goes wrong but a closed
socket. No client that does its work can be as fast.
"""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Final, Self

from benchmarks.suite.confirmed import Confirmed
from bide.amqp import codec
from bide.amqp.handshake import open_vhost, start_ok, tune_ok
from bide.amqp.url import BrokerUrl
from bide.errors import ConnectionLostError, ProtocolError

_HEAD: Final = struct.Struct(">BHI")
_PROTOCOL: Final = b"AMQP\x00\x00\x09\x01"
_CHUNK: Final = 50
_READ: Final = 1 << 18

_START: Final = (10, 10)
_TUNE: Final = (10, 30)
_OPENED: Final = (10, 41)
_CHANNEL_OPENED: Final = (20, 11)
_SELECTED: Final = (85, 11)
_QOS_SET: Final = (60, 11)
_CONSUMING: Final = (60, 21)
_DELIVER: Final = b"\x00\x3c\x00\x3c"
_ACK: Final = b"\x00\x3c\x00\x50"


class RawConnection:
    """One socket with one channel."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._rest = b""

    @classmethod
    def open(cls, url: BrokerUrl) -> Self:
        """Connect, and open channel 1."""
        self = cls(socket.create_connection(url.hosts[0], timeout=30))
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream.sendall(_PROTOCOL)
        self._expect(_START)
        self._call(start_ok(url, "PLAIN EXTERNAL"), _TUNE, channel=0)
        self._stream.sendall(codec.frame(codec.METHOD, 0, tune_ok(10, FRAME_MAX, 0)))
        self._call(open_vhost(url.vhost), _OPENED, channel=0)
        self._call(codec.method(20, 10, codec.short_string("")), _CHANNEL_OPENED)
        return self

    def close(self) -> None:
        """Close the socket."""
        self._stream.close()

    def publish(self, messages: Sequence[bytes], *, window: int, until: Callable[[int], bool]) -> int:
        """Send messages over and over, and return how many were confirmed: all that were sent.

        Args:
            messages: each with all its frames.
            window: the maximum number of unconfirmed messages.
            until: called with the number of sent messages; true ends it.
        """
        self._call(codec.method(85, 10, codec.bits(False)), _SELECTED)
        chunks = cycle(_chunks(messages))
        confirmed = Confirmed()
        sent, ended, pending = 0, False, memoryview(b"")
        stream, buffer = self._stream, self._rest
        stream.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while not ended or pending or confirmed.count < sent:
                if not pending and not ended and sent - confirmed.count <= window - _CHUNK:
                    ended = until(sent)
                    if not ended:
                        pending, sent = memoryview(next(chunks)), sent + _CHUNK
                if pending:
                    try:
                        pending = pending[stream.send(pending) :]
                    except BlockingIOError:
                        selector.modify(stream, selectors.EVENT_READ | selectors.EVENT_WRITE)
                        selector.select()
                        selector.modify(stream, selectors.EVENT_READ)
                elif confirmed.count < sent and (ended or sent - confirmed.count > window - _CHUNK):
                    selector.select()
                try:
                    buffer += self._received()
                except BlockingIOError:
                    continue
                buffer = _count_confirms(buffer, confirmed)
        return sent

    def consume(self, queue: str, *, prefetch: int, messages: int) -> None:
        """Receive and acknowledge ``messages`` messages."""
        self._call(codec.method(60, 10, codec.long(0), codec.short(prefetch), codec.bits(False)), _QOS_SET)
        subscribe = (b"\x00\x00", codec.short_string(queue), codec.short_string("raw"), codec.bits(), codec.table({}))
        self._call(codec.method(60, 20, *subscribe), _CONSUMING)
        received, buffer = 0, self._rest
        while received < messages:
            place, end, tag = 0, len(buffer), 0
            while end - place > 7:
                size = int.from_bytes(buffer[place + 3 : place + 7], "big") + 8
                if place + size > end:
                    break
                if buffer[place] == codec.METHOD and buffer[place + 7 : place + 11] == _DELIVER:
                    at = place + 12 + buffer[place + 11]
                    tag = int.from_bytes(buffer[at : at + 8], "big")
                    received += 1
                place += size
            buffer = buffer[place:]
            if tag:
                ack = codec.method(60, 80, codec.long_long(tag), codec.bits(True))
                self._stream.sendall(codec.frame(codec.METHOD, 1, ack))
            if received < messages:
                buffer += self._received()

    def _call(self, payload: bytes, reply: tuple[int, int], *, channel: int = 1) -> None:
        self._stream.sendall(codec.frame(codec.METHOD, channel, payload))
        self._expect(reply)

    def _expect(self, reply: tuple[int, int]) -> None:
        """Take the next method frame off the stream, which has to be this one."""
        while len(self._rest) < _HEAD.size:
            self._rest += self._received()
        _, _, size = _HEAD.unpack_from(self._rest)
        while len(self._rest) < size + codec.FRAME_OVERHEAD:
            self._rest += self._received()
        found = struct.unpack_from(">HH", self._rest, _HEAD.size)
        payload = self._rest[_HEAD.size : _HEAD.size + size]
        self._rest = self._rest[size + codec.FRAME_OVERHEAD :]
        if found != reply:
            raise ProtocolError(f"the broker answered with method {found} instead of {reply}: {payload!r}")

    def _received(self) -> bytes:
        data = self._stream.recv(_READ)
        if not data:
            raise ConnectionLostError("the broker closed the connection")
        return data


FRAME_MAX: Final = 131072
"""What RabbitMQ offers unless it is configured otherwise."""


def _chunks(messages: Sequence[bytes]) -> list[bytes]:
    """Chunks of equal size; the last one is filled with the first messages again."""
    repeated = [*messages, *islice(cycle(messages), -len(messages) % _CHUNK)]
    return [b"".join(repeated[place : place + _CHUNK]) for place in range(0, len(repeated), _CHUNK)]


def _count_confirms(buffer: bytes, confirmed: Confirmed) -> bytes:
    """Count the confirms in what was received; return the part of a frame at its end."""
    place, end = 0, len(buffer)
    # 7 bytes of frame, 4 of method, tag, flag, end of frame.
    while end - place >= 21:
        if buffer[place + 7 : place + 11] != _ACK:
            raise ProtocolError(f"the broker sent something else than confirms: {buffer[place : place + 80]!r}")
        tag = int.from_bytes(buffer[place + 11 : place + 19], "big")
        confirmed.add(tag, multiple=bool(buffer[place + 19]))
        place += 21
    return buffer[place:]
