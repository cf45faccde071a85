"""Streams as logs: first and last offset, and the messages between two offsets.

All is asked of the leader of a stream: a replica may be behind it, and drops old messages at another time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeVar

from bide.amqp import reply_codes
from bide.amqp.url import BrokerUrl
from bide.errors import (
    BrokerError,
    BrokerUnreachableError,
    ConnectionLostError,
    OffsetsLostError,
    ProtocolError,
    TargetNotFoundError,
)
from bide.runtime.backoff import Backoff
from bide.runtime.logs import logger
from bide.streams import frames
from bide.streams.chunk import Chunk
from bide.streams.connection import StreamConnection

log = logger(__name__)

DEFAULT_PORT: Final = 5552
DEFAULT_TLS_PORT: Final = 5551

WAY_OUT_OF_GAP: Final = "Read what is left with failOnDataLoss=false, or begin anew with another checkpoint"
"""What the error advises: a command that has other names for it replaces this."""

_STATISTICS_SINCE: Final = (3, 11)
_CHUNKS_AHEAD: Final = 8
_PATIENCE: Final = 60.0
"""Seconds for which nothing may come before that is an error: enough for a node with much in it to start again."""

_Question = Callable[[StreamConnection, str], int]
_Answer = TypeVar("_Answer")

_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where streams are read.

    Attributes:
        url: hosts, user, virtual host and TLS settings; its ports are those of AMQP.
        port: the port of the stream protocol on each of these hosts.
    """

    url: BrokerUrl
    port: int

    @classmethod
    def of(cls, url: str, port: int | None = None) -> Address:
        """Read a broker's URL; the port is by default the one of the stream protocol, with or without TLS.

        Raises:
            InvalidUrlError: the URL cannot be read.
        """
        parsed = BrokerUrl.parse(url)
        return cls(url=parsed, port=port or (DEFAULT_TLS_PORT if parsed.tls else DEFAULT_PORT))

    def connect(self) -> StreamConnection:
        """Connect to the first host that lets us in.

        Raises:
            BrokerError: none does, with what the most telling of them said.
        """
        failures: list[BrokerError] = []
        for host in dict.fromkeys(host for host, _ in self.url.hosts):
            try:
                return StreamConnection(self.url, (host, self.port))
            except BrokerError as error:
                failures.append(error)
        raise reply_codes.of_hosts(failures)


class StreamLogs:
    """Asks where streams begin and end. Connections are kept between the questions; one that broke is opened again."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connections: dict[tuple[str, int], StreamConnection] = {}
        self._leaders: dict[str, StreamConnection] = {}
        self._was_connected = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; they are opened again when they are needed."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._leaders.clear()

    def partitions(self, super_stream: str) -> list[str]:
        """The streams of a super stream, in their order.

        Raises:
            TargetNotFoundError: there is no such super stream, or it has no streams.
            BrokerError: the broker cannot be asked.
        """
        names = self._trying(lambda: self._any().partitions(super_stream))
        if not names:
            raise TargetNotFoundError(f"the exchange {super_stream!r} is not a super stream: no stream is bound to it")
        return names

    def first(self, stream: str) -> int:
        """The first offset that is there; 0 of an empty stream.

        Raises:
            TargetNotFoundError: there is no such stream.
            BrokerError: the broker cannot be asked.
        """
        return self._asking(stream, first_offset)

    def end(self, stream: str) -> int:
        """The offset after the last message; 0 of an empty stream. Raises the same."""
        return self._asking(stream, end_offset)

    def since(self, stream: str, milliseconds: int) -> int:
        """The offset of the first message that was stored at this time (since 1970) or later; else the end."""

        def ask(connection: StreamConnection, stream: str) -> int:
            chunk = _look(connection, stream, frames.at_time(milliseconds))
            return end_offset(connection, stream) if chunk is None else chunk.first

        return self._asking(stream, ask)

    def _asking(self, stream: str, question: _Question) -> int:
        return self._trying(lambda: question(self.leader(stream), stream))

    def _trying(self, question: Callable[[], _Answer]) -> _Answer:
        """Ask again where a connection was idle for too long, the leader moved, or the broker is being restarted."""
        patience = _Patience()
        while True:
            try:
                answer = question()
            except (BrokerUnreachableError, ConnectionLostError) as error:
                self.close()
                # Where nothing ever answered, something is wrong with the address.
                if not self._was_connected or patience.is_over():
                    raise
                log.info("asking again: %s", error)
                patience.pause()
            except ProtocolError:
                # What comes next over this connection would answer something else.
                self.close()
                raise
            else:
                return answer

    def leader(self, stream: str) -> StreamConnection:
        """A connection to the leader of a stream.

        Raises:
            TargetNotFoundError: there is no such stream.
            BrokerError: it has no leader at the moment, or that cannot be reached.
        """
        if (known := self._leaders.get(stream)) is not None:
            return known
        asked = self._any()
        place = asked.whereabouts([stream])[stream]
        if place.code == frames.NO_SUCH_STREAM:
            raise TargetNotFoundError(
                f"there is no stream {stream!r} on the virtual host {self._address.url.vhost!r}, "
                "or the queue of that name is not a stream"
            )
        if place.code != frames.OK or place.leader is None:
            reason = frames.CODES.get(place.code, str(place.code)) if place.code != frames.OK else "it has no leader"
            raise ConnectionLostError(f"the stream {stream!r} cannot be read now: {reason}")
        self._leaders[stream] = connection = self._to(place.leader, asked)
        return connection

    def _any(self) -> StreamConnection:
        for connection in self._connections.values():
            return connection
        connection = self._address.connect()
        self._was_connected = True
        self._connections[connection.advertised] = connection
        return connection

    def _to(self, place: tuple[str, int], fallback: StreamConnection) -> StreamConnection:
        if (known := self._connections.get(place)) is not None:
            return known
        try:
            connection = StreamConnection(self._address.url, place)
        except BrokerUnreachableError as error:
            # Names that only the brokers can resolve, as in containers. The node that we know may have a replica.
            log.warning("the leader advertises %s:%d, where it cannot be reached (%s)", *place, error)
            return fallback
        self._connections[place] = connection
        return connection


def first_offset(connection: StreamConnection, stream: str) -> int:
    """The first offset that is there; 0 of an empty stream."""
    if connection.release >= _STATISTICS_SINCE:
        return max(0, connection.statistics(stream)["first_chunk_id"])
    # Without statistics it is the first message's: of a log that begins with an entry of the broker's own, one more.
    chunk = _look(connection, stream, frames.FIRST)
    return 0 if chunk is None else chunk.first


def end_offset(connection: StreamConnection, stream: str) -> int:
    """The offset after the last message; 0 of an empty stream.

    Raises:
        ConnectionLostError: the last message is not committed in time: too few replicas of the stream are up.
    """
    subscription = connection.subscribe(stream, frames.LAST, credit=1)
    connection.barrier()
    chunk = connection.received(subscription)
    if chunk is None and _look(connection, stream, frames.FIRST) is not None:
        # There are messages, and the last ones are being replicated.
        chunk = connection.next_chunk(subscription, connection.timeout)
        if chunk is None:
            raise ConnectionLostError(
                f"the last messages of stream {stream!r} were not committed within {connection.timeout:g} s"
            )
    connection.unsubscribe(subscription)
    return 0 if chunk is None else chunk.end


def _look(connection: StreamConnection, stream: str, position: bytes) -> Chunk | None:
    """The chunk at a position, or None if there is none yet."""
    subscription = connection.subscribe(stream, position, credit=1)
    connection.barrier()
    chunk = connection.received(subscription)
    connection.unsubscribe(subscription)
    return chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetRange:
    """Offsets of a stream, from *start* to before *end*."""

    stream: str
    start: int
    end: int


def read_range(address: Address, wanted: OffsetRange, *, fail_on_data_loss: bool) -> Iterator[tuple[Chunk, int, int]]:
    """The chunks of a range of offsets, each with the indexes between which its messages are in the range.

    A connection that breaks is opened again, and reading goes on where it was. Offsets that the broker used for
    entries of its own are not messages: there may be fewer of these than offsets.

    Raises:
        OffsetsLostError: messages of the range are not there any more; not with ``fail_on_data_loss=False``, where
            they are left out.
        TargetNotFoundError: the stream does not exist any more; not with ``fail_on_data_loss=False`` either.
        BrokerError: the broker cannot be reached, or does not send them.
    """
    reader = _LogReader(address, wanted, fail_on_data_loss)
    patience = _Patience()
    while reader.position < wanted.end:
        reached = reader.position
        try:
            yield from reader.chunks()
        except (BrokerUnreachableError, ConnectionLostError) as error:
            if reader.position > reached:
                patience = _Patience()
            if patience.is_over():
                raise
            log.info("reading %s goes on at offset %d: %s", wanted.stream, reader.position, error)
            patience.pause()


class _Patience:
    """With a broker that is away. It begins with the first failure."""

    def __init__(self) -> None:
        self._end: float | None = None
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)

    def is_over(self) -> bool:
        now = time.monotonic()
        if self._end is None:
            self._end = now + _PATIENCE
        return now >= self._end

    def pause(self) -> None:
        """Wait a little, and longer each time."""
        time.sleep(self._backoff.next())


class _LogReader:
    """Reads a range, and knows how far it has come."""

    def __init__(self, address: Address, wanted: OffsetRange, fail_on_data_loss: bool) -> None:
        self._address = address
        self._wanted = wanted
        self._fail = fail_on_data_loss
        self.position = wanted.start

    def chunks(self) -> Iterator[tuple[Chunk, int, int]]:
        """What is left of the range, over a new connection."""
        wanted = self._wanted
        with StreamLogs(self._address) as logs:
            try:
                connection = logs.leader(wanted.stream)
            except TargetNotFoundError:
                if self._fail:
                    raise
                log.warning("the stream %r is gone: its offsets from %d on are left out", wanted.stream, self.position)
                self.position = wanted.end
                return
            subscription = connection.subscribe(wanted.stream, frames.at_offset(self.position), credit=_CHUNKS_AHEAD)
            while self.position < wanted.end:
                # These offsets are committed: the broker sends them at once, or has them not. One that has
                # just become the leader may need a moment until it knows that they are.
                chunk = connection.next_chunk(subscription, connection.timeout)
                if chunk is None:
                    self._check_silence(connection)
                    return
                connection.credit(subscription, 1)
                connection.beat()
                if chunk.end <= self.position:
                    continue
                if chunk.first > self.position:
                    self._check_gap(connection, chunk)
                if chunk.first < wanted.end:
                    first = max(0, self.position - chunk.first)
                    yield chunk, first, min(chunk.end, wanted.end) - chunk.first
                self.position = chunk.end

    def _check_silence(self, connection: StreamConnection) -> None:
        """A broker that sends nothing has lost messages only if it says so: it may be busy, or the way to it.

        Raises:
            ConnectionLostError: it has them.
        """
        stream, wanted = self._wanted.stream, self._wanted
        first, end = first_offset(connection, stream), end_offset(connection, stream)
        if end <= self.position:
            self._lost(None)
            self.position = wanted.end
        elif first > self.position:
            self._lost(first)
            self.position = min(first, wanted.end)
        else:
            raise ConnectionLostError(
                f"the broker sent nothing of stream {stream!r} within {connection.timeout:g} s, though it has offsets "
                f"{self.position:,} to {end - 1:,}"
            )

    def _check_gap(self, connection: StreamConnection, chunk: Chunk) -> None:
        """Offsets that the broker used for itself make a gap; so does retention, which cuts off the beginning."""
        if first_offset(connection, self._wanted.stream) > self.position:
            self._lost(chunk.first)
        self.position = min(chunk.first, self._wanted.end)

    def _lost(self, found: int | None) -> None:
        stream, position, end = self._wanted.stream, self.position, self._wanted.end
        missing = f"offsets {position:,} to {min(found, end) - 1 if found is not None else end - 1:,}"
        reason = (
            f"it begins at {found:,}: retention was quicker than the reading"
            if found is not None
            else "it ends before them: it was deleted and declared again, or they were lost by the broker"
        )
        message = f"the stream {stream!r} does not have {missing} any more; {reason}"
        if self._fail:
            raise OffsetsLostError(
                f"{message}. {WAY_OUT_OF_GAP}",
                stream=stream,
                offset=position,
                found=found,
            )
        log.warning("%s; they are left out", message)
