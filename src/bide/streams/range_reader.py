"""Reader of the chunks in a range of offsets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from bide.errors import BrokerUnreachableError, ConnectionLostError, OffsetsLostError, TargetNotFoundError
from bide.runtime.logs import logger
from bide.streams import frames
from bide.streams.chunk import Chunk
from bide.streams.connection import StreamConnection
from bide.streams.log import Address, RetryTimer, StreamLogs, end_offset, first_offset

log = logger(__name__)

SPARK_GAP_ADVICE: Final = "Read the remaining messages with failOnDataLoss=false, or start with a new checkpoint"
"""The advice of OffsetsLostError; commands replace it by the advice that fits their own options."""

_CREDIT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetRange:
    """Offsets of a stream, from *start* up to but not including *end*."""

    stream: str
    start: int
    end: int


def read_range(address: Address, wanted: OffsetRange, *, fail_on_data_loss: bool) -> Iterator[tuple[Chunk, int, int]]:
    """Read the chunks of a range of offsets, each with the slice of its messages that are in the range.

    When the connection breaks, reading continues on a new one. The broker uses some offsets for entries of its own,
    so a range can have fewer messages than offsets.

    With ``fail_on_data_loss=False``, missing messages and a missing stream are logged and left out.

    Raises:
        OffsetsLostError: the stream does not have all messages of the range any more.
        TargetNotFoundError: the stream does not exist any more.
        BrokerError: the broker cannot be reached, or does not send the messages.
    """
    reader = _LogReader(address, wanted, fail_on_data_loss)
    retries = RetryTimer()
    while reader.position < wanted.end:
        reached = reader.position
        try:
            yield from reader.chunks()
        except (BrokerUnreachableError, ConnectionLostError) as error:
            if reader.position > reached:
                retries = RetryTimer()
            if retries.has_expired():
                raise
            log.info("reading %s continues at offset %d: %s", wanted.stream, reader.position, error)
            retries.pause()


class _LogReader:
    """Reads a range and keeps its position in it.

    Attributes:
        position: the next offset to read.
    """

    def __init__(self, address: Address, wanted: OffsetRange, fail_on_data_loss: bool) -> None:
        self._address = address
        self._wanted = wanted
        self._fail_on_data_loss = fail_on_data_loss
        self.position = wanted.start

    def chunks(self) -> Iterator[tuple[Chunk, int, int]]:
        """Read the rest of the range over a new connection."""
        wanted = self._wanted
        with StreamLogs(self._address) as logs:
            try:
                connection = logs.leader(wanted.stream)
            except TargetNotFoundError:
                if self._fail_on_data_loss:
                    raise
                log.warning(
                    "the stream %r does not exist any more: its offsets from %d on are left out",
                    wanted.stream,
                    self.position,
                )
                self.position = wanted.end
                return
            subscription = connection.subscribe(wanted.stream, frames.at_offset(self.position), credit=_CREDIT)
            while self.position < wanted.end:
                # The range is committed, so the broker sends its chunks immediately if it still has them. Only a new
                # leader may take a moment until it knows which chunks are committed.
                chunk = connection.next_chunk(subscription, connection.timeout)
                if chunk is None:
                    self._check_silence(connection)
                    return
                connection.credit(subscription, 1)
                connection.send_heartbeat()
                if chunk.end <= self.position:
                    continue
                if chunk.first > self.position:
                    self._check_gap(connection, chunk)
                if chunk.first < wanted.end:
                    first = max(0, self.position - chunk.first)
                    yield chunk, first, min(chunk.end, wanted.end) - chunk.first
                self.position = chunk.end

    def _check_silence(self, connection: StreamConnection) -> None:
        """Find out why the broker sent nothing. Messages are lost only if they are outside the offsets of the stream.

        Raises:
            ConnectionLostError: the stream has the messages, so the broker or the network is slow.
        """
        stream, wanted = self._wanted.stream, self._wanted
        first, end = first_offset(connection, stream), end_offset(connection, stream)
        if end <= self.position:
            self._handle_loss(None)
            self.position = wanted.end
        elif first > self.position:
            self._handle_loss(first)
            self.position = min(first, wanted.end)
        else:
            raise ConnectionLostError(
                f"the broker sent nothing of stream {stream!r} within {connection.timeout:g} s, although the stream "
                f"has offsets {self.position:,} to {end - 1:,}"
            )

    def _check_gap(self, connection: StreamConnection, chunk: Chunk) -> None:
        """Find the cause of a gap: retention loses messages, entries of the broker itself do not."""
        if first_offset(connection, self._wanted.stream) > self.position:
            self._handle_loss(chunk.first)
        self.position = min(chunk.first, self._wanted.end)

    def _handle_loss(self, found: int | None) -> None:
        """Raise OffsetsLostError or log a warning, as ``fail_on_data_loss`` asks for.

        Args:
            found: the first offset of the stream; None if the stream ends before the missing offsets.
        """
        stream, position, end = self._wanted.stream, self.position, self._wanted.end
        missing = f"offsets {position:,} to {min(found, end) - 1 if found is not None else end - 1:,}"
        reason = (
            f"it begins at {found:,}: retention removed them before they were read"
            if found is not None
            else "it ends before them: it was deleted and declared again, or the broker lost them"
        )
        message = f"the stream {stream!r} does not have {missing} any more; {reason}"
        if self._fail_on_data_loss:
            raise OffsetsLostError(
                f"{message}. {SPARK_GAP_ADVICE}",
                stream=stream,
                offset=position,
                found=found,
            )
        log.warning("%s; they are left out", message)
