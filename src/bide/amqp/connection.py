"""A connection to a broker: handshake, heartbeats, frames in and out."""

from __future__ import annotations

import asyncio
import random
import ssl
import struct
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

from pamqp import commands

from bide.amqp import codec, decoding, reply_codes
from bide.amqp.channel import Channel
from bide.amqp.handshake import close_connection, lost_error, open_vhost, release_of, start_ok, tls_reason, tune_ok
from bide.amqp.heartbeat import Heartbeat
from bide.amqp.url import BrokerUrl, address_of
from bide.amqp.writer import Writer
from bide.errors import (
    BideError,
    BrokerError,
    BrokerUnreachableError,
    ClosedError,
    ConnectionLostError,
    ProtocolError,
    TlsError,
)
from bide.runtime.logs import logger

log = logger(__name__)

MAX_FRAME: Final = 1 << 24
"""The largest frame accepted, in bytes. A larger size means that the peer does not speak AMQP. The limit is above the
negotiated frame size, because a message that was dead-lettered many times can have headers larger than that."""

_FRAME: Final = struct.Struct(">BHI")
_TAG_AND_BITS: Final = struct.Struct(">QB")
_ACK: Final = b"\x00\x3c\x00\x50"
_NACK: Final = b"\x00\x3c\x00\x78"
_CLOSE_TIMEOUT: Final = 5.0  # seconds, for the broker's answer and then for the socket


class Connection(asyncio.Protocol):
    """One connection. Open it with :meth:`open`. It never reconnects; the client does.

    Attributes:
        server: the server's properties, as received.
        release: RabbitMQ's release, such as ``(4, 3, 6)``.
        frame_max: the largest frame to send, in bytes.
        opened: a future, done when the broker has opened the connection, or failed with the reason.
        lost: a future, done when the connection is no longer usable; its result is the reason.
        heartbeat: the heartbeats, and when bytes were last received.
        answers: the number of confirms and replies received, without heartbeats and answers to :meth:`probe`.
        trouble: for errors, a description of a node that does not answer or confirm; empty otherwise.
    """

    def __init__(self, url: BrokerUrl, address: str) -> None:
        self.url = url
        self.address = address
        self.loop = asyncio.get_running_loop()
        self.server: Mapping[str, Any] = {}
        self.release: tuple[int, ...] = ()
        self.frame_max = 131072
        self.channel_max = 2047
        self.lost: asyncio.Future[BideError] = self.loop.create_future()
        self.opened: asyncio.Future[None] = self.loop.create_future()
        self.answers = 0
        self.trouble = ""
        self._close_answered: asyncio.Future[None] = self.loop.create_future()
        self._socket_closed: asyncio.Future[None] = self.loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._writer = Writer(self.loop)
        self.heartbeat = Heartbeat(self.loop, self._writer, self._on_silence)
        self._channels: dict[int, Channel] = {}
        self._abort_handle: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, url: BrokerUrl, *, last: str = "") -> Connection:
        """Connect to the first host that accepts the client. Hosts are tried in random order unless the URL has
        ``order=given``.

        Args:
            last: the address of a host to try last.

        Raises: if no host accepts, the most specific of their errors.
            BrokerUnreachableError: no host answers; TlsError if TLS is the reason.
            AuthenticationError: wrong user or password.
            VirtualHostError: the virtual host does not exist, or this user may not enter it.
            ProtocolError: the peer does not speak AMQP 0-9-1.
            InvalidInputError: the name of the virtual host is too long.
        """
        codec.short_string(url.vhost)  # so that a name that is too long fails before the handshake
        failures: list[BrokerError] = []
        hosts = random.sample(url.hosts, len(url.hosts)) if url.shuffle else list(url.hosts)
        for host, port in sorted(hosts, key=lambda one: address_of(*one) == last):
            try:
                return await cls._open_one(url, host, port)
            except BrokerError as error:
                # Try the next host after a refusal too: a node that shuts down, or has left the cluster, refuses.
                failures.append(error)
        raise reply_codes.of_hosts(failures)

    @classmethod
    async def _open_one(cls, url: BrokerUrl, host: str, port: int) -> Connection:
        address = address_of(host, port)
        seconds = url.timeout.total_seconds()
        connection: Connection | None = None
        try:
            async with asyncio.timeout(seconds):
                context, loop = url.ssl_context(), asyncio.get_running_loop()
                connect = url.transport.connect
                connection = await connect(lambda: cls(url, address), host, port, loop=loop, context=context)
                await connection.opened
                return connection
        except TimeoutError as error:
            raise BrokerUnreachableError(
                f"the broker at {address} did not answer within {seconds:g} s: check that it is RabbitMQ and running"
            ) from error
        except ssl.SSLError as error:
            raise TlsError(f"TLS with {address} failed: {tls_reason(error)}") from error
        except OSError as error:
            raise BrokerUnreachableError(
                f"no broker answers at {address} ({error.strerror or error}): start it, or name another with "
                "url=... or BIDE_URL"
            ) from error
        finally:
            if connection is not None and not connection.is_open:
                connection.give_up(BrokerUnreachableError(f"the broker at {address} did not open the connection"))

    def now(self) -> datetime:
        """The time in UTC, in which due times are given."""
        return self.url.transport.now()

    def monotonic(self) -> float:
        """Seconds of a monotonic clock. The rest of a delay is counted by it when a message is sent again."""
        return self.url.transport.monotonic()

    @property
    def _is_open(self) -> bool:
        return self.opened.done() and not self.opened.cancelled() and self.opened.exception() is None

    @property
    def is_open(self) -> bool:
        """Whether the connection can be used."""
        return self._is_open and not self.lost.done()

    @property
    def local_port(self) -> int | None:
        """The port of this side, part of the connection's name on the broker; None without a socket."""
        name = None if self._transport is None else self._transport.get_extra_info("sockname")
        return name[1] if name else None

    @property
    def blocked_by(self) -> str | None:
        """Why the broker has blocked publishing (an alarm), or None."""
        return self._writer.blocked_by

    @property
    def is_writable(self) -> bool:
        """Whether broker and socket accept more now. If not, frames that are sent wait in memory."""
        return self._writer.is_writable

    def when_writable(self, callback: Callable[[], None]) -> None:
        """Call back once, as soon as broker and socket accept more, or when the connection is lost."""
        self._writer.when_writable(callback)

    async def writable(self) -> None:
        """Wait until broker and socket accept more: backpressure for publishers.

        Raises:
            BideError: the connection was lost.
        """
        await self._writer.writable()
        if self.lost.done():
            raise self.lost.result()

    async def drained(self) -> None:
        """Wait until the socket accepts more, even while the broker has blocked publishing.

        Raises:
            BideError: the connection was lost.
        """
        await self._writer.drained()
        if self.lost.done():
            raise self.lost.result()

    async def channel(self, *, confirms: bool = False) -> Channel:
        """Open a channel; ``async with`` closes it. If all numbers are in use, wait for a channel that is closing.

        Raises:
            BideError: the connection is closed, or has no channel number left.
        """
        # The last number is kept for probes.
        numbers = range(1, self.channel_max)
        while (number := next((one for one in numbers if one not in self._channels), None)) is None:
            if self.lost.done():
                break
            closing = next((one for one in self._channels.values() if not one.is_open and one.number in numbers), None)
            if closing is None:
                raise BrokerError(f"all {len(numbers)} channels of the connection to {self.address} are in use")
            await closing.gone()
        if self.lost.done():
            raise self.lost.result()
        assert number is not None
        channel = Channel(self, number)
        self._channels[number] = channel
        try:
            await channel.open()
            if confirms:
                await channel.confirm_select()
        except BaseException:
            # If the caller was cancelled, the channel must not stay open.
            channel.abandon()
            raise
        return channel

    @property
    def is_waiting(self) -> bool:
        """Whether a call waits for its reply, or a message for its confirm."""
        return any(channel.is_waiting for channel in self._channels.values())

    def probe(self) -> None:
        """Make the node answer: the answer updates ``heartbeat.received_at``."""
        number = self.channel_max
        # A probe that is still unanswered serves as well.
        if number not in self._channels:
            channel = self._channels[number] = Channel(self, number)
            channel.probe()

    async def close(self) -> None:
        """Close the connection with the closing handshake, and wait until the socket is closed."""
        if self._transport is None:
            return
        try:
            await asyncio.gather(*(channel.settle_acks() for channel in self._channels.values()))
            if not self.lost.done():
                self.send(codec.frame(codec.METHOD, 0, close_connection()))
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await asyncio.shield(self._close_answered)
        except TimeoutError:
            log.debug("the broker at %s did not answer the closing of the connection", self.address)
        finally:
            self.give_up(ClosedError("the connection was closed"), politely=self._close_answered.done())
        await asyncio.shield(self._socket_closed)

    def abort(self, reason: str) -> None:
        """Close the connection because the peer broke the protocol."""
        self.give_up(ProtocolError(f"the connection to {self.address} was closed: {reason}"))

    def forget(self, number: int) -> None:
        """Free the number of a closed channel."""
        self._channels.pop(number, None)

    # -- output

    def send(self, *frames: bytes) -> None:
        """Queue frames for the socket."""
        self._writer.send(*frames)

    def pause_reading(self) -> None:
        """Stop reading for a moment, so that the broker stops sending. Keep it shorter than the heartbeat interval."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Hold senders back: the socket's buffer is full."""
        self._writer.pause()

    def resume_writing(self) -> None:
        """Release senders: the socket's buffer has room again."""
        self._writer.resume()

    # -- input

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake: the socket is connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._writer.connect(transport)
        self.send(codec.PROTOCOL_HEADER)

    def connection_lost(self, error: Exception | None) -> None:
        """Close the connection: the socket is closed."""
        if self._abort_handle is not None:
            self._abort_handle.cancel()
        if not self._socket_closed.done():
            self._socket_closed.set_result(None)
        self.give_up(lost_error(error, self.url, self.address, is_open=self._is_open))

    def data_received(self, data: bytes) -> None:
        """Decode received bytes and handle the complete frames."""
        self.heartbeat.received_at = self.loop.time()
        # Nearly all data arrives in complete frames, which are decoded without copying them into the buffer.
        kept = self._buffer
        buffer: bytes | bytearray = data
        if kept:
            kept += data
            buffer = kept
        offset, end = 0, len(buffer)
        try:
            while end - offset >= codec.FRAME_OVERHEAD:
                kind, channel, size = _FRAME.unpack_from(buffer, offset)
                stop = offset + codec.FRAME_OVERHEAD + size
                if kind not in (codec.METHOD, codec.HEADER, codec.BODY, codec.HEARTBEAT) or size > MAX_FRAME:
                    self.abort(f"the peer sent {bytes(buffer[offset : offset + 8])!r}, which is not AMQP 0-9-1")
                    return
                if stop > end:
                    break
                if buffer[stop - 1] != codec.FRAME_END:
                    self.abort("the peer sent a frame without the frame-end octet")
                    return
                self._on_frame(kind, channel, bytes(buffer[offset:stop]))
                offset = stop
                if self.lost.done():
                    return
        except (ValueError, struct.error) as error:
            self.abort(f"the peer sent a frame that cannot be decoded ({error})")
        finally:
            if kept:
                del kept[:offset]
            elif offset < end:
                kept += data[offset:]

    def _on_frame(self, kind: int, number: int, frame: bytes) -> None:
        if kind == codec.HEARTBEAT:
            return
        if number == 0:
            self._on_connection_method(decoding.method(frame))
            return
        channel = self._channels.get(number)
        if channel is None:
            # The broker sent this frame before it read that the channel was closed: ignore the frame.
            return
        if channel.is_open:
            self.answers += 1
        if kind == codec.BODY:
            channel.on_body(frame[7:-1])
        elif kind == codec.HEADER:
            (size,) = struct.unpack_from(">Q", frame, 11)
            channel.on_header(size, decoding.Properties(frame))
        elif (index := frame[7:11]) == _ACK or index == _NACK:
            tag, flags = _TAG_AND_BITS.unpack_from(frame, 11)
            channel.confirms.settle(tag, multiple=bool(flags & 1), refused=index == _NACK)
        elif (message := decoding.announcement(frame)) is not None:
            channel.on_message(message)
        else:
            channel.on_method(decoding.method(frame))

    def _on_connection_method(self, method: Any) -> None:
        match method:
            case commands.Connection.Start():
                self._on_start(method)
            case commands.Connection.Tune():
                self._on_tune(method)
            case commands.Connection.OpenOk():
                if not self.opened.done():
                    self.opened.set_result(None)
            case commands.Connection.Blocked():
                self._writer.block(method.reason or "an alarm")
                log.warning("the broker at %s blocks publishing: %s", self.address, self.blocked_by)
            case commands.Connection.Unblocked():
                self._writer.block(None)
                log.info("the broker at %s accepts publishes again", self.address)
            case commands.Connection.Close():
                self._on_close(method)
            case commands.Connection.CloseOk():
                if not self._close_answered.done():
                    self._close_answered.set_result(None)
            case _:
                self.abort(f"the broker sent an unexpected {method.name} on channel 0")

    def _on_start(self, method: Any) -> None:
        self.server = dict(method.server_properties or {})
        self.release = release_of(self.server)
        try:
            self.send(codec.frame(codec.METHOD, 0, start_ok(self.url, method.mechanisms or "", self._transport)))
        except BideError as error:
            self.give_up(error)

    def _on_tune(self, method: Any) -> None:
        self.channel_max = method.channel_max or 65535
        self.frame_max = min(method.frame_max or self.frame_max, MAX_FRAME)
        theirs, ours = method.heartbeat or 0, self.url.heartbeat
        heartbeat = min(theirs, ours) if theirs and ours else ours
        self.send(
            codec.frame(codec.METHOD, 0, tune_ok(self.channel_max, self.frame_max, heartbeat)),
            codec.frame(codec.METHOD, 0, open_vhost(self.url.vhost)),
        )
        self.heartbeat.start(heartbeat)

    def _on_silence(self, seconds: float) -> None:
        self.give_up(ConnectionLostError(f"the broker at {self.address} has been silent for {seconds:.0f} s"))

    def _on_close(self, method: Any) -> None:
        self.send(codec.frame(codec.METHOD, 0, codec.method(10, 51)))
        code, text = method.reply_code or 0, method.reply_text or ""
        self.give_up(
            reply_codes.connection_error(code, text)
            if self._is_open
            else reply_codes.handshake_error(
                code, text, user=self.url.user, vhost=self.url.vhost, address=self.address, external=self.url.external
            ),
            politely=True,
        )

    def give_up(self, error: BideError, *, politely: bool = False) -> None:
        """Close the connection: all channels, calls and publishes fail with this error.

        Args:
            politely: let the socket send what is still queued. Otherwise the socket is aborted at once, because a peer
                that no longer reads would keep it open forever.
        """
        if self.lost.done():
            return
        self.lost.set_result(error)
        self.heartbeat.stop()
        self._writer.close()
        for channel in list(self._channels.values()):
            channel.fail(error)
        self._channels.clear()
        if not self.opened.done():
            self.opened.set_exception(error)
            # Retrieve the exception: opened is not awaited if the timeout ended the opening.
            self.opened.exception()
        if not self._close_answered.done():
            self._close_answered.set_result(None)
        if self._transport is None:
            return
        if politely:
            self._transport.close()
            self._abort_handle = self.loop.call_later(_CLOSE_TIMEOUT, self._transport.abort)
        else:
            self._transport.abort()
