"""Schedule a message for every row of a table.

Rows become messages (:func:`messages`), which are looked over as a whole (:func:`survey`, :func:`due_times`) and sent
in parts (:func:`send`). What is in a row decides its message id and its part, whatever order or files Spark reads it
from: a run that was killed goes on with the parts that its ledger does not have.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, DateType, StringType, TimestampNTZType, TimestampType

from bide.admin.apply import exists
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.delay.clock import Clock
from bide.errors import BideError, InvalidColumnError, InvalidInputError, InvalidRowError, TargetNotFoundError
from bide.pipelines.ledger import Head, Ledger, Part
from bide.pipelines.schedule_times import EARLIEST, LATEST, due_of, literal
from bide.pipelines.writing import write
from bide.spark.rows import Rows
from bide.spark.sink import Place, Sent
from bide.spark.sink import send as send_rows
from bide.spark.sink_columns import COLUMNS
from bide.spark.sink_settings import SinkSettings
from bide.sync import connect_sync
from bide.topology import Exchange, Queue, Topology

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

PART_ROWS: Final = 10_000
"""Rows of a part, about: what is repeated at most for each task that is killed."""

MAX_PARTS: Final = 10_000

_DIGEST: Final = "_bide_digest"
_PART: Final = "_bide_part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What becomes of a row.

    Attributes:
        at_column: when it is due: a timestamp, a date, or text that Spark can cast to a timestamp. Where there is no
            time zone, the session's counts.
        delay_column: instead, how long after it is sent: an interval, milliseconds, or text such as ``5m``.
        body_columns: whose values make the body, a JSON object; every column but the others named here, if empty.
        body_column: whose value is the body as it is, text or binary; instead of *body_columns*.
        id_column: whose value is the message id; if None, it is made of what is in the row.
        header_columns: whose values are headers of the same names, as text; null leaves a header out.
        name: tells schedules apart that have equal rows and are both meant.
        settings: where messages go, and how.
    """

    at_column: str | None = None
    delay_column: str | None = None
    body_columns: tuple[str, ...] = ()
    body_column: str | None = None
    id_column: str | None = None
    header_columns: tuple[str, ...] = ()
    name: str = ""
    settings: SinkSettings = field(repr=False)

    def digest(self) -> str:
        """Tells plans apart that make other messages of the same rows. The broker's address is no part of it."""
        target = sorted((name, str(value)) for name, value in self.settings.constants.items())
        parts: tuple[Any, ...]
        parts = (self.at_column, self.body_columns, self.body_column, self.id_column, self.header_columns, self.name)
        if self.delay_column is not None:
            parts += (self.delay_column,)
        return hashlib.sha256(repr((parts, target)).encode()).hexdigest()[:32]

    def ledger_digest(self) -> str:
        """Tells apart what ledgers are about: plans, and the infrastructures that delay what they make.

        Message ids are not made of it: however a row is delayed, it is the same message.
        """
        infrastructure = self.settings.infrastructure
        if infrastructure == Clock():
            # What ledgers were begun with before infrastructures counted.
            return self.digest()
        parts = (self.digest(), infrastructure.name, infrastructure)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    @property
    def time_column(self) -> str:
        """The column that says when a message is due, or in what time.

        Raises:
            InvalidInputError: there is none, or two.
        """
        found = [one for one in (self.at_column, self.delay_column) if one is not None]
        if len(found) != 1:
            raise InvalidInputError("name the column of due times or that of delays, and not both")
        return found[0]

    @property
    def broker(self) -> str:
        """The broker and its virtual host, without user and password."""
        url = BrokerUrl.parse(self.settings.url)
        return f"{','.join(f'{host}:{port}' for host, port in url.hosts)}/{url.vhost.removeprefix('/')}"

    def check(self) -> None:
        """See whether the broker and the target are there, before anything takes its time.

        Raises:
            TargetNotFoundError: there is no such queue or exchange.
            BrokerError: the broker cannot be asked.
        """
        asyncio.run(self._check())

    async def _check(self) -> None:
        constants = self.settings.constants
        if (queue := constants.get("to")) is not None:
            what, target = f"queue {queue!r}", Topology(queues=[Queue(queue)])
        else:
            exchange = constants.get("exchange", "")
            # The default exchange is there, and may not be asked for.
            what, target = f"exchange {exchange!r}", Topology([Exchange(exchange)] if exchange else [])
        connection = await Connection.open(BrokerUrl.parse(self.settings.url))
        try:
            if not await exists(connection, target):
                raise TargetNotFoundError(f"the {what} does not exist on {self.broker}: declare it, or name another")
        finally:
            await connection.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A table of messages as a whole.

    Attributes:
        rows: how many there are.
        checksum: over all of them, in whatever order.
        without_time: rows without a due time or delay, or with one that cannot be read.
        without_body: rows whose body is null.
        too_late: rows that are due later than the infrastructure can delay.
        past: rows that are due already: they are delivered at once.
        first: when the first is due, None where there is none. Delays are counted from when it was looked at.
        last: when the last is due; the end of the year 9999 where that is later.
    """

    rows: int
    checksum: int
    without_time: int
    without_body: int
    too_late: int
    past: int
    first: datetime | None
    last: datetime | None

    @property
    def bad(self) -> int:
        """Rows that cannot be sent."""
        return self.without_time + self.without_body + self.too_late


def messages(rows: DataFrame, plan: Plan) -> DataFrame:
    """The messages of rows, in the columns of the sink: ``value``, ``deliver_at`` or ``delay``, ``message_id``, and
    ``headers``.

    Rows that are alike are counted: the second one gets a message id of its own, so that both arrive.

    Raises:
        InvalidColumnError: a column is not there, or cannot be used so.
    """
    return _identified(_digested(rows, plan), plan).select(*_columns(plan))


def survey(rows: DataFrame, plan: Plan, *, now: datetime) -> Survey:
    """Look over the messages of rows.

    Raises:
        InvalidColumnError: see :func:`messages`.
        InvalidRowError: values of the id column are there more than once.
    """
    # Infrastructures that go round hold longer delays than there are years.
    longest = min(plan.settings.infrastructure.max_delay, LATEST - now)
    latest = literal(now + longest)
    digested = _digested(rows, plan)
    due = due_of(digested, now)
    found = digested.agg(
        F.count(F.lit(1)).alias("rows"),
        F.coalesce(F.bit_xor(F.xxhash64(_DIGEST)), F.lit(0)).alias("checksum"),
        F.count_if(due.isNull()).alias("without_time"),
        F.count_if(due.isNotNull() & F.col("value").isNull()).alias("without_body"),
        F.count_if(F.col("value").isNotNull() & (due > latest)).alias("too_late"),
        F.count_if(due < literal(now)).alias("past"),
        F.unix_micros(F.least(F.min(due), literal(LATEST))).alias("first"),
        F.unix_micros(F.least(F.max(due), literal(LATEST))).alias("last"),
    ).collect()[0]
    if plan.id_column is not None:
        _refuse_repeated_ids(digested, plan.id_column)
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


def head_for(ledger: Ledger, plan: Plan, found: Survey, *, part_rows: int = PART_ROWS) -> Head:
    """What to begin a ledger for these rows with, or to go on with, where it was begun for the very same.

    Nothing is written yet.

    Raises:
        InvalidInputError: it was begun for another plan, or for other rows.
    """
    head = ledger.head()
    if head is None:
        parts = min(max(-(-found.rows // part_rows), 1), MAX_PARTS)
        return Head(
            plan=plan.ledger_digest(), broker=plan.broker, rows=found.rows, checksum=found.checksum, parts=parts
        )
    if head.plan != plan.ledger_digest():
        raise InvalidInputError(
            f"the ledger {ledger.folder} was begun with other settings of target, columns, name or delay "
            "infrastructure: repeat those to go on, or name another ledger to begin anew"
        )
    if head.broker != plan.broker:
        raise InvalidInputError(
            f"the ledger {ledger.folder} was begun for the broker {head.broker}, and this is {plan.broker}: name "
            "another ledger"
        )
    if (head.rows, head.checksum) != (found.rows, found.checksum):
        raise InvalidInputError(
            f"the input is not what it was when the ledger {ledger.folder} was begun ({head.rows:,} rows then, "
            f"{found.rows:,} now, or other values): go on with that one, or name another ledger to send all of this one"
        )
    return head


def send(rows: DataFrame, plan: Plan, ledger: Ledger, head: Head) -> DataFrame:
    """Send the messages of those rows whose parts the ledger does not have.

    Returns:
        ``part``, ``sent`` and ``rejected``: a row for each part that was sent.

    Raises:
        FolderInUseError: another run goes on with the ledger.
        TargetNotFoundError: the queue does not exist; the ledger is not begun.
        BrokerError: the broker cannot be reached, or refuses.
        PySparkException: a task failed, with the error of bide in its message; see
            :func:`bide.pipelines.session.spark_errors`. The parts that were done are in the ledger.
    """
    spark = rows.sparkSession
    with ledger.lock():
        before = ledger.parts()
        done = {one.part for one in before}
        if sum(one.sent + one.rejected for one in before) < head.rows:
            _send_rest(rows, plan, ledger, head, done)
    found = [(one.part, one.sent, one.rejected) for one in ledger.parts() if one.part not in done]
    return spark.createDataFrame(found, "part int, sent long, rejected long")


def _send_rest(rows: DataFrame, plan: Plan, ledger: Ledger, head: Head, done: Collection[int]) -> None:
    settings = plan.settings
    if (queue := settings.constants.get("to")) is not None:
        # Once, before many tasks do it at the same time: and whatever is wrong is said at once.
        with connect_sync(settings.url, infrastructure=settings.infrastructure, declare=settings.declare) as client:
            client.wait_for(client.client.bind(queue))
    if ledger.head() is None:
        ledger.begin(head)
    part = F.pmod(F.hash(_DIGEST), F.lit(head.parts))
    left = _digested(rows, plan)
    if done:
        left = left.where(~part.isin(sorted(done)))
    # Spark gives a row to the partition that this very expression says.
    placed = _identified(left.repartition(head.parts, F.col(_DIGEST)).withColumn(_PART, part), plan)
    columns = _columns(plan)
    writer = _PartWriter(plan=plan, columns=columns, ledger=ledger, checksum=head.checksum % (1 << 64))
    write(placed.select(_PART, *columns), writer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartWriter(DataSourceArrowWriter):
    """Sends one part, and writes it down: what a task does."""

    plan: Plan
    columns: tuple[str, ...]
    ledger: Ledger
    checksum: int

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
            Place(run=self.plan.digest(), partition=number),
            file=f"part-{number:05}-{self.plan.ledger_digest()}-{self.checksum:016x}",
        )
        self.ledger.add(Part(part=number, sent=sent.confirmed, rejected=sent.rejected))
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


def _digested(rows: DataFrame, plan: Plan) -> DataFrame:
    """The messages of rows without their ids, each with a digest of all that is in it."""
    _check_columns(rows, plan)
    value = _body(rows, plan)
    time = rows[_quoted(plan.time_column)]
    if plan.at_column is not None:
        time = time.try_cast("timestamp")
    columns: dict[str, Column] = {"value": value, _time(plan): time}
    if plan.header_columns:
        entries = [
            F.struct(F.lit(name).alias("key"), rows[_quoted(name)].cast("string").alias("value"))
            for name in plan.header_columns
        ]
        columns["headers"] = F.map_from_entries(F.filter(F.array(*entries), lambda one: one["value"].isNotNull()))
    if plan.id_column is not None:
        columns["message_id"] = rows[_quoted(plan.id_column)].cast("string")
    told = F.unix_micros(time) if plan.at_column is not None else time
    parts: list[Any] = [F.lit(plan.digest()), told.cast("string")]
    if "headers" in columns:
        parts.append(F.to_json(columns["headers"]))
    if "message_id" in columns:
        parts.append(columns["message_id"])
    # The length before each part: no two rows run together to the same text.
    known = [
        F.concat(F.length(one).cast("string"), F.lit(":"), one) for one in (F.coalesce(p, F.lit("-")) for p in parts)
    ]
    whole = F.concat(*(one.cast("binary") for one in known), F.coalesce(value.cast("binary"), F.lit(b"")))
    columns[_DIGEST] = F.substring(F.sha2(whole, 256), 1, 32)
    return rows.select(*(column.alias(name) for name, column in columns.items()))


def _identified(digested: DataFrame, plan: Plan) -> DataFrame:
    """With message ids: the digests, and for rows that are alike a number too."""
    if plan.id_column is not None:
        return digested
    number = F.row_number().over(Window.partitionBy(_DIGEST).orderBy(_DIGEST))
    ids = F.when(number == 1, F.col(_DIGEST)).otherwise(F.concat_ws("-", _DIGEST, number.cast("string")))
    return digested.withColumn("message_id", ids)


def _body(rows: DataFrame, plan: Plan) -> Column:
    if plan.body_column is not None:
        return rows[_quoted(plan.body_column)]
    taken = {plan.time_column, *plan.header_columns}
    names = plan.body_columns or tuple(name for name in rows.columns if name not in taken)
    # A null stays a null: its absence would be another message.
    return F.to_json(F.struct(*(rows[_quoted(name)] for name in names)), {"ignoreNullFields": "false"})


def _check_columns(rows: DataFrame, plan: Plan) -> None:
    if plan.body_column is not None and plan.body_columns:
        raise InvalidInputError("both one column as the body and columns for a JSON body were given: give one of them")
    named = (plan.time_column, plan.body_column, plan.id_column, *plan.body_columns, *plan.header_columns)
    for name in named:
        if name is not None and name not in rows.columns:
            raise InvalidColumnError(f"there is no column {name!r}: there are {', '.join(rows.columns)}")
    kind = rows.schema[plan.time_column].dataType
    if plan.at_column is not None and not isinstance(kind, TimestampType | TimestampNTZType | DateType | StringType):
        raise InvalidColumnError(
            f"the column {plan.at_column!r} is {kind.simpleString()}, which is no time: make a timestamp of it"
        )
    is_delay, wanted = COLUMNS["delay"]
    if plan.delay_column is not None and not is_delay(kind):
        raise InvalidColumnError(
            f"the column {plan.delay_column!r} is {kind.simpleString()}, which is no delay: it has to be {wanted}"
        )
    if plan.body_column is not None:
        kind = rows.schema[plan.body_column].dataType
        if not isinstance(kind, StringType | BinaryType):
            raise InvalidColumnError(
                f"the column {plan.body_column!r} is {kind.simpleString()}, which is no body as it is: name it among "
                "the columns of a JSON body"
            )


def _refuse_repeated_ids(digested: DataFrame, column: str) -> None:
    unfit = "count > 1 or message_id is null or message_id = ''"
    repeated = digested.groupBy("message_id").count().where(unfit).limit(3).collect()
    if repeated:
        shown = ", ".join(
            f"{row['message_id'] or ('null' if row['message_id'] is None else 'an empty text')} ({row['count']} times)"
            for row in repeated
        )
        raise InvalidRowError(f"the values of the column {column!r} are no message ids, each being there once: {shown}")


def _columns(plan: Plan) -> tuple[str, ...]:
    """Those of messages, the two first of which are never null."""
    return ("value", _time(plan), "message_id", *(("headers",) if plan.header_columns else ()))


def _time(plan: Plan) -> str:
    return "delay" if plan.at_column is None else "deliver_at"


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _moment(micros: int | None) -> datetime | None:
    return None if micros is None else datetime.fromtimestamp(0, UTC) + timedelta(microseconds=micros)
