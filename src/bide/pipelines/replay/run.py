"""Replay of an error queue: messages chosen in SQL are sent back and spread over time.

The messages become a table (:func:`failed`), from which some are chosen (:func:`choose`) and given due times
(:func:`spread`). Up to this point, the queue is only browsed. Sending (:func:`send`) happens on the driver, because a
message can be acknowledged only on the channel that received it, and only after the broker has confirmed its copy. The
copies are the same as those of :meth:`bide.error_queues.ErrorQueue.retry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
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
from bide.durations import MICROSECOND, to_microseconds
from bide.error_queues import OperationResult
from bide.error_queues.operation import Progress
from bide.errors import InvalidInputError
from bide.pipelines.replay.queue import KEY_DIGITS, FailedIn, refuse_disallowed_targets, send_chosen

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

COLUMNS: Final = (
    *("message_id", "type", "queue", "endpoint", "reason", "failed_at", "attempts", "exception", "text", "group"),
    *("sent", "due", "body", "size", "headers", "exchange", "routing_key", "correlation_id", "id", "place"),
)
"""The columns that a filter can use. ``place`` is the number of the message in the queue, ``body`` is text."""

_KEY: Final = "_bide_key"

_RESULT: Final = "outcome string, queue string, reason string, messages long"

_VALUE_ERRORS: Final = (
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    NumberFormatException,
)
"""Exceptions of Spark when an expression fails for the values of a row."""


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
    key = F.substring(F.sha2(F.concat_ws(" ", "id", failed_at, F.sha2("value", 256)), 256), 1, KEY_DIGITS)
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
    later = F.floor(F.lit(over // MICROSECOND) * (number / count))
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
    named = messages.where("queue is not null").select("queue").distinct().orderBy("queue")
    refuse_disallowed_targets([row["queue"] for row in named.collect()] if to is None else [to], allow)


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
    rows = messages.orderBy("place").select(_KEY, F.unix_micros("deliver_at").alias("due")).collect()
    chosen = [(row[_KEY], row["due"]) for row in rows]
    found = send_chosen(chosen, source, details=details, progress=progress, interrupted=interrupted)
    return messages.sparkSession.createDataFrame(found, _RESULT)


def evaluate_and_cache(messages: DataFrame, where: str | None) -> DataFrame:
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


def _filter_error(where: str, error: Exception, columns: list[str] | tuple[str, ...]) -> InvalidInputError:
    reason = str(error).strip().partition("\n")[0].partition(" SQLSTATE:")[0].rstrip(". ")
    known = ", ".join(name for name in columns if name != _KEY)
    return InvalidInputError(
        f"the filter {where!r} cannot be used: {reason}{f'; the columns are {known}' if known else ''}"
    )
