"""Replay of an error queue: messages chosen in SQL are sent back and spread over time.

The messages become a table (:func:`failed`), from which some are chosen (:func:`choose`) and given due times
(:func:`spread`). Up to this point, the queue is only browsed. Sending (:func:`send`) happens on the driver, because a
message can be acknowledged only on the channel that received it, and only after the broker has confirmed its copy. The
copies are the same as those of :meth:`bide.error_queues.ErrorQueue.retry`.
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
from pyspark.sql import functions as F  # noqa: N812 (the usual name)

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
"""The columns that a filter can use. ``place`` is the number of the message in the queue, ``body`` is text."""

_KEY: Final = "_bide_key"
_MICROSECOND: Final = timedelta(microseconds=1)
_KEY_DIGITS: Final = 32

_CLEANUP_TIMEOUT: Final = 30.0
"""Seconds for an interrupted replay to wait for confirms and record its result."""

_RESULT: Final = "outcome string, queue string, reason string, messages long"

_VALUE_ERRORS: Final = (
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    NumberFormatException,
)
"""Exceptions of Spark when an expression fails for the values of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedIn:
    """An error queue or dead-letter queue, and the options of sending its messages.

    Attributes:
        url: the URL of the broker, with the password.
        queue: the name of the error queue.
        to: a queue to send all messages to; None for the queues on which they failed.
        management_url: see :class:`bide.error_queues.ErrorQueue`.
        record: write a record to the stream ``bide.audit``.
    """

    url: str = field(repr=False)
    queue: str
    to: str | None = None
    management_url: str | None = None
    record: bool = True

    def check(self, *, sends: bool = True) -> None:
        """Check the queues before the slow steps.

        Args:
            sends: whether the queue ``to`` has to exist.

        Raises:
            InvalidUrlError: the management URL is invalid.
            TargetNotFoundError: a queue does not exist.
            BrokerError: the broker cannot be reached, or refuses.
        """
        endpoints(BrokerUrl.parse(self.url), self.management_url, os.environ)
        missing = missing_queues(self.url, {self.queue, self.to or self.queue} if sends else [self.queue])
        if self.queue in missing:
            raise TargetNotFoundError(f"there is no queue {self.queue!r}: name another with queue=...")
        if missing:
            raise TargetNotFoundError(f"there is no queue {self.to!r} to send messages to: name another with to=...")


def failed(spark: SparkSession, source: FailedIn) -> DataFrame:
    """The messages of an error queue, with the columns of :data:`COLUMNS` and a key; they remain in the queue.

    Spark browses the queue each time it evaluates this table, so ``persist`` a table that is used twice.
    """
    bide.spark.register(spark)
    rows = spark.read.format("rabbitmq").options(url=source.url, queue=source.queue, includeHeaders=True).load()
    known: dict[str, Column] = {
        "queue": F.col("failed_queue"),
        "text": F.col("error"),
        "sent": F.col("scheduled"),
        "body": _text("value"),
        "size": F.octet_length("value"),
        # The ids are the order of the queue, because a queue is read as a single partition.
        "place": F.monotonically_increasing_id(),
    }
    failed_at = F.coalesce(F.unix_micros("failed_at").cast("string"), F.lit("-"))
    key = F.substring(F.sha2(F.concat_ws(" ", "id", failed_at, F.sha2("value", 256)), 256), 1, _KEY_DIGITS)
    return rows.select(*(known.get(name, F.col(name)).alias(name) for name in COLUMNS), key.alias(_KEY))


def _text(column: str) -> Column:
    """Decode bytes as UTF-8, or else as Latin-1, which accepts any bytes.

    A cast alone results in invalid text, and will be an error in a later Spark (SPARK-54586).
    """
    value = F.col(column)
    return F.coalesce(F.try_validate_utf8(value.try_cast("string")), F.decode(value, "ISO-8859-1"))


def choose(failed: DataFrame, *, where: str | None = None, limit: int | None = None) -> DataFrame:
    """Choose messages by a condition in SQL, and up to a limit in the order of ``place``.

    Raises:
        InvalidInputError: the condition is invalid.
    """
    chosen = failed
    if where is not None:
        try:
            chosen = failed.where(where)
            # Spark Connect checks the condition only when the server is asked for something, such as the columns.
            chosen.columns  # noqa: B018 (evaluated for the check)
        except AnalysisException as error:
            raise _filter_error(where, error, failed.columns) from error
    return chosen if limit is None else chosen.orderBy("place").limit(limit)


def spread(chosen: DataFrame, over: timedelta, *, begin: datetime) -> DataFrame:
    """Add the column ``deliver_at``: due times that are spread evenly, in the order of ``place``.

    Args:
        over: the length of the spread.
        begin: the first due time.
    """
    everything = Window.orderBy("place")
    number = F.row_number().over(everything) - 1
    count = F.count(F.lit(1)).over(everything.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing))
    later = F.floor(F.lit(over // _MICROSECOND) * (number / count))
    return chosen.withColumn("deliver_at", F.timestamp_micros(F.lit(to_microseconds(begin)) + later))


def totals(messages: DataFrame) -> DataFrame:
    """Totals for each target: ``queue`` (null if unknown), ``messages``, and the due times ``first`` and ``last``.

    The times are in microseconds since 1970.
    """
    due = F.unix_micros("deliver_at")
    counts = (F.count(F.lit(1)).alias("messages"), F.min(due).alias("first"), F.max(due).alias("last"))
    return messages.groupBy("queue").agg(*counts).orderBy("queue")


def check_allowed(messages: DataFrame, to: str | None, allow: Iterable[str]) -> None:
    """Refuse to send messages to queues that no pattern allows.

    The check is needed because each client that may publish to an error queue chooses the header with the target.

    Args:
        messages: a table with the column ``queue``.
        to: the queue to which all messages are sent instead, or None.
        allow: patterns of allowed queues; see :class:`bide.delay.allowed_targets.AllowedTargets`.

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
            "these queues with allow=[...], or leave out their messages with where=..."
        )


def missing_queues(url: str, queues: Iterable[str]) -> list[str]:
    """The queues that do not exist.

    Raises:
        BrokerError: the broker cannot be reached, or refuses.
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
    """Send messages back when they are due, and remove them from the error queue.

    If the first message is overdue, because Spark took long to choose, all due times are shifted. Messages are sent in
    the order of the queue, so a message waits for those before it, even if it is due earlier.

    After an interruption, such as Ctrl-C, messages that are not due yet remain in the error queue.

    A message is acknowledged after the broker has confirmed its copy. If the process ends before that, the message
    remains in the queue. Messages that were in flight (at most :data:`bide.error_queues.operation.WINDOW`) or were
    confirmed immediately before are then sent again by the next run, with the same message ids.

    Args:
        messages: a table from :func:`failed`, with ``deliver_at``.
        details: details of the operation, for the record.
        progress: called with the progress.
        interrupted: called with the result so far if the replay is interrupted.

    Returns:
        A table with ``outcome``, ``queue``, ``reason`` and the number of ``messages``. The outcome is ``sent`` to the
        queue, ``kept`` in the error queue for the reason, or ``gone`` from the error queue since it was chosen.

    Raises:
        InvalidInputError: a value is invalid.
        TargetNotFoundError: the error queue does not exist.
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
            result = _run_to_end(client, work)
        finally:
            if queue.interrupted is not None and interrupted is not None:
                interrupted(queue.interrupted)
    found: list[tuple[str, str | None, str | None, int]] = [
        *(("sent", name, None, count) for name, count in sorted(result.queues.items())),
        *(("kept", None, reason, count) for reason, count in sorted(result.kept.items())),
    ]
    if gone := total - result.done - sum(result.kept.values()):
        found.append(("gone", None, None, gone))
    return messages.sparkSession.createDataFrame(found, _RESULT)


def keep(messages: DataFrame, where: str | None) -> DataFrame:
    """Evaluate a table of messages and cache it, so that the queue or audit is read only once.

    Raises:
        InvalidInputError: the condition fails for the values of a message.
    """
    kept = messages.persist()
    try:
        kept.count()
    except _VALUE_ERRORS as error:
        kept.unpersist()
        raise _filter_error(where or "", error, ()) from error
    return kept


def _run_to_end(client: SyncClient, work: Coroutine[Any, Any, OperationResult]) -> OperationResult:
    """Run a coroutine. On an interruption, cancel it, and wait until it has recorded its result."""
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
        ended.wait(_CLEANUP_TIMEOUT)
        raise


class _Times:
    """The due times of chosen messages, by key. Equal messages have the same key, with one due time for each."""

    def __init__(self, chosen: Mapping[str, deque[int]], late: timedelta) -> None:
        self._chosen = chosen
        self._late = late

    def due(self, message: FailedMessage) -> datetime | None:
        """The due time of a message; None if the message is not chosen."""
        times = self._chosen.get(_key_of(message))
        return from_microseconds(times[0]) + self._late if times else None

    def take(self, message: FailedMessage) -> None:
        """Use up a due time: the next message with the same key has the next one."""
        self._chosen[_key_of(message)].popleft()


def _key_of(message: FailedMessage) -> str:
    """The key of a message, as in the table. It has the time of the failure, because a message may fail twice."""
    at = message.failed_at
    if at is not None and at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    failed_at = "-" if at is None else str(to_microseconds(at))
    parts = (message.id, failed_at, hashlib.sha256(message.body).hexdigest())
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:_KEY_DIGITS]


def _filter_error(where: str, error: Exception, columns: list[str] | tuple[str, ...]) -> InvalidInputError:
    reason = str(error).strip().partition("\n")[0].partition(" SQLSTATE:")[0].rstrip(". ")
    known = ", ".join(name for name in columns if name != _KEY)
    return InvalidInputError(
        f"the filter {where!r} cannot be used: {reason}{f'; the columns are {known}' if known else ''}"
    )
