"""Run of a schedule: a message for each row of a table.

Rows become messages (:mod:`bide.pipelines.schedule.rows`), which are checked as a whole (:func:`survey`,
:func:`due_times`) and then sent in parts (:func:`send`). The contents of a row decide its message id and its part, so
after a crash a run continues with the parts that are not in the ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 (the usual name)
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BooleanType, StringType

from bide.client.sync import connect_sync
from bide.durations import from_microseconds
from bide.errors import BideError, InvalidInputError, InvalidRowError
from bide.pipelines.ledger import Head, Ledger, Part
from bide.pipelines.schedule.plan import SchedulePlan
from bide.pipelines.schedule.rows import (
    DIGEST,
    columns_of,
    count_targets,
    digested_rows,
    refuse_invalid_names,
    with_ids,
)
from bide.pipelines.schedule.targets import check_targets
from bide.pipelines.schedule.times import EARLIEST, LATEST, due_of, literal
from bide.pipelines.spark_task_writer import write
from bide.spark.header_values import are_headers, stored_headers
from bide.spark.overdue import GRACE, Past, refusal
from bide.spark.rows import Rows
from bide.spark.sink import Sent, SinkPlace
from bide.spark.sink import send as send_rows

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

PART_ROWS: Final = 10_000
"""The approximate number of rows in a part. After a task is killed, at most one part is sent again."""

MAX_PARTS: Final = 10_000
"""The largest number of parts; a table with more rows has larger parts."""

_PART: Final = "_bide_part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Counts of a table of messages.

    Attributes:
        rows: the number of rows.
        checksum: a checksum over all rows, which does not depend on their order.
        without_time: rows without a due time or delay, or with an invalid one.
        without_body: rows whose body is null.
        too_late: rows that are due later than the infrastructure can delay.
        bad_headers: rows with headers that are not UTF-8, or that are not a JSON object of text.
        past: rows that are due already, which are delivered immediately.
        overdue: rows that were due more than :data:`bide.spark.overdue.GRACE` before the first run began.
        first: the earliest due time; None without any. Delays are added to the time of the survey.
        last: the latest due time, at most the end of the year 9999; None without any.
    """

    rows: int
    checksum: int
    without_time: int
    without_body: int
    too_late: int
    bad_headers: int
    past: int
    overdue: int
    first: datetime | None
    last: datetime | None

    @property
    def bad(self) -> int:
        """The number of rows that cannot be sent."""
        return self.without_time + self.without_body + self.too_late + self.bad_headers


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
    found = digested.agg(
        F.count(F.lit(1)).alias("rows"),
        F.coalesce(F.bit_xor(F.xxhash64(DIGEST)), F.lit(0)).alias("checksum"),
        F.count_if(due.isNull()).alias("without_time"),
        F.count_if(due.isNotNull() & F.col("value").isNull()).alias("without_body"),
        F.count_if(F.col("value").isNotNull() & (due > latest)).alias("too_late"),
        F.count_if(F.col("value").isNotNull() & (due <= latest) & ~good).alias("bad_headers"),
        F.count_if(due < literal(now)).alias("past"),
        F.count_if(F.col("value").isNotNull() & good & (due < literal((begun or now) - GRACE))).alias("overdue"),
        F.unix_micros(F.least(F.min(due), literal(LATEST))).alias("first"),
        F.unix_micros(F.least(F.max(due), literal(LATEST))).alias("last"),
    ).collect()[0]
    refuse_invalid_names(digested, plan)
    counts = found.asDict()
    return Survey(first=_time_or_none(counts.pop("first")), last=_time_or_none(counts.pop("last")), **counts)


def _have_good_headers(digested: DataFrame) -> Column:
    if "headers" not in digested.columns:
        return F.lit(True)
    headers = digested["headers"]
    if isinstance(digested.schema["headers"].dataType, StringType):
        # Without Arrow, as for delays.
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
    width = every // timedelta(microseconds=1)
    due = messages.select(due_of(messages, now or datetime.now(UTC)).alias("due"))
    # The first span of the year 1 may begin in the year 0, which Python cannot represent.
    micros = F.unix_micros(F.least(F.greatest("due", literal(EARLIEST + every)), literal(LATEST)))
    return (
        due.where(F.col("due").isNotNull())
        .groupBy(F.timestamp_micros(micros - F.pmod(micros, F.lit(width))).alias("due"))
        .agg(F.count(F.lit(1)).alias("count"))
        .orderBy("due")
    )


def begun(ledger: Ledger, plan: SchedulePlan) -> Head | None:
    """Read the head of a ledger and compare it with the plan; None for a new ledger.

    Raises:
        InvalidInputError: the ledger was begun with another plan, or cannot be read.
    """
    head = ledger.head()
    if head is None:
        return None
    if head.plan != plan.ledger_digest():
        raise InvalidInputError(
            f"the ledger {ledger.folder} was begun with other settings of target, columns, name or delay "
            "infrastructure: repeat those to continue, or name another ledger to start a new run"
        )
    if head.past != (plan.settings.past or "send"):
        raise InvalidInputError(
            f"the ledger {ledger.folder} was begun with {head.past!r} for past=...: repeat that to continue, or name "
            "another ledger"
        )
    if head.broker != plan.broker:
        raise InvalidInputError(
            f"the ledger {ledger.folder} was begun for the broker {head.broker}, but this run is for {plan.broker}: "
            "name another ledger"
        )
    return head


def head_for(ledger: Ledger, plan: SchedulePlan, found: Survey, *, part_rows: int = PART_ROWS) -> Head:
    """The head of the ledger for these rows: a new one, or that of an earlier run with the same plan and rows.

    Nothing is written.

    Raises:
        InvalidRowError: the ledger is new, rows are overdue, and the plan does not say what to do with them.
        InvalidInputError: the ledger was begun with another plan, or for other rows.
    """
    head = begun(ledger, plan)
    if head is None:
        refuse_overdue(found, plan)
        parts = min(max(-(-found.rows // part_rows), 1), MAX_PARTS)
        return Head(
            plan=plan.ledger_digest(),
            broker=plan.broker,
            rows=found.rows,
            checksum=found.checksum,
            parts=parts,
            past=plan.settings.past or "send",
        )
    if (head.rows, head.checksum) != (found.rows, found.checksum):
        raise InvalidInputError(
            f"the input has changed since the ledger {ledger.folder} was begun ({head.rows:,} rows then, "
            f"{found.rows:,} now, or other values): continue with the original input, or name another ledger to send "
            "all rows of this input"
        )
    return head


def refuse_overdue(found: Survey, plan: SchedulePlan) -> None:
    """Refuse overdue rows, unless the plan says what to do with them.

    Raises:
        InvalidRowError: rows are overdue.
    """
    if found.overdue and plan.settings.past is None and found.first is not None:
        raise InvalidRowError(
            refusal(
                f"{found.overdue:,} of {found.rows:,} rows",
                found.first,
                "Correct the times, or choose what to do with such rows by past=...: send (immediately), drop, or "
                "reject (with rejects=...)",
            )
        )


def send(
    rows: DataFrame,
    plan: SchedulePlan,
    ledger: Ledger,
    head: Head,
    *,
    targets: Mapping[str, str | None] | None = None,
    begun: datetime | None = None,
) -> DataFrame:
    """Send the messages of the parts that are not in the ledger.

    Args:
        targets: the queues in the column of targets, those to which no message can be sent with the reason. None to
            find them; see :func:`bide.pipelines.schedule.targets.check_targets`.
        begun: when the first run began, to decide which rows are overdue; None for now. An existing ledger has its own.

    Returns:
        A table with a row for each part that was sent: ``part``, ``sent``, ``rejected`` and ``dropped``.

    Raises:
        FolderInUseError: another run is using the ledger.
        InvalidInputError: another run has begun the ledger in the meantime, for other rows or with other parts.
        TargetNotFoundError: the queue does not exist; the ledger is not written.
        BrokerError: the broker cannot be reached, or refuses.
        PySparkException: a task failed, with the error of bide in its message; see
            :func:`bide.pipelines.session.spark_errors`. The finished parts are in the ledger.
    """
    spark = rows.sparkSession
    with ledger.lock():
        # The head was read before the lock was taken: parts of another run must not count as parts of this one.
        if ledger.head() not in (None, head):
            raise InvalidInputError(
                f"another run has begun the ledger {ledger.folder} in the meantime: run the same command again to "
                "continue with it, or to see why that is not possible"
            )
        before = ledger.parts()
        done = {one.part for one in before}
        if sum(one.rows for one in before) < head.rows:
            if targets is None:
                targets = check_targets(count_targets(rows, plan), plan)
            _send_rest(rows, plan, ledger, head, done, targets, begun or datetime.now(UTC))
    found = [(one.part, one.sent, one.rejected, one.dropped) for one in ledger.parts() if one.part not in done]
    return spark.createDataFrame(found, "part int, sent long, rejected long, dropped long")


def _send_rest(
    rows: DataFrame,
    plan: SchedulePlan,
    ledger: Ledger,
    head: Head,
    done: Collection[int],
    targets: Mapping[str, str | None],
    begun: datetime,
) -> None:
    # The choice of the first run.
    settings = replace(plan.settings, past=cast("Past", head.past))
    refused = {queue: reason for queue, reason in targets.items() if reason is not None}
    queues = [one for one in (settings.constants.get("to"), *targets) if one is not None and one not in refused]
    if plan.key_column is None and queues:
        # Once here, rather than in many tasks at the same time; and an error is reported before they start.
        with connect_sync(settings.url, infrastructure=settings.infrastructure, declare=settings.declare) as client:
            for queue in queues:
                client.wait_for(client.client.bind(queue))
    if ledger.head() is None:
        ledger.begin(head, begun)
    part = F.pmod(F.hash(DIGEST), F.lit(head.parts))
    remaining = digested_rows(rows, plan)
    if done:
        remaining = remaining.where(~part.isin(sorted(done)))
    # repartition() puts a row into the partition of the same number, because Spark evaluates the same expression.
    placed = with_ids(remaining.repartition(head.parts, F.col(DIGEST)).withColumn(_PART, part), plan)
    if plan.key_column is not None:
        # A repeated part has to be the same chunk by chunk, but rows come from a shuffle in any order.
        placed = placed.sortWithinPartitions("key")
    columns = columns_of(plan)
    checksum = head.checksum % (1 << 64)
    plan = replace(plan, settings=settings)
    writer = _SchedulePartWriter(
        plan=plan,
        columns=columns,
        ledger=ledger,
        checksum=checksum,
        begun=ledger.begun() or begun,
        refused=refused,
    )
    write(placed.select(_PART, *columns), writer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SchedulePartWriter(DataSourceArrowWriter):
    """Sends one part in a task, and adds it to the ledger."""

    plan: SchedulePlan
    columns: tuple[str, ...]
    ledger: Ledger
    checksum: int
    begun: datetime
    refused: Mapping[str, str]

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        rows = (batch for batch in iterator if len(batch))
        first = next(rows, None)
        if first is None:
            return Sent(confirmed=0)
        number = first.column(_PART)[0].as_py()
        if self.ledger.get(number) is not None:
            # Another attempt at the same task has sent the part.
            return Sent(confirmed=0)
        settings = self.plan.settings
        sent = send_rows(
            self._checked(first, rows, number),
            Rows(
                self.columns,
                settings.constants,
                settings.infrastructure,
                required=self.columns[:2],
                refused=self.refused,
            ),
            settings,
            # With another ledger, requests are new ones, and replace what waits.
            SinkPlace(run=f"{self.plan.digest()}-{self.begun.isoformat()}", partition=number),
            file=f"part-{number:05}-{self.plan.ledger_digest()}-{self.checksum:016x}",
            begun=self.begun,
        )
        self.ledger.add(Part(part=number, sent=sent.confirmed, rejected=sent.rejected, dropped=sent.dropped))
        return sent

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
