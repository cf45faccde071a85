"""Publisher into a stream with deduplication: the stream stores each message once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
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

_IN_FLIGHT: Final = 4
"""The largest number of unconfirmed frames. While the broker stores one, the publisher encodes and sends the next ones.
The unread confirms of four frames of a thousand messages fit into the buffers of a socket. So there is no deadlock in
which the broker waits to send confirms while the publisher waits to send messages."""


class StreamPublisher:
    """Publishes into one stream, with publishing ids that grow by one from message to message.

    The broker drops a message whose publishing id is not higher than the last id of its publisher, and confirms the
    message when the one with that last id is committed. So messages can be sent again after a lost connection, or by
    another process with the same publisher name, if both send the same messages with the same ids. A message is lost if
    one with a higher id is stored first, so the stored ids must never have a gap. They have none, although several
    frames are in flight:

    - Over each connection, the publisher first sends the message after the last confirmed one, or an earlier one, and
      then all later ones in order. The broker handles them in this order, and passes them to one process, the leader
      that the stream had when the publisher was declared (``rabbit_stream_reader`` and
      ``rabbit_stream_utils:write_messages`` of RabbitMQ 3.10 to 4.3). So the leader receives a sequence without gaps
      from each connection, wherever the connection breaks.
    - The leader compares ids one by one (``osiris_writer:handle_command``). So sequences from several connections, such
      as messages of a killed process that arrive late, are stored without gaps, too.
    - If the leader ends, the broker forgets the publisher, and refuses everything that this connection sends from then
      on. A new leader has the messages of the old one up to some id, and receives nothing from connections to the old
      one.
    - The permission to write is checked when the publisher is declared, and remembered for the connection. So the
      broker never refuses one frame and accepts a later one.

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
        self._frames: deque[tuple[int, Sequence[bytes]]] = deque()
        self._sent = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._logs.close()

    def last_id(self) -> int:
        """The last publishing id that the stream has of this publisher, committed or not; 0 if it has none.

        Raises:
            TargetNotFoundError: the stream does not exist.
            AccessRefusedError: the user may not write into the stream.
            BrokerError: the broker cannot be reached, or refuses.
        """
        return self._retry(lambda _: self._connect().publisher_sequence(self._stream, self._name))

    def publish(self, first: int, messages: Sequence[bytes]) -> None:
        """Publish messages that fit into one frame. After a lost connection, all unconfirmed ones are sent again.

        Waits only if many frames are unconfirmed: call :meth:`flush` at the end.

        Args:
            first: the publishing id of the first message, which is one higher than the last id of the previous call.
                The other messages have the next ids.
            messages: encoded messages.

        Raises:
            TargetNotFoundError: the stream does not exist any more.
            AccessRefusedError: the user may not write into the stream.
            BrokerError: the broker cannot be reached, does not confirm in time, refuses, or has lost messages that it
                confirmed before.
        """
        self._frames.append((first, messages))
        self._retry(self._send)
        while len(self._frames) >= _IN_FLIGHT:
            self._retry(self._settle)

    def flush(self) -> None:
        """Wait until all messages are committed.

        Raises:
            BrokerError: as for :meth:`publish`.
        """
        while self._frames:
            self._retry(self._settle)

    def _send(self, seconds: float) -> StreamConnection:
        """Send the frames that were not sent over this connection."""
        connection = self._connect()
        for first, messages in islice(self._frames, self._sent, None):
            connection.publish(first, messages, seconds)
            self._sent += 1
        return connection

    def _settle(self, seconds: float) -> None:
        """Wait until the oldest frame is confirmed."""
        first, messages = self._frames[0]
        self._send(seconds).wait_for_confirms(first, len(messages), seconds)
        self._frames.popleft()
        self._sent -= 1
        self._confirmed = first + len(messages) - 1

    def _retry(self, action: Callable[[float], _Result]) -> _Result:
        """Repeat an action after the connection broke, until the timeout.

        Args:
            action: takes the seconds that remain.
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
                time.sleep(backoff.next())  # before the next attempt

    def _connect(self) -> StreamConnection:
        if self._connection is None:
            connection = self._logs.leader(self._stream)
            self._was_connected = True
            connection.declare_publisher(self._stream, self._name)
            # A node other than the leader forwards the messages of a frame one by one, and may lose some in the middle.
            leader = connection.metadata([self._stream])[self._stream].leader
            if leader != connection.advertised:
                raise ConnectionLostError(
                    f"the node at {connection.advertised[0]}:{connection.advertised[1]} is not the leader of the "
                    f"stream {self._stream!r}: the leader has moved, or cannot be reached at its advertised address"
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
        self._sent = 0
