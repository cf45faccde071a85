"""Readers of streams: for a batch, and for the micro-batches of a query.

The contents of a micro-batch follow from the positions in the checkpoint alone, so an idempotent sink gets each message
exactly once. No position is stored on the broker, and :meth:`StreamsQueryReader.commit` does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from bide.durations import to_milliseconds
from bide.errors import InvalidOptionError, OffsetsLostError
from bide.spark.admission import Admission
from bide.spark.batches import RecordBatchBuilder
from bide.spark.columns import STREAM_COLUMNS, arrow_schema
from bide.spark.offsets import Document, begin_of, document, positions_of, split
from bide.spark.read_options import Position, Positions, ReadOptions
from bide.streams.log import Address, StreamLogs
from bide.streams.range_reader import OffsetRange, read_range

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # PySpark before 4.2 does not have limits
    LIMITS = False
    ReadAllAvailable = ReadLimit = ReadMaxRows = object  # type: ignore[assignment, misc]  # stand for the missing ones
    ReadMaxBytes = ReadMinRows = SupportsTriggerAvailableNow = object  # type: ignore[assignment, misc]  # as above
else:
    LIMITS = True

# Advice of errors about streams that a query has read before.
UNREAD_STREAMS_ADVICE: Final = (
    "name them, start with a new checkpoint, or continue without them with failOnDataLoss=false"
)
# The checkpoint has the end of a batch that was begun. If the batch were finished, the streams that it leaves out would
# have no position any more, even if the query names them again.
LEFT_OUT_STREAMS_ADVICE: Final = (
    "name them and delete the newest file in the checkpoint's folder 'offsets', with its .crc; start with a new "
    "checkpoint, or continue without them with failOnDataLoss=false"
)
REPLACED_STREAM_ADVICE: Final = "Start with a new checkpoint, or continue with failOnDataLoss=false"


class _StreamsRead:
    """The common part of both readers."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.schema: pa.Schema = arrow_schema(schema, STREAM_COLUMNS)
        self.address = Address.of(options.url, options.port)

    def names(self, logs: StreamLogs) -> tuple[str, ...]:
        """The names of the streams to read."""
        if self.options.super_stream is None:
            return self.options.streams
        return tuple(logs.partitions(self.options.super_stream))

    def resolve(self, logs: StreamLogs, names: Sequence[str], positions: Positions, option: str) -> dict[str, int]:
        """Resolve positions to offsets, as of now."""
        if isinstance(positions, Mapping):
            if set(positions) != set(names):
                raise InvalidOptionError(
                    f"the option {option} gives positions of {', '.join(sorted(positions)) or 'no stream'}, but the "
                    f"super stream consists of {', '.join(sorted(names))}: give a position for each of these"
                )
            return {name: _offset(logs, name, positions[name]) for name in names}
        return {name: _offset(logs, name, positions) for name in names}

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Read the messages of one range of offsets."""
        wanted = partition.value if partition is not None else None
        if wanted is None:
            # Spark starts a task without a range if a read has no partitions; PySpark 4.0 passes None as its partition.
            return
        batches = RecordBatchBuilder(self.schema, wanted.stream, raw=self.options.raw)
        for chunk, first, last in read_range(self.address, wanted, fail_on_data_loss=self.options.fail_on_data_loss):
            yield from batches.add(chunk, first, last)
        if batches.rows:
            yield batches.take()

    def tasks(self, ranges: list[OffsetRange]) -> list[InputPartition]:
        """At least one task for each range that is not empty."""
        return [InputPartition(one) for one in split(ranges, self.options.min_partitions)]


def _offset(logs: StreamLogs, stream: str, position: Position) -> int:
    match position:
        case datetime():
            return logs.since(stream, to_milliseconds(position))
        case int():
            return position
        case "earliest":
            return logs.first(stream)
        case "latest":
            return logs.end(stream)


class StreamsReader(DataSourceReader):
    """Reads a range of each stream in a batch."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._streams = _StreamsRead(options, schema)

    def partitions(self) -> Sequence[InputPartition]:
        """The ranges of offsets, which are fixed when the read is planned.

        Raises:
            InvalidOptionError: a range begins after its end, or ends after the end of the stream.
        """
        streams = self._streams
        options = streams.options
        with StreamLogs(streams.address) as logs:
            names = streams.names(logs)
            start = streams.resolve(logs, names, options.start, options.start_option)
            end = streams.resolve(logs, names, options.end, options.end_option)
            for name in names:
                last = logs.end(name)
                if end[name] > last:
                    raise InvalidOptionError(
                        f"the option endingOffsets is {end[name]:,} for {name!r}, which ends at {last:,}: give at most "
                        "that"
                    )
                if start[name] > end[name]:
                    raise InvalidOptionError(
                        f"the stream {name!r} would be read from offset {start[name]:,} to {end[name]:,}: "
                        "give an earlier startingOffsets or startingTimestamp, or a later endingOffsets or "
                        "endingTimestamp"
                    )
            ranges = [OffsetRange(stream=name, start=start[name], end=end[name]) for name in names]
            return streams.tasks(self.narrowed(ranges, logs))

    def narrowed(self, ranges: list[OffsetRange], logs: StreamLogs) -> list[OffsetRange]:
        """The parts of the ranges that have to be read: all of them."""
        return ranges

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages of one range."""
        return self._streams.read(partition)


class StreamsQueryReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads streams in micro-batches. Spark calls :meth:`read` in tasks and all other methods on the driver."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if options.limits.is_set and not LIMITS:
            raise InvalidOptionError(
                "the options maxOffsetsPerTrigger, maxBytesPerTrigger and minOffsetsPerTrigger need PySpark 4.2 or "
                "newer: older versions do not pass the position of the query"
            )
        self._streams = _StreamsRead(options, schema)
        self._admission = Admission(options.limits)
        self._behind: dict[str, int] | None = None
        self._logs: StreamLogs | None = None
        self._initial: dict[str, int] | None = None
        self._target: dict[str, int] | None = None
        self._latest: dict[str, int] | None = None
        self._first: dict[str, int] = {}

    @property
    def _connected(self) -> StreamLogs:
        if self._logs is None:
            self._logs = StreamLogs(self._streams.address)
        return self._logs

    def initialOffset(self) -> Document:  # noqa: N802 (Spark's name)
        """The position at which a new query begins."""
        begin = self._begin()
        for name, offset in begin.items():
            if offset > (end := self._connected.end(name)):
                raise InvalidOptionError(
                    f"the option startingOffsets is {offset:,} for {name!r}, which ends at {end:,}: give at most that"
                )
        return document(begin, initial=True)

    def _begin(self) -> dict[str, int]:
        """The position at which a new query begins, resolved once per run."""
        if self._initial is None:
            logs = self._connected
            names = self._streams.names(logs)
            options = self._streams.options
            self._initial = self._streams.resolve(logs, names, options.start, options.start_option)
        return self._initial

    def _begin_if_new(self) -> dict[str, int]:
        """The position at which a new query begins. PySpark before 4.2 does not report whether the query is new.

        Errors are ignored here, because the starting options must not stop an old query whose super stream has grown.
        :meth:`initialOffset` reports them for a new query.
        """
        try:
            return self._begin()
        except InvalidOptionError:
            return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's name)
        """One of the limits. :meth:`latestOffset` applies all of them, because Spark passes on only one."""
        limits = self._streams.options.limits
        if limits.max_offsets is not None:
            return ReadMaxRows(limits.max_offsets)
        if limits.max_bytes is not None:
            return ReadMaxBytes(limits.max_bytes)
        return ReadAllAvailable() if limits.min_offsets is None else ReadMinRows(limits.min_offsets)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (Spark's name)
        """Limit the query to the messages that the streams have now."""
        self._target = self._ends()

    def latestOffset(  # noqa: N802 (Spark's name)
        self, start: Mapping[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> Document:
        """The end of the next batch. PySpark before 4.2 passes no arguments.

        Raises:
            OffsetsLostError: a stream ends before the position of the query, and ``failOnDataLoss`` is true.
        """
        if start is None:
            # PySpark may call this before initialOffset, so the end has to include the start of a new query. The query
            # may also be an old one with new streams.
            begin, ends = self._begin_if_new(), self._ends()
            for stream in ends.keys() - self._first.keys():
                # Resolved once, because Spark starts a batch when the document differs from the previous one.
                self._first[stream] = self._connected.first(stream)
            return document(ends, since={stream: self._first[stream] for stream in ends}, begin=begin)
        known = positions_of(start)
        if self._target is not None and start.get("initial") and known == self._initial:
            # Spark asked for the target before the start, and messages arrived in between: move the target up.
            self._target = {
                stream: max(self._target.get(stream, 0), known.get(stream, 0))
                for stream in self._target.keys() | known.keys()
            }
        ends = self._target if self._target is not None else self._ends()
        since = {} if not start.get("initial") else dict(known)
        for stream in ends.keys() - known.keys():
            since[stream] = self._connected.first(stream)
        begin = {stream: known.get(stream, since.get(stream, 0)) for stream in ends}
        restarts = self._check(known, begin, ends)
        # With failOnDataLoss=false, a missing stream causes a batch. The batch removes the position of the stream from
        # the checkpoint, so that the query can run with failOnDataLoss=true again.
        can_wait = not restarts and not known.keys() - ends.keys()
        # Trigger.Once ignores the limits, and Trigger.AvailableNow would wait forever for minOffsetsPerTrigger.
        is_limited = LIMITS and limit is not None and not isinstance(limit, ReadAllAvailable)
        if can_wait and is_limited and self._target is None and self._admission.must_wait(begin, ends):
            ends = {stream: min(begin[stream], end) for stream, end in ends.items()}
        elif is_limited:
            ends = self._admission.limit(begin, ends, self._connected.message_size)
        if self._latest is not None:
            self._behind = {name: max(0, end - ends.get(name, 0)) for name, end in self._latest.items()}
        if can_wait and all(ends[stream] == begin[stream] for stream in ends):
            # The same document as before, so that Spark starts no batch.
            return dict(start)
        return document(ends, since=since)

    def _ends(self) -> dict[str, int]:
        logs = self._connected
        self._latest = {name: logs.end(name) for name in self._streams.names(logs)}
        self._admission.observe(self._latest)
        return self._latest

    def _check(
        self, known: Mapping[str, int], begin: dict[str, int], ends: Mapping[str, int], *, planned: bool = False
    ) -> bool:
        """Check the positions against the streams. If data loss is allowed, restart a stream that was declared again.

        Args:
            planned: the ends are in the checkpoint already.

        Returns:
            Whether a stream restarts at offset 0: its old position is invalid, even if the new stream is empty.
        """
        fail = self._streams.options.fail_on_data_loss
        missing = sorted(known.keys() - ends.keys())
        if missing and fail:
            reason = (
                f"the batch that it has begun leaves out: {LEFT_OUT_STREAMS_ADVICE}"
                if planned
                else f"the query does not read any more: {UNREAD_STREAMS_ADVICE}"
            )
            raise InvalidOptionError(f"the checkpoint has positions of {', '.join(missing)}, which {reason}")
        restarts = False
        for stream, end in ends.items():
            if begin[stream] <= end:
                continue
            if fail:
                raise OffsetsLostError(
                    f"the stream {stream!r} was read up to offset {begin[stream]:,}, and now it ends at {end:,}: it "
                    f"was deleted and declared again, or the broker lost messages. {REPLACED_STREAM_ADVICE}",
                    stream=stream,
                    offset=end,
                )
            begin[stream] = 0
            restarts = True
        return restarts

    def reportLatestOffset(self) -> Document | None:  # noqa: N802 (Spark's name)
        """The ends of the streams, how far the query is behind, and the rate, for the progress that Spark reports."""
        if self._latest is None:
            return None
        found = document(self._latest)
        if self._behind is not None:
            found["behind"] = dict(sorted(self._behind.items()))
        if (rate := self._admission.arriving_per_second) is not None:
            found["arrivingPerSecond"] = rate
        return found

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """The ranges of a batch.

        Raises:
            OffsetsLostError: a stream ends before the position of the query, and ``failOnDataLoss`` is true.
            InvalidOptionError: the batch lacks a stream of the checkpoint, and ``failOnDataLoss`` is true.
        """
        # Checked here too, because PySpark before 4.2 does not pass its position to latestOffset.
        begin, ends = begin_of(start, end), positions_of(end)
        self._check({} if start.get("initial") else positions_of(start), begin, ends, planned=True)
        return self._streams.tasks(
            [OffsetRange(stream=name, start=begin[name], end=ends[name]) for name in sorted(ends)]
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages of one range."""
        return self._streams.read(partition)

    def commit(self, end: Mapping[str, Any]) -> None:
        """Do nothing, because the positions are in the checkpoint."""

    def stop(self) -> None:
        """Close the connections."""
        if self._logs is not None:
            self._logs.close()
