"""Run of a schedule: a message for each row of a table.

Rows become messages (:mod:`bide.pipelines.schedule.rows`), which are checked as a whole (:func:`survey`,
:func:`due_times`) and then sent in parts (:func:`send`). The contents of a row decide its message id and its part, so
after a crash a run continues with the parts that are not in the ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 (the usual name)
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BooleanType, StringType

from bide.durations import EARLIEST, LATEST, MICROSECOND, from_microseconds
from bide.errors import BideError
from bide.pipelines.ledger import Ledger, LedgerHead
from bide.pipelines.schedule.plan import SchedulePlan
from bide.pipelines.schedule.progress import Survey, begin, finished_parts, send_part
from bide.pipelines.schedule.rows import (
    DIGEST,
    columns_of,
    count_targets,
    digested_rows,
    refuse_invalid_ids,
    with_ids,
)
from bide.pipelines.schedule.targets import check_targets
from bide.pipelines.schedule.times import due_of, literal
from bide.pipelines.spark_task_writer import write
from bide.spark.header_values import are_headers, stored_headers
from bide.spark.overdue import OVERDUE_GRACE
from bide.spark.sink import TaskCommitMessage

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_PART: Final = "_bide_part"


def survey(rows: DataFrame, plan: SchedulePlan, *, now: datetime, begun: datetime | None = None) -> Survey:
    """Count valid, invalid and overdue messages of a table.

    Args:
        now: the time to which delays are added.
        begun: when the first run began, if this run continues one. Rows due since then are not overdue.

    Raises:
        InvalidColumnError: see :func:`bide.pipelines.schedule.rows.messages`.
        InvalidRowError: message ids or keys are repeated or invalid.
    """
    longest = LATEST - now
    if plan.key_column is None:
        # Some infrastructures allow delays that end after the year 9999.
        longest = min(plan.settings.infrastructure.max_delay, longest)
    latest = literal(now + longest)
    digested = digested_rows(rows, plan)
    due = due_of(digested, now)
    good = _have_good_headers(digested)
    # least() ignores null, so that without a condition, rows without a due time would be due at the end of 9999.
    capped = F.when(due.isNotNull(), F.least(due, literal(LATEST)))
    found = digested.agg(
        F.count(F.lit(1)).alias("rows"),
        F.coalesce(F.bit_xor(F.xxhash64(DIGEST)), F.lit(0)).alias("checksum"),
        F.count_if(due.isNull()).alias("without_time"),
        F.count_if(due.isNotNull() & F.col("value").isNull()).alias("without_body"),
        F.count_if(F.col("value").isNotNull() & (due > latest)).alias("too_late"),
        F.count_if(F.col("value").isNotNull() & (due <= latest) & ~good).alias("bad_headers"),
        F.count_if(due < literal(now)).alias("already_due"),
        F.count_if(F.col("value").isNotNull() & good & (due < literal((begun or now) - OVERDUE_GRACE))).alias(
            "overdue"
        ),
        F.unix_micros(F.min(capped)).alias("first"),
        F.unix_micros(F.max(capped)).alias("last"),
    ).collect()[0]
    refuse_invalid_ids(digested, plan)
    counts = found.asDict()
    return Survey(first=_time_or_none(counts.pop("first")), last=_time_or_none(counts.pop("last")), **counts)


def _have_good_headers(digested: DataFrame) -> Column:
    if "headers" not in digested.columns:
        return F.lit(True)
    headers = digested["headers"]
    if isinstance(digested.schema["headers"].dataType, StringType):
        # Without Arrow, because its conversion needs pandas on some releases of PySpark.
        is_good = F.udf(lambda stored: are_headers(stored_headers(stored)), BooleanType(), useArrow=False)
        good = F.is_valid_utf8(headers) & is_good(F.make_valid_utf8(headers))
    else:
        good = F.forall(F.map_values(headers), F.is_valid_utf8)
    return F.coalesce(good, F.lit(True))


def due_times(messages: DataFrame, every: timedelta, *, now: datetime | None = None) -> DataFrame:
    """Count messages by due time: ``due``, the start of a span of length *every*, and ``count``.

    Messages due after the year 9999 count as due at its end, because Python cannot represent later times.

    Args:
        now: the time to which delays are added; None for the current time.
    """
    width = every // MICROSECOND
    due = messages.select(due_of(messages, now or datetime.now(UTC)).alias("due"))
    # The first span of the year 1 may begin in the year 0, which Python cannot represent.
    micros = F.unix_micros(F.least(F.greatest("due", literal(EARLIEST + every)), literal(LATEST)))
    return (
        due.where(F.col("due").isNotNull())
        .groupBy(F.timestamp_micros(micros - F.pmod(micros, F.lit(width))).alias("due"))
        .agg(F.count(F.lit(1)).alias("count"))
        .orderBy("due")
    )


def send(
    rows: DataFrame,
    plan: SchedulePlan,
    ledger: Ledger,
    head: LedgerHead,
    *,
    targets: Mapping[str, str | None] | None = None,
    begun: datetime | None = None,
) -> DataFrame:
    """Send the messages of the parts that are not in the ledger.

    Args:
        targets: the result of :func:`bide.pipelines.schedule.targets.check_targets`; None to call it here.
        begun: when the first run began, to decide which rows are overdue; None for the current time. An existing ledger
            already has this time, which is then used instead.

    Returns:
        A table with a row for each part that this run sent: ``part``, ``sent``, ``rejected`` and ``dropped``.

    Raises:
        FolderInUseError: another run is using the ledger.
        InvalidInputError: another run has begun the ledger in the meantime, for other rows or with other parts.
        InvalidRowError: rows cannot be sent to their queues; see *targets*. Nothing was sent.
        TargetNotFoundError: the queue does not exist; the ledger is not written.
        BrokerError: the broker cannot be reached, or refuses.
        PySparkException: a task failed, with the error of bide in its message; see
            :func:`bide.pipelines.session.spark_errors`. The finished parts are in the ledger.
    """
    spark = rows.sparkSession
    with ledger.lock():
        done, is_finished = finished_parts(ledger, head)
        if not is_finished:
            if targets is None:
                targets = check_targets(count_targets(rows, plan), plan)
            _send_rest(rows, plan, ledger, head, done, targets, begun or datetime.now(UTC))
    found = [(one.part, one.sent, one.rejected, one.dropped) for one in ledger.parts() if one.part not in done]
    return spark.createDataFrame(found, "part int, sent long, rejected long, dropped long")


def _send_rest(
    rows: DataFrame,
    plan: SchedulePlan,
    ledger: Ledger,
    head: LedgerHead,
    done: Collection[int],
    targets: Mapping[str, str | None],
    begun: datetime,
) -> None:
    refused = {queue: reason for queue, reason in targets.items() if reason is not None}
    plan, begun = begin(plan, ledger, head, begun, targets=targets.keys() - refused.keys())
    part = F.pmod(F.hash(DIGEST), F.lit(head.parts))
    remaining = digested_rows(rows, plan)
    if done:
        remaining = remaining.where(~part.isin(sorted(done)))
    # repartition() puts a row into the partition of the same number, because Spark evaluates the same expression.
    placed = with_ids(remaining.repartition(head.parts, F.col(DIGEST)).withColumn(_PART, part), plan)
    if plan.key_column is not None:
        # Request ids depend on the order of the rows: a shuffle changes it, but a repeated part needs the same ids.
        placed = placed.sortWithinPartitions("key")
    columns = columns_of(plan)
    writer = _SchedulePartWriter(plan=plan, columns=columns, ledger=ledger, head=head, begun=begun, refused=refused)
    write(placed.select(_PART, *columns), writer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SchedulePartWriter(DataSourceArrowWriter):
    """Sends one part in a task, and adds it to the ledger."""

    plan: SchedulePlan
    columns: tuple[str, ...]
    ledger: Ledger
    head: LedgerHead
    begun: datetime
    refused: Mapping[str, str]

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        rows = (batch for batch in iterator if len(batch))
        first = next(rows, None)
        if first is None:
            return TaskCommitMessage(confirmed=0)
        number = first.column(_PART)[0].as_py()
        if self.ledger.get(number) is not None:
            # Another attempt at the same task has sent the part.
            return TaskCommitMessage(confirmed=0)
        return TaskCommitMessage.of(
            send_part(
                self._checked(first, rows, number),
                number,
                self.plan,
                self.ledger,
                columns=self.columns,
                head=self.head,
                begun=self.begun,
                refused=self.refused,
            )
        )

    @staticmethod
    def _checked(first: pa.RecordBatch, rows: Iterator[pa.RecordBatch], number: int) -> Iterator[pa.RecordBatch]:
        batch: pa.RecordBatch | None = first
        while batch is not None:
            if not pc.all(pc.equal(batch.column(_PART), number)).as_py():
                # Otherwise a part would be recorded as finished although another task has some of its rows.
                raise BideError(f"a Spark task got rows of other parts than {number}: this is a bug in bide, report it")
            yield batch.drop_columns([_PART])
            batch = next(rows, None)


def _time_or_none(micros: int | None) -> datetime | None:
    return None if micros is None else from_microseconds(micros)
