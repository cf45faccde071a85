"""Replay of an audit on Spark, with the bodies from the streams of taps.

The tables of an audit have no bodies, so these are read from the streams of taps, as long as the streams keep them.
:mod:`bide.pipelines.replay.small_audit` does the same without Spark.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 (the usual name)
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from bide.pipelines.audit import facts
from bide.pipelines.audit.folder import Folder
from bide.pipelines.formats import escape_pattern_characters, spark_uri
from bide.pipelines.ledger import Ledger, LedgerHead
from bide.pipelines.replay import queries
from bide.pipelines.replay.choices import (
    CHOSEN_FOLDER,
    COLUMNS,
    FAILURE_KEY,
    PART_ROWS,
    Choices,
    NotReplayedCounts,
    order_of,
    rows_per_part,
)
from bide.pipelines.replay.parts import PartSender
from bide.pipelines.replay.run import choose, evaluate_and_cache, spread
from bide.pipelines.replay.tap_reader import ReplayMessage, ReplayRun, available_offsets
from bide.pipelines.spark_task_writer import write
from bide.spark.sink import TaskCommitMessage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOnSpark(NotReplayedCounts):
    """Messages to replay, and counts of messages that are not replayed.

    Attributes:
        messages: messages that a stream has, with ``stream`` and ``offset``; cached by Spark.
    """

    messages: DataFrame


def failures(spark: SparkSession, folder: Folder) -> DataFrame:
    """The failed messages of an audit; see :func:`bide.pipelines.replay.queries.failures`."""
    tables = _read(spark, folder, "failed", "processed")
    return spark.sql(queries.failures("{failed}", "{processed}"), **tables)  # type: ignore[arg-type]  # tables by name


def locate(chosen: DataFrame, folder: Folder) -> DataFrame:
    """Add the places of copies in taps; see :func:`bide.pipelines.replay.queries.located`."""
    spark = chosen.sparkSession
    tables = _read(spark, folder, "scheduled", "delivered")
    query = queries.located("{chosen}", "{scheduled}", "{delivered}")
    return spark.sql(query, chosen=chosen, **tables)  # type: ignore[arg-type]  # tables by name


def _read(spark: SparkSession, folder: Folder, *tables: str) -> dict[str, DataFrame]:
    return {table: folder.read(spark, table, facts.SCHEMAS[table]) for table in tables}


def mark_existing(url: str, located: DataFrame) -> DataFrame:
    """Add ``in_stream``: whether the stream still has the offset. The message id is compared when the message is sent.

    Raises:
        BrokerError: the broker cannot be reached, or refuses.
    """
    highest = located.where("stream is not null").groupBy("stream").agg(F.max("offset").alias("offset")).collect()
    in_stream = F.lit(False)
    for stream, held in available_offsets(url, {row["stream"]: row["offset"] for row in highest}).items():
        in_stream = in_stream | ((F.col("stream") == stream) & F.col("offset").between(held.start, held.stop - 1))
    return located.withColumn("in_stream", F.coalesce(in_stream, F.lit(False)))


def find(
    spark: SparkSession,
    folder: Folder,
    choices: Choices,
    *,
    url: str,
    where: str | None = None,
    limit: int | None = None,
    parked: bool = False,
    skip_missing: bool = False,
) -> FoundOnSpark:
    """Choose failures of an audit that are in no earlier choice, and find their messages.

    Args:
        url: the URL of the broker, with the password.
        where: a condition in SQL on :data:`bide.pipelines.replay.queries.COLUMNS`.
        limit: at most this many failures, the oldest ones.
        parked: include messages in an error queue, where they remain.
        skip_missing: apply the limit to messages that exist. Otherwise, missing messages would use up the limit in each
            run.

    Raises:
        InvalidInputError: the condition is invalid.
        BrokerError: the broker cannot be reached, or refuses.
    """
    # An audit in this process adds files without Spark, whose cache of an earlier search does not know them.
    spark.catalog.refreshByPath(spark_uri(folder.place))
    known = evaluate_and_cache(choose(without_earlier(failures(spark, folder), choices), where=where), where)
    left_out = 0 if parked else known.where("reason = 'parked'").count()
    chosen = choose(known, where=None if parked else "reason <> 'parked'", limit=None if skip_missing else limit)
    placed = mark_existing(url, locate(chosen, folder).persist()).persist()
    (counts,) = placed.agg(
        F.count_if(F.col("stream").isNull()).alias("unseen"),
        F.count_if(F.col("stream").isNotNull() & ~F.col("in_stream")).alias("dropped"),
    ).collect()
    messages = choose(placed.where("in_stream"), limit=limit)
    return FoundOnSpark(messages=messages, parked=left_out, unseen=counts["unseen"], dropped=counts["dropped"])


def without_earlier(failures: DataFrame, choices: Choices) -> DataFrame:
    """The failures that are in no earlier choice."""
    folders = [escape_pattern_characters(spark_uri(ledger.folder, CHOSEN_FOLDER)) for ledger in choices.all()]
    if not folders:
        return failures
    earlier = failures.sparkSession.read.parquet(*folders).select(*FAILURE_KEY)
    return failures.join(earlier, list(FAILURE_KEY), "left_anti")


def record(
    choices: Choices,
    messages: DataFrame,
    over: timedelta = timedelta(0),
    *,
    plan: str,
    broker: str,
    part_rows: int = PART_ROWS,
) -> Ledger:
    """Record a choice, before any of its messages is sent.

    Hold :meth:`~bide.pipelines.replay.choices.Choices.lock` since before the messages were found.

    Args:
        messages: the chosen messages, with ``stream`` and ``offset``.
        over: spread the due times evenly over this time, from now on.
        plan: a digest of the options.
        broker: hosts, ports and virtual host of the broker.
        part_rows: the largest number of messages in a part, which is sent and recorded as a whole.
    """
    ledger = choices.next()
    if over:
        part_rows = rows_per_part(messages.count(), over, part_rows)
    part = F.floor((F.row_number().over(Window.orderBy(*order_of(over))) - 1) / part_rows).cast("int")
    rows = spread(messages, over, begin=datetime.now(UTC)).withColumn("part", part)
    rows.select(*COLUMNS).write.mode("overwrite").parquet(spark_uri(ledger.folder, CHOSEN_FOLDER))
    count = chosen_of(messages.sparkSession, ledger).count()
    ledger.begin(LedgerHead(plan=plan, broker=broker, rows=count, checksum=0, parts=-(-count // part_rows)))
    return ledger


def chosen_of(spark: SparkSession, ledger: Ledger) -> DataFrame:
    """The messages of a choice, with their due times (``deliver_at``) and parts."""
    return spark.read.parquet(escape_pattern_characters(spark_uri(ledger.folder, CHOSEN_FOLDER)))


def remaining_of(spark: SparkSession, ledger: Ledger) -> DataFrame:
    """The messages of a choice whose parts were not sent."""
    return chosen_of(spark, ledger).where(~F.col("part").isin(sorted(ledger.numbers())))


def send(
    spark: SparkSession, ledger: Ledger, replay: ReplayRun, *, to: str | None = None, skip_missing: bool = False
) -> DataFrame:
    """Send the messages of a choice whose parts are not in the ledger.

    Tasks send the parts. If the due times are spread over time, this process sends each part when its last message is
    due; an interruption takes effect after the current part. If the first message is overdue, all due times are
    shifted, so that the rest of an interrupted run keeps its spread.

    Args:
        to: a queue to send all messages to, rather than to the queues on which they failed.
        skip_missing: continue if a stream has dropped a message since the choice was made.

    Returns:
        A table with a row for each part that was sent: ``part``, ``sent`` and ``rejected`` (missing messages).

    Raises:
        FolderInUseError: another run is sending this choice.
        NotFoundError: a stream has dropped a message since the choice was made.
        PySparkException: a task failed, with the error of bide in its message.
    """
    with ledger.lock():
        done = ledger.numbers()
        rows = remaining_of(spark, ledger)
        if to is not None:
            rows = rows.withColumn("queue", F.lit(to))
        rows = rows.select("part", "message_id", "queue", "stream", "offset", F.unix_micros("deliver_at").alias("due"))
        head = ledger.head()
        assert head is not None
        if len(done) < head.parts:
            sender = PartSender(ledger=ledger, replay=replay, skip_missing=skip_missing)
            times = rows.groupBy("part").agg(F.min("due").alias("first"), F.max("due").alias("last")).collect()
            if min(row["first"] for row in times) == max(row["last"] for row in times):
                write(rows.drop("due").repartition(head.parts, "part"), _ReplayPartWriter(sender))
            else:
                _send_when_due(rows, times, sender)
    found = [(one.part, one.sent, one.rejected) for one in ledger.parts() if one.part not in done]
    return spark.createDataFrame(found, "part int, sent long, rejected long")


def _send_when_due(messages: DataFrame, times: list[Row], sender: PartSender) -> None:
    rows = messages.orderBy("part").toLocalIterator()
    sender.send_when_due(
        (
            (part, [_replay_message(row.asDict()) for row in some])
            for part, some in groupby(rows, key=lambda row: row["part"])
        ),
        {row["part"]: row["last"] for row in times},
        first=min(row["first"] for row in times),
    )


@dataclass(frozen=True, slots=True)
class _ReplayPartWriter(DataSourceArrowWriter):
    """Sends parts in a task."""

    sender: PartSender

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        parts: defaultdict[int, list[ReplayMessage]] = defaultdict(list)
        for batch in iterator:
            for row in batch.to_pylist():
                parts[row["part"]].append(_replay_message(row))
        sent = [self.sender.send(number, wanted) for number, wanted in sorted(parts.items())]
        return TaskCommitMessage(confirmed=sum(one.sent for one in sent), rejected=sum(one.rejected for one in sent))


def _replay_message(row: dict[str, Any]) -> ReplayMessage:
    return ReplayMessage(message_id=row["message_id"], queue=row["queue"], stream=row["stream"], offset=row["offset"])
