"""A blocking connection to one broker by the stream protocol, for reading."""

from __future__ import annotations

import itertools
import re
import socket
import ssl
import struct
import time
from collections import deque
from types import TracebackType
from typing import Final, Self

from bide.amqp.exposure import warn_about_exposure
from bide.amqp.handshake import release_of, tls_reason
from bide.amqp.url import BrokerUrl
from bide.errors import (
    AccessRefusedError,
    AuthenticationError,
    BrokerError,
    BrokerUnreachableError,
    ConnectionLostError,
    ProtocolError,
    TargetNotFoundError,
    TlsError,
    VirtualHostError,
)
from bide.runtime.logs import logger
from bide.streams import frames
from bide.streams.chunk import Chunk
from bide.streams.frames import Fields, Whereabouts

log = logger(__name__)

_MAX_FRAME: Final = 1 << 28
"""Bytes that no frame has, except one from a peer that speaks something else. A chunk is one frame, and not
bound by the frame size agreed on."""

_RECEIVE: Final = 1 << 18


class StreamConnection:
    """One connection. It is not reopened: a reader goes on with another one from the offset that it has reached.

    Attributes:
        address: host and port.
        advertised: those that the broker's node advertises.
        release: RabbitMQ's release, such as ``(4, 3, 6)``.
        timeout: seconds that the broker has for an answer.
    """

    def __init__(self, url: BrokerUrl, address: tuple[str, int]) -> None:
        """Connect and enter the virtual host.

        Raises:
            BrokerUnreachableError: nothing answers there; TlsError where TLS was the reason.
            AuthenticationError: wrong user or password.
            VirtualHostError: the virtual host is unknown or closed to this user.
            ProtocolError: the peer does not speak the stream protocol.
        """
        self.address = address
        self.release: tuple[int, ...] = ()
        self.advertised = address
        self.timeout = url.timeout.total_seconds()
        self._numbers = itertools.count(1)
        self._subscriptions = itertools.cycle(range(256))
        self._buffer = bytearray()
        self._chunks: deque[tuple[int, Chunk]] = deque()
        self._place = f"{address[0]}:{address[1]}"
        self._heartbeat = 0
        self._sent_at = time.monotonic()
        try:
            self._socket = self._connect(url)
        except ssl.SSLError as error:
            raise TlsError(f"TLS with {self._place} failed: {tls_reason(error)}") from error
        except OSError as error:
            raise BrokerUnreachableError(
                f"no broker answers the stream protocol at {self._place} ({error.strerror or error}): is the plugin "
                "rabbitmq_stream enabled, and its port this one? 'bide tap status --json' prints its port: give it by "
                "--stream-port or BIDE_STREAM_PORT, and to Spark by the option streamPort"
            ) from error
        try:
            self._enter(url)
        except (ConnectionLostError, ProtocolError) as error:
            self.close()
            raise BrokerUnreachableError(
                f"what answers at {self._place} does not open a connection of the stream protocol ({error}): "
                "is this the port of the plugin rabbitmq_stream?"
            ) from error
        except BaseException:
            self.close()
            raise

    def _connect(self, url: BrokerUrl) -> socket.socket:
        plain = socket.create_connection(self.address, timeout=self.timeout)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            context = url.ssl_context()
            return plain if context is None else context.wrap_socket(plain, server_hostname=self.address[0])
        except BaseException:
            plain.close()
            raise

    def _enter(self, url: BrokerUrl) -> None:
        about = {"product": "bide", "platform": "Python", "connection_name": url.name}
        self.release = release_of(self._ask(frames.PEER_PROPERTIES, frames.properties(about)).properties())
        mechanism, secret = ("EXTERNAL", b"") if url.external else ("PLAIN", f"\0{url.user}\0{url.password}".encode())
        offered = self._ask(frames.SASL_HANDSHAKE).strings()
        if mechanism not in offered:
            raise AuthenticationError(
                f"the broker at {self._place} offers {', '.join(offered) or 'no way'} to log in, not {mechanism}"
            )
        warn_about_exposure(url, self._socket)
        answer = struct.pack(">i", len(secret)) + secret
        try:
            self._ask(frames.SASL_AUTHENTICATE, frames.string(mechanism), answer)
        except AuthenticationError:
            who = "the name in our certificate" if url.external else f"user {url.user!r} with this password"
            raise AuthenticationError(f"the broker at {self._place} does not accept {who}") from None
        key, tune = self._frame(self._deadline())
        if key != frames.TUNE:
            raise ProtocolError(f"the broker at {self._place} sent {key:#06x} where limits were expected")
        largest, heartbeat = tune.uint32(), tune.uint32()
        # A reader beats only while it reads, and what it reads for may take its time: the broker's interval is longer.
        self._heartbeat = heartbeat if url.heartbeat else 0
        self._send(frames.frame(frames.TUNE, struct.pack(">II", largest, self._heartbeat)))
        try:
            node = self._ask(frames.OPEN, frames.string(url.vhost)).properties()
        except VirtualHostError:
            raise VirtualHostError(
                f"the virtual host {url.vhost!r} does not exist at {self._place}, or user {url.user!r} may not enter it"
            ) from None
        if re.fullmatch("[0-9]{1,5}", port := node.get("advertised_port", "")):
            self.advertised = node.get("advertised_host", ""), int(port)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; the broker needs no good-bye from a reader."""
        self._socket.close()

    def whereabouts(self, streams: list[str]) -> dict[str, Whereabouts]:
        """Where these streams are, by name; one that does not exist has another code than ``OK``."""
        number = next(self._numbers)
        self._send(frames.request(frames.METADATA, number, frames.strings(streams)))
        return frames.whereabouts(self._answer(frames.METADATA, number))

    def partitions(self, super_stream: str) -> list[str]:
        """The streams that a super stream consists of.

        Raises:
            TargetNotFoundError: there is no such super stream.
        """
        try:
            return self._ask(frames.PARTITIONS, frames.string(super_stream)).strings()
        except TargetNotFoundError:
            raise TargetNotFoundError(f"there is no super stream {super_stream!r} on this virtual host") from None

    def statistics(self, stream: str) -> dict[str, int]:
        """The counters of a stream: ``first_chunk_id`` and ``committed_chunk_id``, -1 where there is no chunk.

        RabbitMQ answers this from 3.11 on.
        """
        return self._ask(frames.STREAM_STATS, frames.string(stream), stream=stream).statistics()

    def subscribe(self, stream: str, position: bytes, *, credit: int) -> int:
        """Read a stream from a position (see :mod:`bide.streams.frames`); returns the number of the subscription.

        Raises:
            TargetNotFoundError: there is no such stream.
            AccessRefusedError: the user may not read it.
            ConnectionLostError: the connection broke, or the stream is not available at the moment.
            BrokerError: it cannot be read here and now.
        """
        subscription, number = next(self._subscriptions), next(self._numbers)
        self._send(frames.subscribe(number, subscription, stream, position, credit))
        self._check(frames.SUBSCRIBE, self._answer(frames.SUBSCRIBE, number), stream)
        return subscription

    def unsubscribe(self, subscription: int) -> None:
        """Read it no more. What had been sent is dropped."""
        self._ask(frames.UNSUBSCRIBE, struct.pack(">B", subscription))
        self._chunks = deque(one for one in self._chunks if one[0] != subscription)

    def credit(self, subscription: int, chunks: int) -> None:
        """Let the broker send this many more chunks."""
        self._send(frames.credit(subscription, chunks))

    def barrier(self) -> None:
        """Wait until the broker has done all that we asked for before.

        It handles the frames of a connection one after the other, and a new subscription is sent what there is
        before the next frame is looked at: after this, every chunk that was there has come.
        """
        self.whereabouts([])

    def received(self, subscription: int) -> Chunk | None:
        """A chunk that has come already, or None."""
        for index, (of, chunk) in enumerate(self._chunks):
            if of == subscription:
                del self._chunks[index]
                return chunk
        return None

    def next_chunk(self, subscription: int, seconds: float) -> Chunk | None:
        """The next chunk; None if none comes within this many seconds.

        Raises:
            ConnectionLostError: the connection broke, or the stream is not here any more.
            ProtocolError: a frame or chunk is not what it should be.
        """
        deadline = time.monotonic() + seconds
        while (chunk := self.received(subscription)) is None:
            try:
                self._dispatch(*self._frame(deadline))
            except TimeoutError:
                return None
        return chunk

    def beat(self) -> None:
        """Show that we are alive, where it is time to; call it now and then while reading."""
        if self._heartbeat and time.monotonic() - self._sent_at > self._heartbeat / 2:
            self._send(frames.frame(frames.HEARTBEAT))

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout

    def _ask(self, key: int, *parts: bytes, stream: str = "") -> Fields:
        number = next(self._numbers)
        self._send(frames.request(key, number, *parts))
        fields = self._answer(key, number)
        self._check(key, fields, stream)
        return fields

    def _answer(self, key: int, number: int) -> Fields:
        deadline = self._deadline()
        while True:
            try:
                got, fields = self._frame(deadline)
            except TimeoutError:
                raise ConnectionLostError(
                    f"the broker at {self._place} did not answer within {self.timeout:g} s"
                ) from None
            # RabbitMQ 3.10 answers a question of partitions without the bit of a response.
            if got == key | frames.RESPONSE or got == key == frames.PARTITIONS:
                if (answered := fields.uint32()) == number:
                    return fields
                raise ProtocolError(f"the broker at {self._place} answered request {answered}, not {number}")
            self._dispatch(got, fields)

    def _check(self, key: int, fields: Fields, stream: str) -> None:
        code = fields.uint16()
        if code == frames.OK:
            return
        what = f"stream {stream!r}" if stream else f"request {key:#04x}"
        reason = f"the broker at {self._place} refuses: {what}: {frames.CODES.get(code, f'code {code:#04x}')}"
        if code in frames.AUTHENTICATION_FAILURES:
            raise AuthenticationError(reason)
        if code == frames.VHOST_FAILURE:
            raise VirtualHostError(reason)
        if code == frames.NO_SUCH_STREAM:
            raise TargetNotFoundError(reason)
        if code == frames.ACCESS_REFUSED:
            raise AccessRefusedError(reason)
        if code == frames.STREAM_NOT_AVAILABLE:
            # Its leader is being elected, or is just starting: it may be asked again.
            raise ConnectionLostError(reason)
        raise BrokerError(reason)

    def _dispatch(self, key: int, fields: Fields) -> None:
        """Handle a frame that answers nothing."""
        match key:
            case frames.DELIVER:
                subscription = fields.uint8()
                self._chunks.append((subscription, Chunk.read(*fields.rest)))
            case frames.HEARTBEAT:
                self.beat()
            case frames.METADATA_UPDATE:
                code, stream = fields.uint16(), fields.string()
                raise ConnectionLostError(
                    f"stream {stream!r} is gone from {self._place}: {frames.CODES.get(code, code)}"
                )
            case frames.CLOSE:
                fields.skip(6)  # a request's number, and a code
                raise ConnectionLostError(f"the broker at {self._place} closed the connection: {fields.string()}")
            case _ if key == frames.CREDIT | frames.RESPONSE:
                code = fields.uint16()
                raise ConnectionLostError(f"the subscription at {self._place} is gone: {frames.CODES.get(code, code)}")
            case _ if key == frames.TUNE:
                raise ProtocolError(f"the broker at {self._place} changes the limits of an open connection")
            case _:
                log.debug("ignored a frame %#06x from %s", key, self._place)

    def _send(self, data: bytes) -> None:
        try:
            self._socket.settimeout(self.timeout)
            self._socket.sendall(data)
        except OSError as error:
            raise ConnectionLostError(f"the connection to {self._place} broke: {error}") from error
        self._sent_at = time.monotonic()

    def _frame(self, deadline: float) -> tuple[int, Fields]:
        """The next frame: its key and what follows.

        Raises:
            TimeoutError: it did not come whole before the deadline; what has come is kept.
        """
        self._fill(4, deadline)
        size = int.from_bytes(self._buffer[:4])
        if not 4 <= size <= _MAX_FRAME:
            raise ProtocolError(
                f"the peer at {self._place} sent a frame of {size:,} bytes: does it speak the protocol?"
            )
        self._fill(4 + size, deadline)
        data = bytes(memoryview(self._buffer)[4 : 4 + size])
        del self._buffer[: 4 + size]
        fields = Fields(data)
        key, _version = fields.uint16(), fields.uint16()
        return key, fields

    def _fill(self, wanted: int, deadline: float) -> None:
        """Receive until this many bytes are there."""
        while (have := len(self._buffer)) < wanted:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            try:
                self._socket.settimeout(left)
                data = self._socket.recv(max(_RECEIVE, wanted - have))
            except TimeoutError:
                raise TimeoutError from None
            except OSError as error:
                raise ConnectionLostError(f"the connection to {self._place} broke: {error}") from error
            if not data:
                raise ConnectionLostError(f"the broker at {self._place} closed the connection")
            self._buffer += data
