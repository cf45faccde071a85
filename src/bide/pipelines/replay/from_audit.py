"""Replay of failed messages from an audit, with the bodies from the streams of taps.

The tables of an audit have no bodies, so these are read from the streams of taps, as long as the streams keep them. A
read removes nothing from a stream, so a folder records what was sent. It has a subfolder for each choice of messages,
with the chosen messages, their due times, and a ledger of the parts that were sent. Another run of the same replay
finishes the last choice, and then makes a new choice without the messages of earlier ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 (the usual name)
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from bide.durations import from_microseconds
from bide.errors import InvalidInputError, NotFoundError
from bide.pipelines.audit import facts
from bide.pipelines.audit.folder import Folder
from bide.pipelines.formats import for_spark, to_read
from bide.pipelines.ledger import Head, Ledger, Part
from bide.pipelines.replay.run import choose, keep, spread
from bide.pipelines.replay.tap_reader import ReplayRun, Wanted, held_offsets, send_back
from bide.pipelines.spark_task_writer import write
from bide.spark.sink import TaskSent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

PART_ROWS: Final = 2_000
"""Messages in a part. After a task is killed, at most one part is sent again."""

_MAX_PARTS: Final = 10_000
"""The largest number of parts of a replay that is spread over time, because each part is a file in the ledger."""

COLUMNS: Final = (
    *("message_id", "type", "queue", "endpoint", "reason", "failed_at", "attempts", "exception", "text", "group"),
    *("sent", "due", "place"),
)
"""The columns that a filter can use. ``place`` is the number of the failure, with the oldest first."""

SKEW: Final = timedelta(seconds=10)
"""The largest expected difference between the clocks of senders, the broker and endpoints."""

FINAL: Final = ("parked", "discarded", "expired")
"""The final outcomes of a message at an endpoint, except for processed."""

_KEY: Final = ("message_id", "queue", "failed_at")
_CHOSEN: Final = (*_KEY, "stream", "offset", "deliver_at", "part")


def failures(spark: SparkSession, folder: Folder) -> DataFrame:
    """The failed messages of an audit, with the columns of :data:`COLUMNS`.

    There is one row for each message and queue, with its last outcome. Messages that wait for a retry or were processed
    in the end are left out.
    """
    schema = facts.SCHEMAS["failed"]
    failed = folder.read(spark, "failed", schema)
    processed = folder.read(spark, "processed", facts.SCHEMAS["processed"]).withColumn("kind", F.lit("processed"))
    both = failed.unionByName(processed, allowMissingColumns=True).where("message_id is not null and queue is not null")
    last = both.groupBy("message_id", "queue").agg(
        F.max_by(F.struct(*schema.names), F.struct("ended", "stream", "offset")).alias("last"),
        F.count_if(F.col("kind").isin("failed", "retried", "parked", "discarded")).alias("attempts"),
    )
    known = {name: F.col(name) for name in ("message_id", "queue", "attempts")}
    known |= {"reason": F.col("last.kind"), "failed_at": F.col("last.ended")}
    found = last.where(F.col("last.kind").isin(*FINAL)).select(
        *(known.get(name, F.col(f"last.`{name}`")).alias(name) for name in COLUMNS if name != "place")
    )
    order = Window.orderBy("failed_at", "message_id", "queue")
    return found.withColumn("place", F.row_number().over(order) - 1)


def locate(chosen: DataFrame, folder: Folder) -> DataFrame:
    """Add ``stream`` and ``offset`` of the newest copy of each message in a tap; null if no tap has one.

    Applications may reuse a message id for another message. A copy belongs to another message if bide sent it at
    another time, or if another system sent it and it was due after the failure.
    """
    spark = chosen.sparkSession
    seen = [
        folder.read(spark, table, facts.SCHEMAS[table]).select(
            *("message_id", "target", "stream", "offset", "layout"),
            F.col("sent").alias("copy_sent"),
            # The due time rather than the time of the tap, so that both taps have the same time for a message.
            F.coalesce("due", table).alias("at"),
            F.lit(rank).alias("rank"),
        )
        for rank, table in enumerate(("scheduled", "delivered"))
    ]
    failure = chosen.select("message_id", "queue", "failed_at", "sent")
    copies = seen[0].unionByName(seen[1]).join(failure, "message_id")
    # Retries and replays keep the time of sending, which events have in whole milliseconds and NServiceBus in finer
    # units. The first retry by bide changes the time of a message from NServiceBus.
    as_sent = F.abs(F.unix_millis("sent") - F.unix_millis("copy_sent")) <= 1
    same = F.when(as_sent | ~F.col("layout").startswith("nservicebus"), as_sent)
    in_time = F.col("at") <= F.col("failed_at") + F.lit(SKEW)
    # An event may have been routed to several queues, and be retried for one of them.
    is_its = F.col("target") == F.concat(F.lit("q:"), F.col("queue"))
    matches = (F.coalesce(column, F.lit(False)) for column in (same, is_its))
    newest = F.struct(*matches, in_time, "at", "rank", "offset")
    places = (
        copies.where(F.coalesce(same, in_time))
        .groupBy("message_id", "queue")
        .agg(F.max_by(F.struct("stream", "offset"), newest).alias("copy"))
    )
    joined = chosen.join(places, ["message_id", "queue"], "left")
    return joined.select(*chosen.columns, "copy.stream", "copy.offset")


def mark_existing(url: str, located: DataFrame) -> DataFrame:
    """Add ``there``: whether the stream still has the offset. The message id is compared when the message is sent.

    Raises:
        BrokerError: the broker cannot be reached, or refuses.
    """
    highest = located.where("stream is not null").groupBy("stream").agg(F.max("offset").alias("offset")).collect()
    there = F.lit(False)
    for stream, held in held_offsets(url, {row["stream"]: row["offset"] for row in highest}).items():
        there = there | ((F.col("stream") == stream) & F.col("offset").between(held.start, held.stop - 1))
    return located.withColumn("there", F.coalesce(there, F.lit(False)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Messages to replay, and counts of messages that cannot be replayed.

    Attributes:
        messages: messages that a stream has, with ``stream`` and ``offset``; cached by Spark.
        parked: messages that were left out because they are in an error queue.
        unseen: messages that no tap has seen.
        dropped: messages that the streams of the taps do not have any more.
    """

    messages: DataFrame
    parked: int
    unseen: int
    dropped: int

    def refuse_missing(self) -> None:
        """Refuse a replay without the bodies of all messages.

        Raises:
            NotFoundError: bodies are missing.
        """
        missing = [
            f"{count:,} {what}"
            for count, what in (
                (self.unseen, "that no tap has seen (the tap was off, or the messages were never delayed)"),
                (self.dropped, "that the retention of a tap's stream has removed, or whose stream was deleted"),
            )
            if count
        ]
        if missing:
            raise NotFoundError(
                f"the bodies of some messages are missing, and nothing was sent: {' and '.join(missing)}. Send the "
                "others with skip_missing=True; parked messages are in an error queue too, which queue=... replays"
            )


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
) -> Found:
    """Choose failures of an audit that are in no earlier choice, and find their messages.

    Args:
        url: the URL of the broker, with the password.
        where: a condition in SQL on :data:`COLUMNS`.
        limit: at most this many failures, the oldest ones.
        parked: include messages in an error queue, where they remain.
        skip_missing: apply the limit to messages that exist. Otherwise, missing messages would use up the limit in each
            run.

    Raises:
        InvalidInputError: the condition is invalid.
        BrokerError: the broker cannot be reached, or refuses.
    """
    known = keep(choose(choices.without_earlier(failures(spark, folder)), where=where), where)
    left_out = 0 if parked else known.where("reason = 'parked'").count()
    chosen = choose(known, where=None if parked else "reason <> 'parked'", limit=None if skip_missing else limit)
    placed = mark_existing(url, locate(chosen, folder).persist()).persist()
    (counts,) = placed.agg(
        F.count_if(F.col("stream").isNull()).alias("unseen"),
        F.count_if(F.col("stream").isNotNull() & ~F.col("there")).alias("dropped"),
    ).collect()
    messages = choose(placed.where("there"), limit=limit)
    return Found(messages=messages, parked=left_out, unseen=counts["unseen"], dropped=counts["dropped"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The folder with the choices of a replay, and the ledgers of what was sent.

    Attributes:
        folder: a path, or a URI that Spark and Arrow support, which the driver and all executors can access.
    """

    folder: str

    def lock(self) -> AbstractContextManager[None]:
        """Lock the folder against other runs. The lock of a dead process is taken over.

        Hold the lock from the call of :meth:`unfinished` until all messages are sent: two runs at the same time would
        choose the same messages.

        Raises:
            FolderInUseError: on entering the context, if another run holds the lock.
            InvalidInputError: on entering the context, if the folder cannot be created or written to.
        """
        return Ledger(self.folder).lock()

    def ledger(self, number: int) -> Ledger:
        """The ledger of a choice; the first one is number 1."""
        return Ledger(f"{self.folder.rstrip('/')}/{number:04}")

    def count(self) -> int:
        """The number of choices so far."""
        number = 0
        while self.ledger(number + 1).head() is not None:
            number += 1
        return number

    def unfinished(self, plan: str, broker: str) -> Ledger | None:
        """The ledger of the last choice, if some of its messages were not sent.

        Raises:
            InvalidInputError: the choice was made with other options.
        """
        number = self.count()
        if not number:
            return None
        ledger = self.ledger(number)
        head = ledger.head()
        assert head is not None
        if sum(one.sent + one.rejected for one in ledger.parts()) >= head.rows:
            return None
        if (head.plan, head.broker) != (plan, broker):
            raise InvalidInputError(
                f"the ledger {self.folder} has an unfinished replay to the broker {head.broker}, with other options: "
                "repeat that replay to finish it, or name another ledger"
            )
        return ledger

    def without_earlier(self, failures: DataFrame) -> DataFrame:
        """The failures that are in no earlier choice."""
        folders = [for_spark(self.ledger(number + 1).folder, "chosen") for number in range(self.count())]
        if not folders:
            return failures
        earlier = failures.sparkSession.read.parquet(*map(to_read, folders)).select(*_KEY)
        return failures.join(earlier, list(_KEY), "left_anti")

    def make(
        self,
        messages: DataFrame,
        over: timedelta = timedelta(0),
        *,
        plan: str,
        broker: str,
        part_rows: int = PART_ROWS,
    ) -> Ledger:
        """Record a choice, before any of its messages is sent.

        Hold :meth:`lock` since before the messages were found.

        Args:
            messages: the chosen messages, with ``stream`` and ``offset``.
            over: spread the due times evenly over this time, from now on.
            plan: a digest of the options.
            broker: hosts, ports and virtual host of the broker.
            part_rows: the number of messages in a part, which is sent and recorded as a whole.
        """
        ledger = self.ledger(self.count() + 1)
        order: tuple[str, ...] = ("stream", "offset", "queue")
        if over:
            # Each part is sent when its last message is due, so parts of about one second keep messages on time.
            seconds = min(max(over.total_seconds(), 1), _MAX_PARTS)
            part_rows = min(part_rows, max(math.ceil(messages.count() / seconds), 1))
            order = ("deliver_at", *order)
        part = F.floor((F.row_number().over(Window.orderBy(*order)) - 1) / part_rows).cast("int")
        rows = spread(messages, over, begin=datetime.now(UTC)).withColumn("part", part)
        rows.select(*_CHOSEN).write.mode("overwrite").parquet(for_spark(ledger.folder, "chosen"))
        count = chosen_of(messages.sparkSession, ledger).count()
        ledger.begin(Head(plan=plan, broker=broker, rows=count, checksum=0, parts=-(-count // part_rows)))
        return ledger


def chosen_of(spark: SparkSession, ledger: Ledger) -> DataFrame:
    """The messages of a choice, with their due times (``deliver_at``) and parts."""
    return spark.read.parquet(to_read(for_spark(ledger.folder, "chosen")))


def remaining_of(spark: SparkSession, ledger: Ledger) -> DataFrame:
    """The messages of a choice whose parts were not sent."""
    return chosen_of(spark, ledger).where(~F.col("part").isin(sorted(ledger.numbers())))


def send(
    spark: SparkSession, ledger: Ledger, replay: ReplayRun, *, to: str | None = None, skip_missing: bool = False
) -> DataFrame:
    """Send the messages of a choice whose parts are not in the ledger.

    If the due times are spread over time, this process sends each part when its last message is due; an interruption
    takes effect after the current part. If the first message is overdue, all due times are shifted, so that the rest of
    an interrupted run keeps its spread.

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
            writer = _ReplayPartWriter(ledger=ledger, replay=replay, skip_missing=skip_missing)
            times = rows.groupBy("part").agg(F.min("due").alias("first"), F.max("due").alias("last")).collect()
            if min(row["first"] for row in times) == max(row["last"] for row in times):
                write(rows.drop("due").repartition(head.parts, "part"), writer)
            else:
                _send_when_due(rows, times, writer)
    found = [(one.part, one.sent, one.rejected) for one in ledger.parts() if one.part not in done]
    return spark.createDataFrame(found, "part int, sent long, rejected long")


def _send_when_due(messages: DataFrame, times: list[Row], writer: _ReplayPartWriter) -> None:
    """Send parts in the order of their due times, each when its last message is due."""
    due = {row["part"]: row["last"] for row in times}
    late = max(datetime.now(UTC) - from_microseconds(min(row["first"] for row in times)), timedelta(0))
    rows = messages.orderBy("part").toLocalIterator()
    for number, part in groupby(rows, key=lambda row: row["part"]):
        wanted = [_wanted(row.asDict()) for row in part]
        wait = from_microseconds(due[number]) + late - datetime.now(UTC)
        time.sleep(max(wait.total_seconds(), 0.0))  # until the part is due
        with ThreadPoolExecutor(1, thread_name_prefix="replay") as thread:
            sending = thread.submit(writer.send, number, wanted)
            # On an interruption, the end of the block waits until the part is sent and recorded.
            sending.result()


def run_of(ledger: Ledger) -> str:
    """An id of the operation, which stays the same when an interrupted replay is continued."""
    return hashlib.sha256(ledger.folder.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplayPartWriter(DataSourceArrowWriter):
    """Sends parts in a task, and adds them to the ledger."""

    ledger: Ledger
    replay: ReplayRun
    skip_missing: bool

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        parts: defaultdict[int, list[Wanted]] = defaultdict(list)
        for batch in iterator:
            for row in batch.to_pylist():
                parts[row["part"]].append(_wanted(row))
        confirmed = rejected = 0
        for number, wanted in sorted(parts.items()):
            sent = self.send(number, wanted)
            confirmed, rejected = confirmed + sent.confirmed, rejected + sent.rejected
        return TaskSent(confirmed=confirmed, rejected=rejected)

    def send(self, number: int, wanted: list[Wanted]) -> TaskSent:
        """Send a part, and add it to the ledger."""
        # Another attempt at the same task may have sent the part.
        if self.ledger.get(number) is not None:
            return TaskSent(confirmed=0)
        sent = asyncio.run(send_back(wanted, self.replay, skip_missing=self.skip_missing))
        self.ledger.add(Part(part=number, sent=sent, rejected=len(wanted) - sent))
        return TaskSent(confirmed=sent, rejected=len(wanted) - sent)


def _wanted(row: dict[str, Any]) -> Wanted:
    return Wanted(message_id=row["message_id"], queue=row["queue"], stream=row["stream"], offset=row["offset"])
