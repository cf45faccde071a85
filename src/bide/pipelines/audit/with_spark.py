"""Audits with Spark, of any size and in any file system."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import date, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 (the usual name)

from bide.pipelines.audit import facts, tables
from bide.pipelines.audit.columns import UNDECODABLE
from bide.pipelines.audit.fact_rows import TABLE_COLUMN
from bide.pipelines.audit.folder import Folder, Note
from bide.pipelines.audit.reading import FactReader
from bide.pipelines.audit.refresh import compact, refresh
from bide.pipelines.session import parallelism
from bide.spark.offsets import split
from bide.streams.range_reader import OffsetRange

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkAudit:
    """Engine for rounds in a Spark session.

    Args:
        folder: a folder that the driver and all executors can access.
    """

    def __init__(self, spark: SparkSession, folder: Folder) -> None:
        self._spark = spark
        self._folder = folder

    @cached_property
    def _tasks(self) -> int:
        return parallelism(self._spark)

    def append(self, reader: FactReader, ranges: Sequence[OffsetRange], batch: int) -> tuple[dict[str, int], set[date]]:
        """Append the facts of a batch. Returns the number of rows by table, and their days."""
        # Without the split, each stream would be read by a single task.
        tasks = split(ranges, self._tasks)
        numbers = self._spark.range(0, len(tasks), 1, len(tasks))
        # Persisted, because several tables are written from the facts, and reading the streams takes longest.
        read = numbers.mapInArrow(_make_reader(reader, tasks), facts.spark_schema(reader.source)).persist()
        counts: dict[str, int] = {}
        days: set[date] = set()
        try:
            grouped = read.groupBy(TABLE_COLUMN).agg(
                F.count(F.lit(1)).alias("rows"), F.collect_set("day").alias("days")
            )
            for found in grouped.collect():
                table = found[TABLE_COLUMN]
                place = f"{UNDECODABLE}/source={reader.source}" if table == UNDECODABLE else table
                self._folder.append(facts.rows_of_table(read, table), place, batch)
                counts[table] = found["rows"]
                days.update(found["days"])
        finally:
            read.unpersist()
        return counts, days

    def refresh(self, notes: Collection[Note], *, now: datetime) -> set[date]:
        """See :func:`bide.pipelines.audit.refresh.refresh`."""
        return refresh(self._spark, self._folder, notes, now=now)

    def compact(self, days: Collection[date]) -> None:
        """Merge the small batches of facts of these days."""
        compact(self._spark, self._folder, days)

    def pending(self) -> tuple[int, int]:
        """The number of pending messages, and how many of them are overdue."""
        found = self._folder.read(self._spark, "pending", tables.PENDING_SCHEMA)
        count, overdue = found.agg(F.sum("count"), F.sum("overdue")).collect()[0]
        return count or 0, overdue or 0


def _make_reader(reader: FactReader, tasks: Sequence[OffsetRange]) -> Callable[[Any], Iterator[pa.RecordBatch]]:
    """Make a function for ``mapInArrow``, whose input has the numbers of the ranges to read."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from reader.read(tasks[number])

    return read
