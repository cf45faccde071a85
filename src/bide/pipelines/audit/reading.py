"""Reading of a range of offsets by an audit, as facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from bide.errors import OffsetsLostError
from bide.pipelines.audit.fact_rows import facts_of, message_schema
from bide.pipelines.audit.positions import GAPS_ADVICE
from bide.spark.batches import RecordBatchBuilder
from bide.streams.chunk import Chunk
from bide.streams.log import Address
from bide.streams.range_reader import SPARK_GAP_ADVICE, OffsetRange, read_range


@dataclass(frozen=True, slots=True, kw_only=True)
class FactReader:
    """Reads the facts of a source, in this process or in a task of Spark.

    Attributes:
        address: the address of the broker's streams.
        source: one of :data:`bide.pipelines.audit.columns.TABLES_BY_SOURCE`.
        layouts: the layout of each stream of a tap.
        time_zone: the time zone of Celery's due times without an offset.
        allow_gaps: whether to leave out messages that a stream does not have any more.
    """

    address: Address
    source: str
    layouts: Mapping[str, str]
    time_zone: str
    allow_gaps: bool

    def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        """The facts of a range, as :func:`bide.pipelines.audit.fact_rows.facts_of` returns them.

        Raises:
            OffsetsLostError: the stream does not have all messages of the range any more, and gaps are not allowed.
            BrokerError: the range cannot be read.
        """
        # raw=True, because one undecodable message must not stop the audit of all others.
        batches = RecordBatchBuilder(message_schema(self.source), wanted.stream, raw=True)
        for chunk, first, last in chunks_of(self.address, wanted, allow_gaps=self.allow_gaps):
            for batch in batches.add(chunk, first, last):
                yield self._facts(batch)
        if batches.rows:
            yield self._facts(batches.take())

    def _facts(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return facts_of(batch, self.source, layouts=self.layouts, time_zone=self.time_zone)


def chunks_of(address: Address, wanted: OffsetRange, *, allow_gaps: bool) -> Iterator[tuple[Chunk, int, int]]:
    """The chunks of a range, as :func:`bide.streams.range_reader.read_range` returns them.

    Raises:
        OffsetsLostError: the stream does not have all messages of the range any more. The text has :data:`GAPS_ADVICE`.
        BrokerError: the range cannot be read.
    """
    try:
        yield from read_range(address, wanted, fail_on_data_loss=not allow_gaps)
    except OffsetsLostError as error:
        text = str(error).replace(SPARK_GAP_ADVICE, f"Continue with the remaining messages {GAPS_ADVICE}")
        raise OffsetsLostError(text, stream=error.stream, offset=error.offset, found=error.found) from error
