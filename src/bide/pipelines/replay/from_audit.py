"""Failed messages of an audit: which ones, where a tap's stream has them, and back to where they failed.

The tables of an audit have no bodies: these come out of the streams of the taps, as long as those keep them. Nothing is
taken out of a stream, so that what was sent has to be written down: in a folder with a subfolder for each choice that
was made, which holds the choice itself with its due times, and a ledger of the parts of it that were sent. The same
replay again finishes the last choice, and then makes a new one without what was in the earlier ones.
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
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)
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
from bide.spark.sink import Sent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

PART_ROWS: Final = 2_000
"""Messages of a part: what is repeated at most for each task that is killed."""

_MOST_PARTS: Final = 10_000
"""Of a replay that is spread over a time: more files in the ledger would take longer than they help."""

COLUMNS: Final = (
    *("message_id", "type", "queue", "endpoint", "reason", "failed_at", "attempts", "exception", "text", "group"),
    *("sent", "due", "place"),
)
"""What a filter can ask for. ``place`` is the number of the failure, the oldest first."""

SKEW: Final = timedelta(seconds=10)
"""So far the clocks of senders, of the broker and of endpoints may be apart."""

FINAL: Final = ("parked", "discarded", "expired")
"""What an endpoint may have done with a message for good, other than to process it."""

_KEY: Final = ("message_id", "queue", "failed_at")
_CHOSEN: Final = (*_KEY, "stream", "offset", "deliver_at", "part")


def failures(spark: SparkSession, folder: Folder) -> DataFrame:
    """The messages with which endpoints ended otherwise than by processing them: the columns of :data:`COLUMNS`.

    Each message is there once for each queue, with what befell it there last. One that waits for a retry, or was
    processed after all, is not.
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


def located(chosen: DataFrame, folder: Folder) -> DataFrame:
    """With ``stream`` and ``offset`` of the newest copy that a tap has seen of it; null where none has.

    Ids are used again, with other bodies. What bide sent at another time than the message that failed is another one;
    of what others sent, what was due after the failure.
    """
    spark = chosen.sparkSession
    seen = [
        folder.read(spark, table, facts.SCHEMAS[table]).select(
            *("message_id", "target", "stream", "offset", "layout"),
            F.col("sent").alias("copy_sent"),
            # Not when it was seen: of one message, both taps are to tell the same time.
            F.coalesce("due", table).alias("at"),
            F.lit(rank).alias("rank"),
        )
        for rank, table in enumerate(("scheduled", "delivered"))
    ]
    failure = chosen.select("message_id", "queue", "failed_at", "sent")
    copies = seen[0].unionByName(seen[1]).join(failure, "message_id")
    # Retries and replays keep the time of sending, which endpoints tell in whole milliseconds and NServiceBus does not.
    # What that sent gets another one with its first retry by bide.
    as_sent = F.abs(F.unix_millis("sent") - F.unix_millis("copy_sent")) <= 1
    same = F.when(as_sent | ~F.col("layout").startswith("nservicebus"), as_sent)
    in_time = F.col("at") <= F.col("failed_at") + F.lit(SKEW)
    # An event may have gone to several queues, and come back to one of them for a retry.
    is_its = F.col("target") == F.concat(F.lit("q:"), F.col("queue"))
    known = (F.coalesce(column, F.lit(False)) for column in (same, is_its))
    newest = F.struct(*known, in_time, "at", "rank", "offset")
    places = (
        copies.where(F.coalesce(same, in_time))
        .groupBy("message_id", "queue")
        .agg(F.max_by(F.struct("stream", "offset"), newest).alias("copy"))
    )
    joined = chosen.join(places, ["message_id", "queue"], "left")
    return joined.select(*chosen.columns, "copy.stream", "copy.offset")


def is_there(url: str, located: DataFrame) -> DataFrame:
    """With ``there``: whether the stream has a message at the offset. That it is this one is seen when it is sent.

    Raises:
        BrokerError: the broker cannot be asked.
    """
    highest = located.where("stream is not null").groupBy("stream").agg(F.max("offset").alias("offset")).collect()
    there = F.lit(False)
    for stream, held in held_offsets(url, {row["stream"]: row["offset"] for row in highest}).items():
        there = there | ((F.col("stream") == stream) & F.col("offset").between(held.start, held.stop - 1))
    return located.withColumn("there", F.coalesce(there, F.lit(False)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Messages to send back, and those that cannot be.

    Attributes:
        messages: that are there, with ``stream`` and ``offset``; kept by Spark.
        parked: how many more were left out because they lie in an error queue.
        unseen: how many no tap has seen.
        dropped: how many the streams of the taps do not have any more.
    """

    messages: DataFrame
    parked: int
    unseen: int
    dropped: int

    def refuse_missing(self) -> None:
        """See whether the bodies of all are there.

        Raises:
            NotFoundError: some are not.
        """
        said = [
            f"{count:,} {what}"
            for count, what in (
                (self.unseen, "that no tap has seen (it was off, or they were never delayed)"),
                (self.dropped, "that the limits of a tap's stream dropped, or the stream is gone"),
            )
            if count
        ]
        if said:
            raise NotFoundError(
                "the bodies of some messages are not there, and nothing was sent: "
                f"{' and '.join(said)}. Send the others with --skip-missing; those that were parked are in an error "
                "queue too, which --queue replays"
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
    """Choose failures of an audit that no earlier choice has, and look for their messages.

    Args:
        url: the broker's, with the password.
        where: a condition in SQL on :data:`COLUMNS`.
        limit: only the oldest ones.
        parked: also those that lie in an error queue, where they stay.
        skip_missing: the limit is one of messages that are there. Else those that are not would stand before the
            others for ever.

    Raises:
        InvalidInputError: Spark cannot read the condition.
        BrokerError: the broker cannot be asked.
    """
    known = keep(choose(choices.without_earlier(failures(spark, folder)), where=where), where)
    left_out = 0 if parked else known.where("reason = 'parked'").count()
    chosen = choose(known, where=None if parked else "reason <> 'parked'", limit=None if skip_missing else limit)
    placed = is_there(url, located(chosen, folder).persist()).persist()
    (counts,) = placed.agg(
        F.count_if(F.col("stream").isNull()).alias("unseen"),
        F.count_if(F.col("stream").isNotNull() & ~F.col("there")).alias("dropped"),
    ).collect()
    messages = choose(placed.where("there"), limit=limit)
    return Found(messages=messages, parked=left_out, unseen=counts["unseen"], dropped=counts["dropped"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The folder in which choices and what was sent of them are written down.

    Attributes:
        folder: a path, or a URI that Spark and Arrow know, which the driver and all executors reach.
    """

    folder: str

    def lock(self) -> AbstractContextManager[None]:
        """Keep other runs from this folder, from before one looks what is unfinished until all is sent.

        Two that chose at the same time would choose the same messages. A lock that a dead process has left does not
        count.

        Raises:
            FolderInUseError: entering it, another run has it.
            InvalidInputError: entering it, the folder cannot be made or written.
        """
        return Ledger(self.folder).lock()

    def ledger(self, number: int) -> Ledger:
        """The ledger of a choice, from 1 on."""
        return Ledger(f"{self.folder.rstrip('/')}/{number:04}")

    def count(self) -> int:
        """How many choices were made."""
        number = 0
        while self.ledger(number + 1).head() is not None:
            number += 1
        return number

    def unfinished(self, plan: str, broker: str) -> Ledger | None:
        """The last choice, if something of it was not sent.

        Raises:
            InvalidInputError: it was made with other options.
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
                f"the ledger {self.folder} has a replay that was not finished, to the broker {head.broker} or with "
                "other options: repeat those to finish it, or name another ledger"
            )
        return ledger

    def without_earlier(self, failures: DataFrame) -> DataFrame:
        """Those failures that no earlier choice has."""
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
        """Write a choice down, with due times that are evenly spread from now on, before anything of it is sent.

        Hold :meth:`lock` since before the messages were looked for.

        Args:
            messages: with ``stream`` and ``offset``.
            plan: a digest of how they were chosen and are sent.
            broker: where to.
            part_rows: messages that are sent, and written down as sent, together.
        """
        ledger = self.ledger(self.count() + 1)
        order: tuple[str, ...] = ("stream", "offset", "queue")
        if over:
            # Parts are sent one after the other, each as a whole: about one each second.
            seconds = min(max(over.total_seconds(), 1), _MOST_PARTS)
            part_rows = min(part_rows, max(math.ceil(messages.count() / seconds), 1))
            order = ("deliver_at", *order)
        part = F.floor((F.row_number().over(Window.orderBy(*order)) - 1) / part_rows).cast("int")
        rows = spread(messages, over, begin=datetime.now(UTC)).withColumn("part", part)
        rows.select(*_CHOSEN).write.mode("overwrite").parquet(for_spark(ledger.folder, "chosen"))
        count = chosen_of(messages.sparkSession, ledger).count()
        ledger.begin(Head(plan=plan, broker=broker, rows=count, checksum=0, parts=-(-count // part_rows)))
        return ledger


def chosen_of(spark: SparkSession, ledger: Ledger) -> DataFrame:
    """The messages of a choice, with their due times, ``deliver_at``, and their parts."""
    return spark.read.parquet(to_read(for_spark(ledger.folder, "chosen")))


def left_of(spark: SparkSession, ledger: Ledger) -> DataFrame:
    """Those of them whose parts were not sent."""
    return chosen_of(spark, ledger).where(~F.col("part").isin(sorted(ledger.numbers())))


def send(
    spark: SparkSession, ledger: Ledger, way: ReplayRun, *, to: str | None = None, skip_missing: bool = False
) -> DataFrame:
    """Send the messages of a choice whose parts the ledger does not have.

    Where they are spread over a time, this process sends each part when all of it is due, and an interruption lets it
    finish the part that it is at. If the first is due already, all due times are moved on by that: so what an earlier
    run left is spread as it was.

    Args:
        to: the queue to send all of them to, rather than to those that they failed on.
        skip_missing: go on where a stream dropped a message since the choice was made.

    Returns:
        ``part``, ``sent`` and ``rejected`` (not there any more): a row for each part that was sent.

    Raises:
        FolderInUseError: another run goes on with this choice.
        NotFoundError: a stream dropped a message since the choice was made.
        PySparkException: a task failed, with the error of bide in its message.
    """
    with ledger.lock():
        done = ledger.numbers()
        left = left_of(spark, ledger)
        if to is not None:
            left = left.withColumn("queue", F.lit(to))
        left = left.select("part", "message_id", "queue", "stream", "offset", F.unix_micros("deliver_at").alias("due"))
        head = ledger.head()
        assert head is not None
        if len(done) < head.parts:
            writer = _ReplayPartWriter(ledger=ledger, way=way, skip_missing=skip_missing)
            times = left.groupBy("part").agg(F.min("due").alias("first"), F.max("due").alias("last")).collect()
            if min(row["first"] for row in times) == max(row["last"] for row in times):
                write(left.drop("due").repartition(head.parts, "part"), writer)
            else:
                _send_when_due(left, times, writer)
    found = [(one.part, one.sent, one.rejected) for one in ledger.parts() if one.part not in done]
    return spark.createDataFrame(found, "part int, sent long, rejected long")


def _send_when_due(left: DataFrame, times: list[Row], writer: _ReplayPartWriter) -> None:
    """Send parts in the order of their due times, each when the last message of it is due."""
    due = {row["part"]: row["last"] for row in times}
    late = max(datetime.now(UTC) - from_microseconds(min(row["first"] for row in times)), timedelta(0))
    rows = left.orderBy("part").toLocalIterator()
    for number, some in groupby(rows, key=lambda row: row["part"]):
        wanted = [_wanted(row.asDict()) for row in some]
        wait = from_microseconds(due[number]) + late - datetime.now(UTC)
        time.sleep(max(wait.total_seconds(), 0.0))
        with ThreadPoolExecutor(1, thread_name_prefix="replay") as thread:
            sending = thread.submit(writer.send, number, wanted)
            # An interruption waits, by the end of the block, for the part to be sent and written down.
            sending.result()


def run_of(ledger: Ledger) -> str:
    """Names the operation, the same whenever it goes on."""
    return hashlib.sha256(ledger.folder.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplayPartWriter(DataSourceArrowWriter):
    """Sends parts, and writes them down: what a task does."""

    ledger: Ledger
    way: ReplayRun
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
        return Sent(confirmed=confirmed, rejected=rejected)

    def send(self, number: int, wanted: list[Wanted]) -> Sent:
        """Send a part, and write it down."""
        # Another attempt at the same task may have sent it.
        if self.ledger.get(number) is not None:
            return Sent(confirmed=0)
        sent = asyncio.run(send_back(wanted, self.way, skip_missing=self.skip_missing))
        self.ledger.add(Part(part=number, sent=sent, rejected=len(wanted) - sent))
        return Sent(confirmed=sent, rejected=len(wanted) - sent)


def _wanted(row: dict[str, Any]) -> Wanted:
    return Wanted(message_id=row["message_id"], queue=row["queue"], stream=row["stream"], offset=row["offset"])
