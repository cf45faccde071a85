"""Publisher of a stream, whose messages the stream stores once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

from bide.errors import BrokerError, BrokerUnreachableError, ConnectionLostError
from bide.runtime.backoff import Backoff
from bide.runtime.logs import logger
from bide.streams.connection import StreamConnection
from bide.streams.log import Address, StreamLogs

log = logger(__name__)

_Result = TypeVar("_Result")

_BACKOFF_MIN: Final = 0.1
_BACKOFF_MAX: Final = 2.0


class StreamPublisher:
    """Publishes into one stream, with publishing ids that grow.

    The broker drops a message whose publishing id is not above the last one of its publisher, and confirms it when
    that one is committed. So messages can be sent again after a lost connection, or by another process of the same
    name, if both send the same messages with the same ids. A message whose id is below another one that was stored
    would be lost. Therefore a frame is sent only after all messages of the previous frame are confirmed, so that what
    is stored has no gaps.

    Args:
        address: the address of the stream protocol.
        stream: the name of the stream.
        name: the name of the publisher, of at most 255 bytes. A stream remembers the last 255 names.
        timeout: seconds without any confirm after which publishing fails.
    """

    def __init__(self, address: Address, stream: str, name: str, *, timeout: float) -> None:
        self._logs = StreamLogs(address)
        self._stream = stream
        self._name = name
        self._timeout = timeout
        self._connection: StreamConnection | None = None
        self._was_connected = False
        self._confirmed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._logs.close()

    def last_id(self) -> int:
        """The last publishing id that the stream has of this publisher, committed or not; 0 without any.

        Raises:
            TargetNotFoundError: the stream does not exist.
            AccessRefusedError: the user may not write into the stream.
            BrokerError: the broker cannot be reached, or refuses.
        """
        return self._retry(lambda _: self._connect().publisher_sequence(self._stream, self._name))

    def publish(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """Publish messages that fit into one frame, and wait until all are committed. After a lost connection, they
        are sent again.

        Args:
            messages: encoded messages with their publishing ids, in the order of these.

        Raises:
            TargetNotFoundError: the stream does not exist any more.
            AccessRefusedError: the user may not write into the stream.
            BrokerError: the broker cannot be reached, does not confirm in time, refuses, or has lost messages that it
                confirmed before.
        """
        self._retry(lambda seconds: self._connect().publish(messages, seconds))
        self._confirmed = messages[-1][0]

    def _retry(self, action: Callable[[float], _Result]) -> _Result:
        """Repeat an action after the connection broke, until the timeout.

        Args:
            action: takes the seconds that are left.
        """
        deadline = time.monotonic() + self._timeout
        backoff = Backoff(_BACKOFF_MIN, _BACKOFF_MAX)
        while True:
            try:
                return action(max(0.0, deadline - time.monotonic()))
            except (BrokerUnreachableError, ConnectionLostError) as error:
                self._disconnect()
                # If no connection has ever succeeded, the address is probably wrong, and a retry does not help.
                if not self._was_connected or time.monotonic() >= deadline:
                    raise
                log.info("publishing into %s again: %s", self._stream, error)
                time.sleep(backoff.next())

    def _connect(self) -> StreamConnection:
        if self._connection is None:
            connection = self._logs.leader(self._stream)
            self._was_connected = True
            connection.declare_publisher(self._stream, self._name)
            # Another node passes the messages of a frame on one by one, and may lose some of them between others.
            leader = connection.metadata([self._stream])[self._stream].leader
            if leader != connection.advertised:
                raise ConnectionLostError(
                    f"the node at {connection.advertised[0]}:{connection.advertised[1]} does not lead the stream "
                    f"{self._stream!r}"
                )
            if self._confirmed and connection.publisher_sequence(self._stream, self._name) < self._confirmed:
                raise BrokerError(
                    f"the stream {self._stream!r} lacks messages that it has confirmed to {self._name!r}: it was "
                    "deleted and declared again, lost them, or has forgotten this publisher"
                )
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        self._logs.close()
        self._connection = None
