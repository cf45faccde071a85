"""Reading streams: batches, and micro-batches of a query.

Exactly once into a sink that can do so: what a batch holds follows from the positions in the checkpoint alone.
Nothing is stored on the broker, and :meth:`StreamsQueryReader.commit` has nothing to do.
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
from bide.spark.batches import Batches
from bide.spark.columns import STREAM_COLUMNS, arrow_schema
from bide.spark.offsets import Document, begin_of, document, limited, positions_of, split
from bide.spark.read_options import Position, Positions, ReadOptions
from bide.streams.log import Address, OffsetRange, StreamLogs, read_range

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:  # PySpark before 4.2 asks for all that there is
    LIMITS = False
    ReadAllAvailable = ReadLimit = ReadMaxRows = SupportsTriggerAvailableNow = object  # type: ignore[assignment, misc]
else:
    LIMITS = True

# What errors advise: a command that has other names for it replaces this.
WAY_OUT_OF_UNREAD: Final = (
    "name them, begin anew with another checkpoint, or go on without them with failOnDataLoss=false"
)
# Where the end of the batch is in the checkpoint already: after it, what it leaves out has no position to go on from,
# although the query may name it again.
TAKE_BACK: Final = "delete the newest file in the checkpoint's folder 'offsets', with its .crc"
WAY_OUT_OF_LEFT_OUT: Final = (
    f"name them and {TAKE_BACK}; begin anew with another checkpoint, or go on without them with failOnDataLoss=false"
)
WAY_OUT_OF_NEW: Final = "Begin anew with another checkpoint, or go on with failOnDataLoss=false"


class _Streams:
    """What both readers do."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.schema: pa.Schema = arrow_schema(schema, STREAM_COLUMNS)
        self.address = Address.of(options.url, options.port)

    def names(self, logs: StreamLogs) -> tuple[str, ...]:
        """The streams that are read."""
        if self.options.super_stream is None:
            return self.options.streams
        return tuple(logs.partitions(self.options.super_stream))

    def resolve(self, logs: StreamLogs, names: Sequence[str], positions: Positions, option: str) -> dict[str, int]:
        """The offsets that positions stand for now."""
        if isinstance(positions, Mapping):
            if set(positions) != set(names):
                raise InvalidOptionError(
                    f"the option {option} gives positions of {', '.join(sorted(positions))}, and the super stream "
                    f"consists of {', '.join(sorted(names))}"
                )
            return {name: _offset(logs, name, positions[name]) for name in names}
        return {name: _offset(logs, name, positions) for name in names}

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The messages of one range of offsets."""
        wanted = partition.value if partition is not None else None
        if wanted is None:
            # Spark's own task for a read without any; of PySpark 4.0 it is None itself.
            return
        batches = Batches(self.schema, wanted.stream, raw=self.options.raw)
        for chunk, first, last in read_range(self.address, wanted, fail_on_data_loss=self.options.fail_on_data_loss):
            yield from batches.add(chunk, first, last)
        if batches.rows:
            yield batches.take()

    def tasks(self, ranges: list[OffsetRange]) -> list[InputPartition]:
        """One task for each range, or more."""
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
    """Reads a part of streams once."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._streams = _Streams(options, schema)

    def partitions(self) -> Sequence[InputPartition]:
        """Ranges of offsets, fixed when the read is planned.

        Raises:
            InvalidOptionError: it would begin after its end, or end after the stream's.
        """
        streams = self._streams
        options = streams.options
        with StreamLogs(streams.address) as logs:
            names = streams.names(logs)
            start = streams.resolve(logs, names, options.start, "startingOffsets")
            end = streams.resolve(logs, names, options.end, "endingOffsets")
            for name in names:
                last = logs.end(name)
                if end[name] > last:
                    raise InvalidOptionError(
                        f"the option endingOffsets is {end[name]:,} of {name!r}, which ends at {last:,}"
                    )
                if start[name] > end[name]:
                    raise InvalidOptionError(
                        f"the stream {name!r} would be read from offset {start[name]:,} to {end[name]:,}: "
                        "give an earlier startingOffsets or startingTimestamp, or a later endingOffsets or "
                        "endingTimestamp"
                    )
        return streams.tasks([OffsetRange(stream=name, start=start[name], end=end[name]) for name in names])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one range."""
        return self._streams.read(partition)


class StreamsQueryReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads streams as they grow. Spark calls it on the driver, but for :meth:`read`."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if options.max_offsets is not None and not LIMITS:
            raise InvalidOptionError(
                "the option maxOffsetsPerTrigger needs PySpark 4.2 or newer: older ones do not tell how far they are"
            )
        self._streams = _Streams(options, schema)
        self._logs: StreamLogs | None = None
        self._initial: dict[str, int] | None = None
        self._target: dict[str, int] | None = None
        self._known: dict[str, int] | None = None
        self._first: dict[str, int] = {}

    @property
    def _connected(self) -> StreamLogs:
        if self._logs is None:
            self._logs = StreamLogs(self._streams.address)
        return self._logs

    def initialOffset(self) -> Document:  # noqa: N802 (Spark's name)
        """Where a new query begins."""
        begin = self._begin()
        for name, offset in begin.items():
            if offset > (end := self._connected.end(name)):
                raise InvalidOptionError(f"the option startingOffsets is {offset:,} of {name!r}, which ends at {end:,}")
        return document(begin, initial=True)

    def _begin(self) -> dict[str, int]:
        """Where a new query begins, once and for all of this run."""
        if self._initial is None:
            logs = self._connected
            names = self._streams.names(logs)
            self._initial = self._streams.resolve(logs, names, self._streams.options.start, "startingOffsets")
        return self._initial

    def _begin_if_new(self) -> dict[str, int]:
        """Where the query begins if it is new, which PySpark before 4.2 does not tell.

        Options for new queries alone must not end an old one, whose super stream has grown since. Of a new query
        :meth:`initialOffset` refuses them.
        """
        try:
            return self._begin()
        except InvalidOptionError:
            return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The option ``maxOffsetsPerTrigger``."""
        most = self._streams.options.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read what is there now, and no more."""
        self._target = self._ends()

    def latestOffset(  # noqa: N802
        self, start: Mapping[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> Document:
        """Where the next batch ends. PySpark before 4.2 passes nothing.

        Raises:
            OffsetsLostError: a stream ends before what was read of it; not with ``failOnDataLoss=false``.
        """
        if start is None:
            # It may ask for this before it asks where the query begins, and the end has to tell that; or the query is
            # an old one, and some of its streams are new.
            begin, ends = self._begin_if_new(), self._ends()
            for stream in ends.keys() - self._first.keys():
                # Once: an end that differs from the last one makes a batch.
                self._first[stream] = self._connected.first(stream)
            return document(ends, since={stream: self._first[stream] for stream in ends}, begin=begin)
        known = positions_of(start)
        if self._target is not None and start.get("initial") and known == self._initial:
            # Spark asked for the target first: what came until it asked for the beginning lies before that.
            self._target = {
                stream: max(self._target.get(stream, 0), known.get(stream, 0))
                for stream in self._target.keys() | known.keys()
            }
        ends = self._target if self._target is not None else self._ends()
        since = {} if not start.get("initial") else dict(known)
        for stream in ends.keys() - known.keys():
            since[stream] = self._connected.first(stream)
        begin = {stream: known.get(stream, since.get(stream, 0)) for stream in ends}
        anew = self._check(known, begin, ends)
        if isinstance(limit, ReadMaxRows) and LIMITS:
            ends = limited(begin, ends, limit.max_rows)
        left_out = known.keys() - ends.keys()
        if not anew and not left_out and all(ends[stream] == begin[stream] for stream in ends):
            # The very same document, so that Spark sees that there is nothing new. Where data loss is allowed, what is
            # gone is: the checkpoint forgets it, and it is allowed once.
            return dict(start)
        return document(ends, since=since)

    def _ends(self) -> dict[str, int]:
        logs = self._connected
        self._known = {name: logs.end(name) for name in self._streams.names(logs)}
        return self._known

    def _check(
        self, known: Mapping[str, int], begin: dict[str, int], ends: Mapping[str, int], *, planned: bool = False
    ) -> bool:
        """Whether the streams are still those of the checkpoint; where not, and that is allowed, begin them anew.

        Args:
            planned: the ends are in the checkpoint already.

        Returns:
            Whether one begins anew: its old position holds no more, even if nothing is in it yet.
        """
        fail = self._streams.options.fail_on_data_loss
        gone = sorted(known.keys() - ends.keys())
        if gone and fail:
            who = (
                f"the batch that it has begun leaves out: {WAY_OUT_OF_LEFT_OUT}"
                if planned
                else f"the query does not read any more: {WAY_OUT_OF_UNREAD}"
            )
            raise InvalidOptionError(f"the checkpoint has positions of {', '.join(gone)}, which {who}")
        anew = False
        for stream, end in ends.items():
            if begin[stream] <= end:
                continue
            if fail:
                raise OffsetsLostError(
                    f"the stream {stream!r} was read up to offset {begin[stream]:,}, and now it ends at {end:,}: it "
                    f"was deleted and declared again. {WAY_OUT_OF_NEW}",
                    stream=stream,
                    offset=end,
                )
            begin[stream] = 0
            anew = True
        return anew

    def reportLatestOffset(self) -> Document | None:  # noqa: N802
        """Where the streams end, for the progress that Spark reports."""
        return None if self._known is None else document(self._known)

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """The ranges of a batch.

        Raises:
            OffsetsLostError: as :meth:`latestOffset`, which PySpark before 4.2 does not tell where the query is.
            InvalidOptionError: the batch does not have all streams, for the same reason.
        """
        begin, ends = begin_of(start, end), positions_of(end)
        self._check({} if start.get("initial") else positions_of(start), begin, ends, planned=True)
        return self._streams.tasks(
            [OffsetRange(stream=name, start=begin[name], end=ends[name]) for name in sorted(ends)]
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one range."""
        return self._streams.read(partition)

    def commit(self, end: Mapping[str, Any]) -> None:
        """Nothing: the checkpoint has it."""

    def stop(self) -> None:
        """Close the connections."""
        if self._logs is not None:
            self._logs.close()
