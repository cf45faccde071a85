"""Addresses of the stream protocol, and offsets of streams.

Queries go to the leader of a stream, because a replica may lag behind and truncates at another time. If the leader
cannot be reached at its advertised address, queries go to the node that is already connected.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeVar

from bide.amqp import reply_codes
from bide.amqp.url import BrokerUrl
from bide.errors import (
    AccessRefusedError,
    BrokerError,
    BrokerUnreachableError,
    ConnectionLostError,
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

_STATISTICS_SINCE: Final = (3, 11)
_RETRY_TIMEOUT: Final = 60.0
"""Seconds without progress after which an error is raised; a node with much data may take that long to restart."""

_Query = Callable[[StreamConnection, str], int]
_Result = TypeVar("_Result")

_BACKOFF_MIN: Final = 0.1
_BACKOFF_MAX: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of the stream protocol on one or more hosts.

    Attributes:
        url: hosts, user, virtual host and TLS settings; the ports in the URL are those of AMQP and are not used.
        port: the port of the stream protocol, the same on each host.
    """

    url: BrokerUrl
    port: int

    @classmethod
    def of(cls, url: str, port: int | None = None) -> Address:
        """Parse the URL of a broker. The default port is 5552, with TLS 5551.

        Raises:
            InvalidUrlError: the URL is invalid.
        """
        parsed = BrokerUrl.parse(url)
        return cls(url=parsed, port=port or (DEFAULT_TLS_PORT if parsed.tls else DEFAULT_PORT))

    def connect(self) -> StreamConnection:
        """Connect to the first host that accepts the connection.

        Raises:
            BrokerError: no host accepts the connection; the most specific of the errors is raised.
        """
        failures: list[BrokerError] = []
        for host in dict.fromkeys(host for host, _ in self.url.hosts):
            try:
                return StreamConnection(self.url, (host, self.port))
            except BrokerError as error:
                failures.append(error)
        raise reply_codes.of_hosts(failures)


class StreamLogs:
    """Finds offsets of streams. Connections are kept open between the queries, and reopened when they break."""

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
        """Close all connections. The next query opens new ones."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._leaders.clear()

    def partitions(self, super_stream: str) -> list[str]:
        """The streams of a super stream, in their order.

        Raises:
            TargetNotFoundError: the super stream does not exist, or has no streams.
            BrokerError: the query failed.
        """
        names = self._retry(lambda: self._any_connection().partitions(super_stream))
        if not names:
            raise TargetNotFoundError(f"the exchange {super_stream!r} is not a super stream: no stream is bound to it")
        return names

    def first(self, stream: str) -> int:
        """The first offset that the stream still has; 0 if the stream is empty.

        Raises:
            TargetNotFoundError: the stream does not exist.
            BrokerError: the query failed.
        """
        return self._query(stream, first_offset)

    def end(self, stream: str) -> int:
        """The offset after the last message; 0 if the stream is empty.

        Raises:
            TargetNotFoundError: the stream does not exist.
            BrokerError: the query failed.
        """
        return self._query(stream, end_offset)

    def since(self, stream: str, milliseconds: int) -> int:
        """The first offset stored at this time (milliseconds since 1970) or later; the end if there is none.

        Raises:
            TargetNotFoundError: the stream does not exist.
            BrokerError: the query failed.
        """

        def find(connection: StreamConnection, stream: str) -> int:
            chunk = _chunk_at(connection, stream, frames.at_time(milliseconds))
            return end_offset(connection, stream) if chunk is None else chunk.first

        return self._query(stream, find)

    def message_size(self, stream: str, offset: int) -> float:
        """The mean size of the messages in the chunk at this offset, in bytes as stored; 0 if there is no chunk.

        Raises:
            TargetNotFoundError: the stream does not exist.
            BrokerError: the query failed.
        """

        def measure(connection: StreamConnection, stream: str) -> float:
            chunk = _chunk_at(connection, stream, frames.at_offset(offset))
            return 0.0 if chunk is None else len(chunk.data) / chunk.count

        return self._retry(lambda: measure(self.leader(stream), stream))

    def _query(self, stream: str, query: _Query) -> int:
        return self._retry(lambda: query(self.leader(stream), stream))

    def _retry(self, query: Callable[[], _Result]) -> _Result:
        """Repeat a query after an idle connection was closed, the leader moved, or the broker restarted."""
        retries = RetryTimer()
        while True:
            try:
                result = query()
            except (BrokerUnreachableError, ConnectionLostError) as error:
                self.close()
                # If no connection has ever succeeded, the address is probably wrong, and a retry does not help.
                if not self._was_connected or retries.has_expired():
                    raise
                log.info("repeating a query of a stream: %s", error)
                retries.pause()
            except ProtocolError:
                # The next frame on this connection would answer an earlier request.
                self.close()
                raise
            else:
                return result

    def leader(self, stream: str) -> StreamConnection:
        """A connection to the leader of a stream.

        Raises:
            TargetNotFoundError: the stream does not exist.
            AccessRefusedError: the user may not read the stream, whether or not it exists (RabbitMQ 4.3).
            BrokerError: the stream has no leader at the moment, or its leader cannot be reached.
        """
        if (known := self._leaders.get(stream)) is not None:
            return known
        connection = self._any_connection()
        metadata = connection.metadata([stream])[stream]
        if metadata.code == frames.NO_SUCH_STREAM:
            raise TargetNotFoundError(
                f"there is no stream {stream!r} on the virtual host {self._address.url.vhost!r}, "
                "or the queue of that name is not a stream"
            )
        if metadata.code == frames.ACCESS_REFUSED:
            raise AccessRefusedError(f"the user may not read the stream {stream!r}: give it the permission to read")
        if metadata.code != frames.OK or metadata.leader is None:
            code = metadata.code
            reason = frames.CODES.get(code, str(code)) if code != frames.OK else "it has no leader"
            raise ConnectionLostError(f"the stream {stream!r} cannot be read now: {reason}")
        self._leaders[stream] = leader = self._connection_to(metadata.leader, connection)
        return leader

    def _any_connection(self) -> StreamConnection:
        for connection in self._connections.values():
            return connection
        connection = self._address.connect()
        self._was_connected = True
        self._connections[connection.advertised] = connection
        return connection

    def _connection_to(self, leader: tuple[str, int], fallback: StreamConnection) -> StreamConnection:
        if (known := self._connections.get(leader)) is not None:
            return known
        try:
            connection = StreamConnection(self._address.url, leader)
        except BrokerUnreachableError as error:
            # The advertised name may resolve only on the brokers, as in containers. The known node may have a replica.
            log.warning(
                "no connection to the leader at its advertised address %s:%d (%s): using another node", *leader, error
            )
            return fallback
        self._connections[leader] = connection
        return connection


def first_offset(connection: StreamConnection, stream: str) -> int:
    """The first offset that the stream still has; 0 if the stream is empty."""
    if connection.release >= _STATISTICS_SINCE:
        return max(0, connection.statistics(stream)["first_chunk_id"])
    # RabbitMQ 3.10 does not report the first offset. The first chunk of messages has a higher offset if the log begins
    # with an entry of the broker itself.
    chunk = _chunk_at(connection, stream, frames.FIRST)
    return 0 if chunk is None else chunk.first


def end_offset(connection: StreamConnection, stream: str) -> int:
    """The offset after the last message; 0 if the stream is empty.

    Raises:
        ConnectionLostError: the last message was not committed in time, because too few replicas are up.
    """
    subscription = connection.subscribe(stream, frames.LAST, credit=1)
    connection.barrier()
    chunk = connection.take_received(subscription)
    if chunk is None and _chunk_at(connection, stream, frames.FIRST) is not None:
        # The stream has messages, and its last chunk is not replicated to a majority yet.
        chunk = connection.next_chunk(subscription, connection.timeout)
        if chunk is None:
            raise ConnectionLostError(
                f"the last messages of stream {stream!r} were not committed within {connection.timeout:g} s"
            )
    connection.unsubscribe(subscription)
    return 0 if chunk is None else chunk.end


def _chunk_at(connection: StreamConnection, stream: str, position: bytes) -> Chunk | None:
    """The chunk at a position; None if the stream has no chunk there yet."""
    subscription = connection.subscribe(stream, position, credit=1)
    connection.barrier()
    chunk = connection.take_received(subscription)
    connection.unsubscribe(subscription)
    return chunk


class RetryTimer:
    """Timeout and backoff of retries; the timeout starts at the first failure."""

    def __init__(self) -> None:
        self._deadline: float | None = None
        self._backoff = Backoff(_BACKOFF_MIN, _BACKOFF_MAX)

    def has_expired(self) -> bool:
        """Whether there is no time left for another retry."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + _RETRY_TIMEOUT
        return now >= self._deadline

    def pause(self) -> None:
        """Sleep before the next retry, longer each time."""
        time.sleep(self._backoff.next())
