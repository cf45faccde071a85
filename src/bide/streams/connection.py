"""Blocking connection to a broker over the stream protocol."""

from __future__ import annotations

import itertools
import re
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Final, NoReturn, Self

from bide.amqp.handshake import release_of, tls_reason
from bide.amqp.tls_warnings import warn_about_broker
from bide.amqp.url import BrokerUrl
from bide.errors import (
    AuthenticationError,
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
from bide.streams.frames import Fields, StreamMetadata

log = logger(__name__)

_MAX_FRAME: Final = 1 << 28
"""Limit on the size of a frame in bytes; only a peer with another protocol exceeds it. A chunk is one frame, and the
negotiated frame size does not apply to it."""

_RECEIVE_SIZE: Final = 1 << 18

_PUBLISHER: Final = 1
"""The number of the publisher of a connection, which has at most one."""


class StreamConnection:
    """One connection, which is never reopened: its user opens another one and continues there.

    Attributes:
        address: host and port.
        advertised: host and port that the node advertises.
        release: the release of RabbitMQ, such as ``(4, 3, 6)``.
        timeout: how long the broker may take to answer, in seconds.
        max_frame: the largest frame that the broker accepts, in bytes; 0 without a limit.
    """

    def __init__(self, url: BrokerUrl, address: tuple[str, int]) -> None:
        """Connect, log in and open the virtual host.

        Raises:
            BrokerUnreachableError: no broker answers at this address, or the peer does not speak the stream protocol.
            TlsError: the TLS handshake failed.
            AuthenticationError: the user or the password is wrong, or the broker does not offer this kind of login.
            VirtualHostError: the virtual host does not exist, or this user may not access it.
        """
        self.address = address
        self.release: tuple[int, ...] = ()
        self.max_frame = 0
        self.advertised = address
        self.timeout = url.timeout.total_seconds()
        self._correlation_ids = itertools.count(1)
        self._subscriptions = itertools.cycle(range(256))
        self._buffer = bytearray()
        self._chunks: deque[tuple[int, Chunk]] = deque()
        self._unconfirmed: set[int] = set()
        self._peer = f"{address[0]}:{address[1]}"
        self._heartbeat = 0
        self._sent_at = time.monotonic()
        try:
            self._socket = self._connect(url)
        except ssl.SSLError as error:
            raise TlsError(f"TLS with {self._peer} failed: {tls_reason(error)}") from error
        except OSError as error:
            raise BrokerUnreachableError(
                f"no broker answers the stream protocol at {self._peer} ({error.strerror or error}). Check that the "
                "plugin rabbitmq_stream is enabled and listens on this port. bide.admin.taps.read_status(...) reports "
                "its port; give it with stream_port=... or BIDE_STREAM_PORT, and in Spark with the option streamPort"
            ) from error
        try:
            self._log_in(url)
        except (ConnectionLostError, ProtocolError) as error:
            self.close()
            raise BrokerUnreachableError(
                f"{self._peer} answers, but does not open a connection of the stream protocol ({error}). "
                "Check that it is the port of the plugin rabbitmq_stream"
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

    def _log_in(self, url: BrokerUrl) -> None:
        about = {"product": "bide", "platform": "Python", "connection_name": url.name}
        self.release = release_of(self._ask(frames.PEER_PROPERTIES, frames.properties(about)).properties())
        mechanism, secret = ("EXTERNAL", b"") if url.external else ("PLAIN", f"\0{url.user}\0{url.password}".encode())
        offered = self._ask(frames.SASL_HANDSHAKE).strings()
        if mechanism not in offered:
            raise AuthenticationError(
                f"the broker at {self._peer} offers {', '.join(offered) or 'no mechanism'} to log in, not {mechanism}: "
                "add it to auth_mechanisms of the broker"
            )
        warn_about_broker(url, self._socket)
        answer = struct.pack(">i", len(secret)) + secret
        try:
            self._ask(frames.SASL_AUTHENTICATE, frames.string(mechanism), answer)
        except AuthenticationError:
            what = "the name in the client certificate" if url.external else f"user {url.user!r} with this password"
            raise AuthenticationError(f"the broker at {self._peer} does not accept {what}") from None
        key, tune = self._receive_frame(self._deadline())
        if key != frames.TUNE:
            raise ProtocolError(f"the broker at {self._peer} sent frame {key:#06x} instead of Tune")
        self.max_frame, heartbeat = tune.uint32(), tune.uint32()
        # The broker's interval, 60 s by default, instead of the URL's 10 s: a reader sends heartbeats only while it
        # reads, and its caller may take long with a chunk.
        self._heartbeat = heartbeat if url.heartbeat else 0
        self._send(frames.frame(frames.TUNE, struct.pack(">II", self.max_frame, self._heartbeat)))
        try:
            node = self._ask(frames.OPEN, frames.string(url.vhost)).properties()
        except VirtualHostError:
            raise VirtualHostError(
                f"the virtual host {url.vhost!r} does not exist at {self._peer}, or user {url.user!r} may not access it"
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
        """Close the socket. A Close frame is not needed, because the broker cleans up when the socket is closed."""
        self._socket.close()

    def metadata(self, streams: list[str]) -> dict[str, StreamMetadata]:
        """Leader and replicas of these streams, by name; the code is not ``OK`` if a stream does not exist."""
        correlation_id = next(self._correlation_ids)
        self._send(frames.request(frames.METADATA, correlation_id, frames.strings(streams)))
        return frames.metadata(self._receive_response(frames.METADATA, correlation_id))

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
        """The counters of a stream: ``first_chunk_id`` and ``committed_chunk_id``, which are -1 if it has no chunk.

        RabbitMQ supports this request since 3.11.
        """
        return self._ask(frames.STREAM_STATS, frames.string(stream), stream=stream).statistics()

    def subscribe(self, stream: str, position: bytes, *, credit: int) -> int:
        """Subscribe to a stream from a position (see :mod:`bide.streams.frames`); returns the id of the subscription.

        Raises:
            TargetNotFoundError: the stream does not exist.
            AccessRefusedError: the user may not read the stream.
            ConnectionLostError: the connection broke, or the stream is not available at the moment.
            BrokerError: the broker refused for another reason.
        """
        subscription, correlation_id = next(self._subscriptions), next(self._correlation_ids)
        self._send(frames.subscribe(correlation_id, subscription, stream, position, credit))
        self._check(frames.SUBSCRIBE, self._receive_response(frames.SUBSCRIBE, correlation_id), stream)
        return subscription

    def unsubscribe(self, subscription: int) -> None:
        """End a subscription, and drop its chunks that have not been taken."""
        self._ask(frames.UNSUBSCRIBE, struct.pack(">B", subscription))
        self._chunks = deque(one for one in self._chunks if one[0] != subscription)

    def credit(self, subscription: int, chunks: int) -> None:
        """Let the broker send this many more chunks."""
        self._send(frames.credit(subscription, chunks))

    def barrier(self) -> None:
        """Wait until the broker has handled every frame that was sent before.

        The broker handles the frames of a connection in order, and sends a new subscription its chunks before it reads
        the next frame. So after this call, the chunks that existed have been received, up to the subscription's credit.
        """
        self.metadata([])

    def take_received(self, subscription: int) -> Chunk | None:
        """Take the first chunk that has been received for a subscription; None if there is none."""
        for index, (receiver, chunk) in enumerate(self._chunks):
            if receiver == subscription:
                del self._chunks[index]
                return chunk
        return None

    def next_chunk(self, subscription: int, seconds: float) -> Chunk | None:
        """Take the next chunk; None if the broker sends none within this many seconds.

        Raises:
            ConnectionLostError: the connection broke, or this node does not have the stream any more.
            ProtocolError: the broker sent an invalid frame or chunk.
        """
        deadline = time.monotonic() + seconds
        while (chunk := self.take_received(subscription)) is None:
            try:
                self._dispatch(*self._receive_frame(deadline))
            except TimeoutError:
                return None
        return chunk

    def declare_publisher(self, stream: str, name: str) -> None:
        """Declare the publisher of this connection.

        Raises:
            BrokerError: as for :meth:`subscribe`.
        """
        names = frames.string(name), frames.string(stream)
        self._ask(frames.DECLARE_PUBLISHER, struct.pack(">B", _PUBLISHER), *names, stream=stream)

    def publisher_sequence(self, stream: str, name: str) -> int:
        """The last publishing id that the stream has from a publisher of this name; 0 if it has none."""
        names = frames.string(name), frames.string(stream)
        return self._ask(frames.QUERY_PUBLISHER_SEQUENCE, *names, stream=stream).int64()

    def publish(self, first: int, messages: Sequence[bytes], seconds: float) -> None:
        """Publish messages in one frame, without waiting for confirms.

        Args:
            first: the publishing id of the first message; those of the others follow it.
            messages: encoded messages.
            seconds: how long the broker may take to accept the frame.

        Raises:
            ConnectionLostError: the connection broke.
        """
        self._unconfirmed.update(range(first, first + len(messages)))
        self._send(frames.publish(_PUBLISHER, first, messages), seconds)

    def wait_for_confirms(self, first: int, count: int, seconds: float) -> None:
        """Wait until these messages are confirmed.

        Args:
            first: the publishing id of the first one; those of the others follow it.
            seconds: how long the broker may take.

        Raises:
            ConnectionLostError: the connection broke, the broker did not confirm in time, or the leader has moved.
            BrokerError: the broker refused.
        """
        wanted = range(first, first + count)
        deadline = time.monotonic() + seconds
        while not self._unconfirmed.isdisjoint(wanted):
            try:
                self._dispatch(*self._receive_frame(deadline))
            except TimeoutError:
                missing = len(self._unconfirmed.intersection(wanted))
                raise ConnectionLostError(
                    f"the broker at {self._peer} did not confirm {missing:,} of {count:,} messages within {seconds:g} s"
                ) from None

    def send_heartbeat(self) -> None:
        """Send a heartbeat if one is due; call this regularly while reading."""
        if self._heartbeat and time.monotonic() - self._sent_at > self._heartbeat / 2:
            self._send(frames.frame(frames.HEARTBEAT))

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout

    def _ask(self, key: int, *parts: bytes, stream: str = "") -> Fields:
        correlation_id = next(self._correlation_ids)
        self._send(frames.request(key, correlation_id, *parts))
        fields = self._receive_response(key, correlation_id)
        self._check(key, fields, stream)
        return fields

    def _receive_response(self, key: int, correlation_id: int) -> Fields:
        deadline = self._deadline()
        while True:
            try:
                received, fields = self._receive_frame(deadline)
            except TimeoutError:
                raise ConnectionLostError(
                    f"the broker at {self._peer} did not answer within {self.timeout:g} s"
                ) from None
            # RabbitMQ 3.10 answers a Partitions request without the bit of a response.
            if received == key | frames.RESPONSE or received == key == frames.PARTITIONS:
                if (answered := fields.uint32()) == correlation_id:
                    return fields
                raise ProtocolError(f"the broker at {self._peer} answered request {answered}, not {correlation_id}")
            self._dispatch(received, fields)

    def _check(self, key: int, fields: Fields, stream: str) -> None:
        code = fields.uint16()
        if code != frames.OK:
            self._refuse(code, f"stream {stream!r}" if stream else f"request {key:#04x}")

    def _refuse(self, code: int, what: str) -> NoReturn:
        raise frames.refusal(code, f"the broker at {self._peer} refused {what}")

    def _dispatch(self, key: int, fields: Fields) -> None:
        """Handle a frame that is not a response."""
        match key:
            case frames.DELIVER:
                subscription = fields.uint8()
                self._chunks.append((subscription, Chunk.read(*fields.rest)))
            case frames.PUBLISH_CONFIRM:
                fields.skip(1)  # the number of the publisher
                self._unconfirmed.difference_update(fields.int64s())
            case frames.PUBLISH_ERROR:
                fields.skip(1)
                refused = [(fields.int64(), fields.uint16()) for _ in range(fields.uint32())]
                self._refuse(refused[0][1], f"{len(refused):,} messages")
            case frames.HEARTBEAT:
                self.send_heartbeat()
            case frames.METADATA_UPDATE:
                code, stream = fields.uint16(), fields.string()
                raise ConnectionLostError(
                    f"stream {stream!r} is not available on {self._peer} any more: {frames.CODES.get(code, code)}"
                )
            case frames.CLOSE:
                fields.skip(6)  # correlation id and code
                raise ConnectionLostError(f"the broker at {self._peer} closed the connection: {fields.string()}")
            case _ if key == frames.CREDIT | frames.RESPONSE:
                code = fields.uint16()
                raise ConnectionLostError(
                    f"the broker at {self._peer} ended the subscription: {frames.CODES.get(code, code)}"
                )
            case _ if key == frames.TUNE:
                raise ProtocolError(f"the broker at {self._peer} sent Tune on an open connection")
            case _:
                log.debug("ignored frame %#06x from %s", key, self._peer)

    def _send(self, data: bytes, seconds: float | None = None) -> None:
        try:
            self._socket.settimeout(self.timeout if seconds is None else seconds)
            self._socket.sendall(data)
        except OSError as error:
            raise ConnectionLostError(f"the connection to {self._peer} broke: {error}") from error
        self._sent_at = time.monotonic()

    def _receive_frame(self, deadline: float) -> tuple[int, Fields]:
        """Receive the next frame: its key and its fields.

        Raises:
            TimeoutError: the frame was not complete at the deadline; the next call continues with it.
        """
        self._fill(4, deadline)
        size = int.from_bytes(self._buffer[:4])
        if not 4 <= size <= _MAX_FRAME:
            raise ProtocolError(
                f"the peer at {self._peer} sent a frame of {size:,} bytes, where 4 to {_MAX_FRAME:,} are expected; it "
                "seems to speak another protocol"
            )
        self._fill(4 + size, deadline)
        data = bytes(memoryview(self._buffer)[4 : 4 + size])
        del self._buffer[: 4 + size]
        fields = Fields(data)
        key, _version = fields.uint16(), fields.uint16()
        return key, fields

    def _fill(self, wanted: int, deadline: float) -> None:
        """Receive until the buffer holds this many bytes."""
        while (size := len(self._buffer)) < wanted:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            try:
                self._socket.settimeout(remaining)
                data = self._socket.recv(max(_RECEIVE_SIZE, wanted - size))
            except TimeoutError:
                raise TimeoutError from None
            except OSError as error:
                raise ConnectionLostError(f"the connection to {self._peer} broke: {error}") from error
            if not data:
                raise ConnectionLostError(f"the broker at {self._peer} closed the connection")
            self._buffer += data
