"""Send failed messages back to where they failed, chosen in SQL and spread over time.

The messages of an error queue become a table (:func:`failed`) of which some are chosen (:func:`choose`) and given their
due times (:func:`spread`); nothing is taken out of the queue until then. Sending (:func:`send`) is done where the
queue's messages are held, on the driver: each leaves the queue when the broker has confirmed its copy, and only the
connection that holds it can say so. The copies are those that :meth:`bide.error_queues.ErrorQueue.retry` makes.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import (
    AnalysisException,
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    NumberFormatException,
)
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)

import bide.spark
from bide.admin.locate import endpoints
from bide.amqp.url import BrokerUrl
from bide.client.sync import SyncClient, connect_sync
from bide.delay.allowed_targets import AllowedTargets
from bide.delay.protocol import QueueTarget
from bide.durations import from_microseconds, to_microseconds
from bide.error_queues import ErrorQueue, OperationResult
from bide.error_queues.operation import Progress
from bide.errors import InvalidInputError, TargetNotAllowedError, TargetNotFoundError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from bide.recoverability.failed import FailedMessage

COLUMNS: Final = (
    *("message_id", "type", "queue", "endpoint", "reason", "failed_at", "attempts", "exception", "text", "group"),
    *("sent", "due", "body", "size", "headers", "exchange", "routing_key", "correlation_id", "id", "place"),
)
"""What a filter can ask for. ``place`` is the number of the message in the queue, ``body`` is text."""

_KEY: Final = "_bide_key"
_MICROSECOND: Final = timedelta(microseconds=1)
_KEY_DIGITS: Final = 32

_LAST_WORDS: Final = 30.0
"""Seconds in which a replay that is interrupted has to settle and record what is on its way."""

_RESULT: Final = "outcome string, queue string, reason string, messages long"

_OF_VALUES: Final = (
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    NumberFormatException,
)
"""What Spark raises where an expression does not go with what is in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedIn:
    """An error queue or dead-letter queue, and how its messages are sent.

    Attributes:
        url: the broker's, with the password.
        queue: the error queue's name.
        to: the queue to send all of them to, rather than to those that they failed on; or None.
        management_url: see :class:`bide.error_queues.ErrorQueue`.
        record: leave a record in the stream ``bide.audit``.
    """

    url: str = field(repr=False)
    queue: str
    to: str | None = None
    management_url: str | None = None
    record: bool = True

    def check(self, *, sends: bool = True) -> None:
        """See whether the queues are there, before anything takes its time.

        Args:
            sends: whether there has to be the queue that they are sent to.

        Raises:
            InvalidUrlError: the management URL cannot be read.
            TargetNotFoundError: there is no such queue.
            BrokerError: the broker cannot be asked.
        """
        endpoints(BrokerUrl.parse(self.url), self.management_url, os.environ)
        missing = missing_queues(self.url, {self.queue, self.to or self.queue} if sends else [self.queue])
        if self.queue in missing:
            raise TargetNotFoundError(f"there is no queue {self.queue!r}: name another with --queue")
        if missing:
            raise TargetNotFoundError(f"there is no queue {self.to!r} to send them to: name another with --to")


def failed(spark: SparkSession, source: FailedIn) -> DataFrame:
    """The messages of an error queue, which stay there: the columns of :data:`COLUMNS`, and a key.

    Each time that Spark needs this table it looks through the queue: ``persist`` what is to be used twice.
    """
    bide.spark.register(spark)
    rows = spark.read.format("rabbitmq").options(url=source.url, queue=source.queue, includeHeaders=True).load()
    known: dict[str, Column] = {
        "queue": F.col("failed_queue"),
        "text": F.col("error"),
        "sent": F.col("scheduled"),
        "body": _text("value"),
        "size": F.octet_length("value"),
        # Of a queue there is one partition, in its order.
        "place": F.monotonically_increasing_id(),
    }
    failed_at = F.coalesce(F.unix_micros("failed_at").cast("string"), F.lit("-"))
    key = F.substring(F.sha2(F.concat_ws(" ", "id", failed_at, F.sha2("value", 256)), 256), 1, _KEY_DIGITS)
    return rows.select(*(known.get(name, F.col(name)).alias(name) for name in COLUMNS), key.alias(_KEY))


def _text(column: str) -> Column:
    """Bytes as text: of UTF-8, or else of Latin-1, which any bytes can be read as.

    A cast alone leaves a text that is none, and is to be an error in a later Spark (SPARK-54586).
    """
    value = F.col(column)
    return F.coalesce(F.try_validate_utf8(value.try_cast("string")), F.decode(value, "ISO-8859-1"))


def choose(failed: DataFrame, *, where: str | None = None, limit: int | None = None) -> DataFrame:
    """Those that a condition in SQL holds for, the first ones of them; without any, all.

    Raises:
        InvalidInputError: Spark cannot read the condition.
    """
    chosen = failed
    if where is not None:
        try:
            chosen = failed.where(where)
            # Of Spark Connect, this asks the server.
            chosen.columns  # noqa: B018
        except AnalysisException as error:
            raise _bad_filter(where, error, failed.columns) from error
    return chosen if limit is None else chosen.orderBy("place").limit(limit)


def spread(chosen: DataFrame, over: timedelta, *, begin: datetime) -> DataFrame:
    """With the column ``deliver_at``: evenly spread over a time, in the order of ``place``.

    Args:
        begin: when the first is due.
    """
    everything = Window.orderBy("place")
    number = F.row_number().over(everything) - 1
    count = F.count(F.lit(1)).over(everything.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing))
    later = F.floor(F.lit(over // _MICROSECOND) * (number / count))
    return chosen.withColumn("deliver_at", F.timestamp_micros(F.lit(to_microseconds(begin)) + later))


def totals(messages: DataFrame) -> DataFrame:
    """How many go to each queue: ``queue``, null where nothing tells, ``messages``, and the first and last due time.

    The times, ``first`` and ``last``, are in microseconds since 1970.
    """
    due = F.unix_micros("deliver_at")
    counts = (F.count(F.lit(1)).alias("messages"), F.min(due).alias("first"), F.max(due).alias("last"))
    return messages.groupBy("queue").agg(*counts).orderBy("queue")


def check_allowed(messages: DataFrame, to: str | None, allow: Iterable[str]) -> None:
    """Refuse to send messages to queues that no pattern allows.

    Every client that may write to an error queue can write the headers that name where a message failed.

    Args:
        messages: with the column ``queue``.
        to: the queue that all of them go to instead, or None.
        allow: patterns of the queues that messages may go to; see :class:`bide.delay.allowed_targets.AllowedTargets`.

    Raises:
        TargetNotAllowedError: a queue is not allowed; nothing was sent.
        InvalidInputError: a pattern is empty.
    """
    allowed = AllowedTargets.of(allow)
    named = messages.where("queue is not null").select("queue").distinct().orderBy("queue")
    queues = [row["queue"] for row in named.collect()] if to is None else [to]
    refused = [name for name in queues if not allowed.allow(QueueTarget(name))]
    if refused:
        raise TargetNotAllowedError(
            f"messages would go to queues that are not allowed ({', '.join(refused)}), and nothing was sent: allow "
            "them with --allow if the senders may write there, or leave their messages out with --where"
        )


def missing_queues(url: str, queues: Iterable[str]) -> list[str]:
    """Those of the queues that do not exist.

    Raises:
        BrokerError: the broker cannot be asked.
    """
    with connect_sync(url, declare=False) as client:
        return [name for name in queues if not client.wait_for(client.client.exists(name))]


def send(
    messages: DataFrame,
    source: FailedIn,
    *,
    details: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    interrupted: Callable[[OperationResult], None] | None = None,
) -> DataFrame:
    """Send messages back, and take them out of the error queue, each when it is due.

    If the first is due already, because Spark took its time to find them, then all due times are moved on by that. They
    leave in the order of the queue: a message that stands behind one with a later due time waits for that.

    An interruption, such as by Ctrl-C, leaves what is not yet due in the error queue.

    A message leaves the queue when the broker has confirmed its copy. Whatever ends this before that leaves it there:
    what was on its way, :data:`bide.error_queues.operation.WINDOW` messages at once, and what was confirmed a moment
    before, is sent once more by the next run, with the same message ids.

    Args:
        messages: of :func:`failed`, with ``deliver_at``.
        details: why these, for the record.
        progress: told how far it is.
        interrupted: told what was done, if this is interrupted.

    Returns:
        ``outcome`` (``sent``; ``kept``: it stays in the error queue; ``gone``: it left the error queue since it was
        chosen), ``queue`` that it was sent to, ``reason`` why it stays, and ``messages``: how many.

    Raises:
        InvalidInputError: a value cannot be used.
        TargetNotFoundError: there is no such error queue.
        BrokerError: the broker cannot be reached, or refuses.
    """
    chosen: defaultdict[str, deque[int]] = defaultdict(deque)
    total = 0
    for row in messages.orderBy("place").select(_KEY, F.unix_micros("deliver_at").alias("due")).collect():
        chosen[row[_KEY]].append(row["due"])
        total += 1
    if not chosen:
        return messages.sparkSession.createDataFrame([], _RESULT)
    first = from_microseconds(min(times[0] for times in chosen.values()))
    late = max(datetime.now(UTC) - first, timedelta(0))
    with connect_sync(source.url) as client:
        queue = ErrorQueue(client.client, source.queue, management_url=source.management_url, audit=source.record)
        times = _Times(chosen, late)
        work = queue.replay(times.due, taken=times.take, to=source.to, total=total, details=details, progress=progress)
        try:
            moved = _to_its_end(client, work)
        finally:
            if queue.interrupted is not None and interrupted is not None:
                interrupted(queue.interrupted)
    found: list[tuple[str, str | None, str | None, int]] = [
        *(("sent", name, None, count) for name, count in sorted(moved.queues.items())),
        *(("kept", None, reason, count) for reason, count in sorted(moved.kept.items())),
    ]
    if gone := total - moved.done - sum(moved.kept.values()):
        found.append(("gone", None, None, gone))
    return messages.sparkSession.createDataFrame(found, _RESULT)


def keep(messages: DataFrame, where: str | None) -> DataFrame:
    """Have Spark find the messages, and keep them, so that it looks for them once.

    Raises:
        InvalidInputError: the condition does not go with what is in a message.
    """
    kept = messages.persist()
    try:
        kept.count()
    except _OF_VALUES as error:
        kept.unpersist()
        raise _bad_filter(where or "", error, ()) from error
    return kept


def _to_its_end(client: SyncClient, work: Coroutine[Any, Any, OperationResult]) -> OperationResult:
    """Run a coroutine. An interruption cancels it, and then waits until it has written down what it did."""
    ended = threading.Event()

    async def run() -> OperationResult:
        try:
            return await work
        finally:
            ended.set()

    future = client.submit(run())
    try:
        return future.result()
    except (KeyboardInterrupt, SystemExit):
        future.cancel()
        ended.wait(_LAST_WORDS)
        raise


class _Times:
    """The due times of chosen messages, by their keys. Of messages that are alike, as many as were chosen have one."""

    def __init__(self, chosen: Mapping[str, deque[int]], late: timedelta) -> None:
        self._chosen = chosen
        self._late = late

    def due(self, message: FailedMessage) -> datetime | None:
        """When it is due, or None if it is not chosen."""
        times = self._chosen.get(_key_of(message))
        return from_microseconds(times[0]) + self._late if times else None

    def take(self, message: FailedMessage) -> None:
        """Another one that is alike has the next due time."""
        self._chosen[_key_of(message)].popleft()


def _key_of(message: FailedMessage) -> str:
    """The same as in the table: one message may have failed twice, and only one of its failures been chosen."""
    at = message.failed_at
    if at is not None and at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    failed_at = "-" if at is None else str(to_microseconds(at))
    parts = (message.id, failed_at, hashlib.sha256(message.body).hexdigest())
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:_KEY_DIGITS]


def _bad_filter(where: str, error: Exception, columns: list[str] | tuple[str, ...]) -> InvalidInputError:
    said = str(error).strip().partition("\n")[0].partition(" SQLSTATE:")[0].rstrip(". ")
    known = ", ".join(name for name in columns if name != _KEY)
    return InvalidInputError(
        f"the filter {where!r} cannot be used: {said}{f'; the columns are {known}' if known else ''}"
    )
