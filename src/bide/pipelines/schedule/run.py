"""Schedule a message for every row of a table.

Rows become messages (:mod:`bide.pipelines.schedule.rows`), which are looked over as a whole (:func:`survey`,
:func:`due_times`) and sent in parts (:func:`send`). What is in a row decides its message id and its part: a run that
was killed goes on with the parts that its ledger does not have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from bide.client.sync import connect_sync
from bide.durations import from_microseconds
from bide.errors import BideError, InvalidInputError, InvalidRowError
from bide.pipelines.ledger import Head, Ledger, Part
from bide.pipelines.schedule.plan import SchedulePlan
from bide.pipelines.schedule.rows import DIGEST, columns_of, digested_rows, identified, refuse_repeated_ids
from bide.pipelines.schedule.times import EARLIEST, LATEST, due_of, literal
from bide.pipelines.spark_task_writer import write
from bide.spark.overdue import GRACE, Past, refusal
from bide.spark.rows import Rows
from bide.spark.sink import Sent, SinkPlace
from bide.spark.sink import send as send_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART_ROWS: Final = 10_000
"""Rows of a part, about: what is repeated at most for each task that is killed."""

MAX_PARTS: Final = 10_000
"""Of a table so large that there would be more, the parts are larger."""

_PART: Final = "_bide_part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A table of messages as a whole.

    Attributes:
        rows: how many there are.
        checksum: over all of them, in whatever order.
        without_time: rows without a due time or delay, or with one that cannot be read.
        without_body: rows whose body is null.
        too_late: rows that are due later than the infrastructure can delay.
        bad_headers: rows with a header that is not UTF-8.
        past: rows that are due already: they are delivered at once.
        overdue: those of them that were due more than :data:`bide.spark.overdue.GRACE` before the first run began.
        first: when the first is due, None where there is none. Delays are counted from when it was looked at.
        last: when the last is due; the end of the year 9999 where that is later.
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
        """Rows that cannot be sent."""
        return self.without_time + self.without_body + self.too_late + self.bad_headers


def survey(rows: DataFrame, plan: SchedulePlan, *, now: datetime, begun: datetime | None = None) -> Survey:
    """Look over the messages of rows.

    Args:
        begun: when the first run began, for one that goes on. What was due since then is not overdue.

    Raises:
        InvalidColumnError: see :func:`bide.pipelines.schedule.rows.messages`.
        InvalidRowError: values of the id column are there more than once, or cannot be message ids.
    """
    # Infrastructures that go round hold longer delays than there are years.
    longest = min(plan.settings.infrastructure.max_delay, LATEST - now)
    latest = literal(now + longest)
    digested = digested_rows(rows, plan)
    due = due_of(digested, now)
    good = F.forall(F.map_values("headers"), F.is_valid_utf8) if plan.header_columns else F.lit(True)
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
    if plan.id_column is not None:
        refuse_repeated_ids(digested, plan.id_column)
    counts = found.asDict()
    return Survey(first=_moment(counts.pop("first")), last=_moment(counts.pop("last")), **counts)


def due_times(messages: DataFrame, every: timedelta, *, now: datetime | None = None) -> DataFrame:
    """How many messages are due when: ``due``, the beginning of a span as long as *every*, and ``count``.

    What is due after the year 9999 counts as due at its end: Python, which is to read this, knows no later time.

    Args:
        now: what delays are counted from.
    """
    width = every // timedelta(microseconds=1)
    due = messages.select(due_of(messages, now or datetime.now(UTC)).alias("due"))
    # The span in which the year 1 begins has begun before it.
    micros = F.unix_micros(F.least(F.greatest("due", literal(EARLIEST + every)), literal(LATEST)))
    return (
        due.where(F.col("due").isNotNull())
        .groupBy(F.timestamp_micros(micros - F.pmod(micros, F.lit(width))).alias("due"))
        .agg(F.count(F.lit(1)).alias("count"))
        .orderBy("due")
    )


def begun(ledger: Ledger, plan: SchedulePlan) -> Head | None:
    """What a ledger was begun with, which has to be this plan; None for a new one.

    Raises:
        InvalidInputError: it was begun for another plan, or cannot be read.
    """
    head = ledger.head()
    if head is None:
        return None
    if head.plan != plan.ledger_digest():
        raise InvalidInputError(
            f"the ledger {ledger.folder} was begun with other settings of target, columns, name or delay "
            "infrastructure: repeat those to go on, or name another ledger to begin anew"
        )
    if head.past != (plan.settings.past or "send"):
        raise InvalidInputError(
            f"the ledger {ledger.folder} was begun with --past {head.past}: repeat that to go on, or name "
            "another ledger"
        )
    if head.broker != plan.broker:
        raise InvalidInputError(
            f"the ledger {ledger.folder} was begun for the broker {head.broker}, and this is {plan.broker}: name "
            "another ledger"
        )
    return head


def head_for(ledger: Ledger, plan: SchedulePlan, found: Survey, *, part_rows: int = PART_ROWS) -> Head:
    """What to begin a ledger for these rows with, or to go on with, where it was begun for the very same.

    Nothing is written yet.

    Raises:
        InvalidRowError: rows are overdue, and the plan does not say what becomes of them. A ledger that was begun has
            that written down.
        InvalidInputError: it was begun for another plan, or for other rows.
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
            f"the input is not what it was when the ledger {ledger.folder} was begun ({head.rows:,} rows then, "
            f"{found.rows:,} now, or other values): go on with that one, or name another ledger to send all of this one"
        )
    return head


def refuse_overdue(found: Survey, plan: SchedulePlan) -> None:
    """See that no row is overdue, unless the plan says what becomes of such rows.

    Raises:
        InvalidRowError: some are.
    """
    if found.overdue and plan.settings.past is None and found.first is not None:
        raise InvalidRowError(
            refusal(
                f"{found.overdue:,} of {found.rows:,} rows",
                found.first,
                "Correct the times, or say what becomes of such rows: --past send (at once), --past drop, or --past "
                "reject (with --rejects DIR)",
            )
        )


def send(
    rows: DataFrame, plan: SchedulePlan, ledger: Ledger, head: Head, *, begun: datetime | None = None
) -> DataFrame:
    """Send the messages of those rows whose parts the ledger does not have.

    Args:
        begun: when a first run began, which rows are overdue by; now, if None. A ledger that was begun knows it.

    Returns:
        ``part``, ``sent``, ``rejected`` and ``dropped``: a row for each part that was sent.

    Raises:
        FolderInUseError: another run goes on with the ledger.
        InvalidInputError: another run has begun the ledger meanwhile, for other rows, or in other parts.
        TargetNotFoundError: the queue does not exist; the ledger is not begun.
        BrokerError: the broker cannot be reached, or refuses.
        PySparkException: a task failed, with the error of bide in its message; see
            :func:`bide.pipelines.session.spark_errors`. The parts that were done are in the ledger.
    """
    spark = rows.sparkSession
    with ledger.lock():
        # It was looked at before it was locked: the parts of another run would count as those of this one.
        if ledger.head() not in (None, head):
            raise InvalidInputError(
                f"another run has begun the ledger {ledger.folder} meanwhile: the same command again goes on with it, "
                "or says why it cannot"
            )
        before = ledger.parts()
        done = {one.part for one in before}
        if sum(one.rows for one in before) < head.rows:
            _send_rest(rows, plan, ledger, head, done, begun or datetime.now(UTC))
    found = [(one.part, one.sent, one.rejected, one.dropped) for one in ledger.parts() if one.part not in done]
    return spark.createDataFrame(found, "part int, sent long, rejected long, dropped long")


def _send_rest(
    rows: DataFrame, plan: SchedulePlan, ledger: Ledger, head: Head, done: Collection[int], begun: datetime
) -> None:
    # What was decided when the ledger was begun.
    settings = replace(plan.settings, past=cast("Past", head.past))
    if (queue := settings.constants.get("to")) is not None:
        # Once, before many tasks do it at the same time: and whatever is wrong is said at once.
        with connect_sync(settings.url, infrastructure=settings.infrastructure, declare=settings.declare) as client:
            client.wait_for(client.client.bind(queue))
    if ledger.head() is None:
        ledger.begin(head, begun)
    part = F.pmod(F.hash(DIGEST), F.lit(head.parts))
    left = digested_rows(rows, plan)
    if done:
        left = left.where(~part.isin(sorted(done)))
    # Spark gives a row to the partition that this very expression says.
    placed = identified(left.repartition(head.parts, F.col(DIGEST)).withColumn(_PART, part), plan)
    columns = columns_of(plan)
    checksum = head.checksum % (1 << 64)
    plan = replace(plan, settings=settings)
    writer = _SchedulePartWriter(
        plan=plan, columns=columns, ledger=ledger, checksum=checksum, begun=ledger.begun() or begun
    )
    write(placed.select(_PART, *columns), writer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SchedulePartWriter(DataSourceArrowWriter):
    """Sends one part, and writes it down: what a task does."""

    plan: SchedulePlan
    columns: tuple[str, ...]
    ledger: Ledger
    checksum: int
    begun: datetime

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        rows = (batch for batch in iterator if len(batch))
        first = next(rows, None)
        if first is None:
            return Sent(confirmed=0)
        number = first.column(_PART)[0].as_py()
        if self.ledger.get(number) is not None:
            # Another attempt at the same task has sent it.
            return Sent(confirmed=0)
        settings = self.plan.settings
        sent = send_rows(
            self._checked(first, rows, number),
            Rows(self.columns, settings.constants, settings.infrastructure, required=self.columns[:2]),
            settings,
            SinkPlace(run=self.plan.digest(), partition=number),
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
                # It would be written down as done without having been sent in whole.
                raise BideError(f"Spark gave a task more than the part {number}: this is an error in bide")
            yield batch.drop_columns([_PART])
            batch = next(rows, None)


def _moment(micros: int | None) -> datetime | None:
    return None if micros is None else from_microseconds(micros)
