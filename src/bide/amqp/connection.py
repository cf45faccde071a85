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
"""Bytes that no frame has, except one from a peer that does not speak AMQP; the headers of a message that was
dead-lettered often may well be over the agreed frame size."""

_FRAME: Final = struct.Struct(">BHI")
_TAG_AND_BITS: Final = struct.Struct(">QB")
_ACK: Final = b"\x00\x3c\x00\x50"
_NACK: Final = b"\x00\x3c\x00\x78"
_CLOSE_GRACE: Final = 5.0


class Connection(asyncio.Protocol):
    """One connection. Open it with :meth:`open`; it never reconnects (the client does).

    Attributes:
        server: the server's properties, as it sent them.
        release: RabbitMQ's release, such as ``(4, 3, 6)``.
        frame_max: the largest frame, in bytes.
        opened: done when the broker let us in, or failed with the reason why not.
        lost: done when the connection is no longer usable; its result says why.
        heartbeat: knows when bytes came last.
        answers: how many confirms and replies came, heartbeats and answers to :meth:`probe` not counted.
        trouble: what is known of a node that answers nothing or confirms nothing, for errors; empty while all is well.
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
        self._closed: asyncio.Future[None] = self.loop.create_future()
        self._ended: asyncio.Future[None] = self.loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._writer = Writer(self.loop)
        self.heartbeat = Heartbeat(self.loop, self._writer, self._on_silence)
        self._channels: dict[int, Channel] = {}
        self._abort_handle: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, url: BrokerUrl, *, last: str = "") -> Connection:
        """Connect to the first host that lets us in; they are tried in random order unless the URL says otherwise.

        Args:
            last: address of a host to try only when no other lets us in.

        Raises: where none does, what the most telling of them said.
            BrokerUnreachableError: none answers; TlsError where TLS was the reason.
            AuthenticationError: wrong user or password.
            VirtualHostError: the virtual host is unknown or closed to this user.
            ProtocolError: the peer does not speak AMQP 0-9-1.
            InvalidInputError: the name of the virtual host is too long.
        """
        codec.short_string(url.vhost)  # too long a name should fail here, not when it is its turn to be sent
        failures: list[BrokerError] = []
        hosts = random.sample(url.hosts, len(url.hosts)) if url.shuffle else list(url.hosts)
        for host, port in sorted(hosts, key=lambda one: address_of(*one) == last):
            try:
                return await cls._open_one(url, host, port)
            except BrokerError as error:
                # Also a refusal: a node that shuts down, or has left the cluster, says nothing about the others.
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
                f"the broker at {address} did not answer within {seconds:g} s: is it RabbitMQ, and is it up?"
            ) from error
        except ssl.SSLError as error:
            raise TlsError(f"TLS with {address} failed: {tls_reason(error)}") from error
        except OSError as error:
            raise BrokerUnreachableError(
                f"no broker answers at {address} ({error.strerror or error}): start it, or name another with "
                "--url or BIDE_URL"
            ) from error
        finally:
            if connection is not None and not connection.is_open:
                connection.give_up(BrokerUnreachableError(f"the broker at {address} did not open the connection"))

    def now(self) -> datetime:
        """The time in UTC, in which due times are given."""
        return self.url.transport.now()

    def monotonic(self) -> float:
        """Seconds by a clock that cannot be set: the rest of a delay is counted by it when a message is repeated."""
        return self.url.transport.monotonic()

    @property
    def _is_open(self) -> bool:
        return self.opened.done() and not self.opened.cancelled() and self.opened.exception() is None

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._is_open and not self.lost.done()

    @property
    def blocked_by(self) -> str | None:
        """Why the broker takes no publishes at the moment (an alarm), or None."""
        return self._writer.blocked_by

    @property
    def is_writable(self) -> bool:
        """Whether the broker and the socket take more at once; what is sent all the same waits in memory."""
        return self._writer.is_writable

    def when_writable(self, callback: Callable[[], None]) -> None:
        """Call back once, as soon as the broker and the socket take more, or when the connection broke."""
        self._writer.when_writable(callback)

    async def writable(self) -> None:
        """Wait until the broker and the socket take more: backpressure for publishers.

        Raises:
            BideError: the connection broke.
        """
        await self._writer.writable()
        if self.lost.done():
            raise self.lost.result()

    async def drained(self) -> None:
        """Wait until the socket takes more, whether or not the broker takes publishes.

        Raises:
            BideError: the connection broke.
        """
        await self._writer.drained()
        if self.lost.done():
            raise self.lost.result()

    async def channel(self, *, confirms: bool = False) -> Channel:
        """Open a channel; ``async with`` closes it. If all numbers are taken, wait for one that is being closed.

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
            # A caller that was cancelled must not leave it open.
            channel.abandon()
            raise
        return channel

    @property
    def is_waiting(self) -> bool:
        """Whether a call waits for its reply, or a message for its confirm."""
        return any(channel.is_waiting for channel in self._channels.values())

    def probe(self) -> None:
        """Ask the node for a sign of life: what it answers shows in ``heartbeat.received_at``."""
        number = self.channel_max
        # An earlier probe that is not answered yet serves as well.
        if number not in self._channels:
            channel = self._channels[number] = Channel(self, number)
            channel.probe()

    async def close(self) -> None:
        """Close it, with the handshake that lets the broker see a clean end, and wait until the socket is closed."""
        if self._transport is None:
            return
        try:
            await asyncio.gather(*(channel.settle_up() for channel in self._channels.values()))
            if not self.lost.done():
                self.send(codec.frame(codec.METHOD, 0, close_connection()))
                async with asyncio.timeout(_CLOSE_GRACE):
                    await asyncio.shield(self._closed)
        except TimeoutError:
            log.debug("the broker at %s did not answer the closing of the connection", self.address)
        finally:
            self.give_up(ClosedError("the connection was closed"), politely=self._closed.done())
        await asyncio.shield(self._ended)

    def abort(self, reason: str) -> None:
        """Give the connection up because the peer broke the rules."""
        self.give_up(ProtocolError(f"the connection to {self.address} was given up: {reason}"))

    def forget(self, number: int) -> None:
        """The number of a closed channel is free again."""
        self._channels.pop(number, None)

    # -- output

    def send(self, *frames: bytes) -> None:
        """Queue frames for the socket."""
        self._writer.send(*frames)

    def hold(self) -> None:
        """Read no more for a moment, so that the broker sends no more. Heartbeats need it to be short."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def go_on(self) -> None:
        """Read again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The socket's buffer is full."""
        self._writer.pause()

    def resume_writing(self) -> None:
        """The socket's buffer has room again."""
        self._writer.resume()

    # -- input

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected: begin the handshake."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._writer.connect(transport)
        self.send(codec.PROTOCOL_HEADER)

    def connection_lost(self, error: Exception | None) -> None:
        """The socket is gone."""
        if self._abort_handle is not None:
            self._abort_handle.cancel()
        if not self._ended.done():
            self._ended.set_result(None)
        self.give_up(lost_error(error, self.url, self.address, is_open=self._is_open))

    def data_received(self, data: bytes) -> None:
        """Bytes came in."""
        self.heartbeat.received_at = self.loop.time()
        # What is whole when it comes, as nearly everything is, is not copied before it is read.
        kept = self._buffer
        buffer: bytes | bytearray = data
        if kept:
            kept += data
            buffer = kept
        place, end = 0, len(buffer)
        try:
            while end - place >= codec.FRAME_OVERHEAD:
                kind, channel, size = _FRAME.unpack_from(buffer, place)
                stop = place + codec.FRAME_OVERHEAD + size
                if kind not in (codec.METHOD, codec.HEADER, codec.BODY, codec.HEARTBEAT) or size > MAX_FRAME:
                    self.abort(f"it sent {bytes(buffer[place : place + 8])!r}, which is not AMQP 0-9-1")
                    return
                if stop > end:
                    break
                if buffer[stop - 1] != codec.FRAME_END:
                    self.abort("a frame does not end as frames do")
                    return
                self._on_frame(kind, channel, bytes(buffer[place:stop]))
                place = stop
                if self.lost.done():
                    return
        except (ValueError, struct.error) as error:
            self.abort(f"it sent something that cannot be read ({error})")
        finally:
            if kept:
                del kept[:place]
            elif place < end:
                kept += data[place:]

    def _on_frame(self, kind: int, number: int, frame: bytes) -> None:
        if kind == codec.HEARTBEAT:
            return
        if number == 0:
            self._on_connection_method(decoding.method(frame))
            return
        channel = self._channels.get(number)
        if channel is None:
            # What was under way when we closed the channel.
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
                log.warning("the broker at %s takes no publishes: %s", self.address, self.blocked_by)
            case commands.Connection.Unblocked():
                self._writer.block(None)
                log.info("the broker at %s takes publishes again", self.address)
            case commands.Connection.Close():
                self._on_close(method)
            case commands.Connection.CloseOk():
                if not self._closed.done():
                    self._closed.set_result(None)
            case _:
                self.abort(f"an unexpected {method.name} came on channel 0")

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
        """End everything, with this reason.

        Args:
            politely: let the socket send what is still queued. Else it is cut: a peer that does not read any more would
                keep it open for ever.
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
            # It is not awaited when the time limit ended the opening.
            self.opened.exception()
        if not self._closed.done():
            self._closed.set_result(None)
        if self._transport is None:
            return
        if politely:
            self._transport.close()
            self._abort_handle = self.loop.call_later(_CLOSE_GRACE, self._transport.abort)
        else:
            self._transport.abort()
